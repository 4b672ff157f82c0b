"""Environments: how they are made, the paper's own five, and when their episodes end. NumPy only, no JAX."""
