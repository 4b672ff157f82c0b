"""The loop around the algorithm: collect, check, learn, evaluate, log; and the live view of it.

May import `run` and what that may import.
"""
