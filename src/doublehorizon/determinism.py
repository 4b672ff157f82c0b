"""Bit for bit on a GPU too: an option of XLA that must be set before JAX starts. No JAX here."""

import os

DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"  # no atomic additions, and no choosing of kernels by timing


def ask_for_determinism() -> None:
    """Sets it for this process; without effect where JAX runs already."""
    if not asked_for_determinism():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC_FLAG}".strip()


def asked_for_determinism() -> bool:
    return DETERMINISTIC_FLAG in os.environ.get("XLA_FLAGS", "")
