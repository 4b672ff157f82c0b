"""Environments: how they are made, the paper's own five, and when their episodes end. NumPy only, no JAX."""

from doublehorizon.envs.make import EnvSpec, describe, factory, make

__all__ = ["EnvSpec", "describe", "factory", "make"]
