"""Acting in environments with NumPy alone: the policy, what explores, and the processes that collect and test.

May import `envs` and the root. No JAX.
"""
