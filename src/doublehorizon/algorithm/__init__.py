"""The paper: replay, ensemble, fit, the two rollouts, values, updates; `agent.py` is Algorithm 1 on one page.

May import the root; nothing here knows of environments, processes or files.
"""
