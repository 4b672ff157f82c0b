"""What must be set before JAX starts: the platform, and bit-for-bit arithmetic on a GPU. No JAX here."""

import os

DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"  # no atomic additions, and no choosing of kernels by timing
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}


def prepare_jax(device: str | None, deterministic: bool = False) -> None:
    """Sets JAX's platform and determinism for this process; without effect where JAX runs already."""
    os.environ.update(platform_variables(device))
    if deterministic:
        ask_for_determinism()


def platform_variables(device: str | None) -> dict[str, str]:
    """Environment variables by which JAX uses "cpu" or "gpu"; none for the best there is."""
    return {} if device is None else {"JAX_PLATFORMS": _PLATFORMS[device]}


def ask_for_determinism() -> None:
    """Sets XLA's flag for this process; without effect where JAX runs already."""
    if not asked_for_determinism():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC_FLAG}".strip()


def asked_for_determinism() -> bool:
    """Whether the flag was set, here or by the user."""
    return DETERMINISTIC_FLAG in os.environ.get("XLA_FLAGS", "")
