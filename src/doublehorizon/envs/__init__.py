"""From what a user names (an id, a function, an environment) to a simulator with flat observations.

May import the root. No JAX.
"""
