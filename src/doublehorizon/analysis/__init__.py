"""Looking at runs: what the paper measures, curves, reports, videos, exported policies, speed.

May import everything but `cli`.
"""
