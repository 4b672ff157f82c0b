"""A run's state, and its life on the disk: checkpoints, replay files, logs.

May import `algorithm`, `acting`, `envs` and the root.
"""
