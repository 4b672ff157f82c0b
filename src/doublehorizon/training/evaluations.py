"""Test episodes in the background: started with a snapshot of the policies, gathered when they are done."""

import numpy as np

from doublehorizon.acting.workers import WorkerPool
from doublehorizon.run.logs import RunLogs
from doublehorizon.run.progress import Progress
from doublehorizon.run.run_state import PendingEvaluation
from doublehorizon.training.callbacks import Evaluation
from doublehorizon.training.live_view import View, with_spread


class Evaluations:
    """The tests of a run. What is not done yet is in its state, from where a later process can do it again."""

    def __init__(self, progress: Progress, pool: WorkerPool, view: View, logs: RunLogs):
        self._progress, self._pool, self._view, self._logs = progress, pool, view, logs
        self._found: dict[int, dict[int, list[float]]] = {}
        for step in sorted(progress.state.pending):
            self._send(step)

    def start(self) -> None:
        """A test of the policies as they are; before the first fit, of random actions or the seed policy. There is one
        at each step at most."""
        step, state = self._progress.step, self._progress.state
        if step in state.returns or step in state.pending:
            return
        if self._pool.evaluation_episodes > 0:
            test = PendingEvaluation(state.policies, state.seconds)
            self._progress.update(pending=state.pending | {step: test})
            self._send(step)

    def gather(self, block: bool = False) -> list[Evaluation]:
        """The tests that are done, in order, which are logged; with `block`, waits for all. A row's time is that at
        which its policy was ready."""
        done = []
        for step, seed, episodes in self._pool.finished_evaluations(block):
            self._found.setdefault(step, {})[seed] = episodes
        for step, test in sorted(self._progress.state.pending.items()):
            found = self._found.get(step, {})
            if len(found) < len(self._progress.seeds):
                break  # later ones wait, so that the log's order does not depend on who is faster
            returns = {seed: float(np.mean(found[seed])) for seed in self._progress.seeds}
            spreads = {seed: float(np.std(found[seed], ddof=1)) for seed in returns if len(found[seed]) > 1}
            for seed, value in returns.items():
                self._logs.evaluation(step, test.seconds, value, seed)
            state = self._progress.state
            left = {at: pending for at, pending in state.pending.items() if at != step}
            self._progress.update(pending=left, returns=state.returns | {step: returns}, last_spreads=spreads)
            del self._found[step]
            self._view.evaluated(step, returns, with_spread(returns, spreads, len(next(iter(found.values())))))
            done.append(Evaluation(step, returns, test.policies))
        return done

    def _send(self, step: int) -> None:
        policies = self._progress.state.pending[step].policies
        self._pool.start_evaluation(policies, step, self._pool.evaluation_episodes)
