"""Many runs: the paper's experiments as jobs, on this machine or on a Ray cluster.

May import `api` and all below it.
"""
