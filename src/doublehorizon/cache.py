"""JAX's persistent compilation cache, on by default: the second start of a run compiles little."""

import os
from pathlib import Path

import jax


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX was told of another place."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(base / "doublehorizon" / "jax"))
