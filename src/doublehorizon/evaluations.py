"""Test episodes in the background: started with a snapshot of the policies, gathered when they are done."""

from doublehorizon.logs import RunLogs
from doublehorizon.progress import Pending, Progress
from doublehorizon.view import View
from doublehorizon.workers import Crew


class Evaluations:
    """The tests of a run. What is not done yet is in `progress.pending`, from where a later process can do it again."""

    def __init__(self, progress: Progress, crew: Crew, view: View, logs: RunLogs):
        self._progress, self._crew, self._view, self._logs = progress, crew, view, logs
        self._found: dict[int, dict[int, float]] = {}
        for step in sorted(progress.pending):
            self._send(step)

    def start(self) -> None:
        """A test of the policies as they are; before the first fit, of random actions or the seed policy. There is one
        at each step at most."""
        step = self._progress.step
        if step in self._progress.returns or step in self._progress.pending:
            return
        if self._progress.config.loop.evaluation_episodes > 0:
            self._progress.pending[step] = Pending(self._progress.policies, self._progress.seconds)
            self._send(step)

    def gather(self, block: bool = False) -> list[int]:
        """Logs what is done, in order; with `block`, waits for all. A row's time is that at which its policy was
        ready. Returns the steps of the tests that are done."""
        done = []
        for step, seed, value in self._crew.finished_evaluations(block):
            self._found.setdefault(step, {})[seed] = value
        for step in sorted(self._progress.pending):
            found = self._found.get(step, {})
            if len(found) < len(self._progress.seeds):
                break  # later ones wait, so that the log's order does not depend on who is faster
            returns = {seed: found[seed] for seed in self._progress.seeds}
            seconds = self._progress.pending[step].seconds
            for seed, value in returns.items():
                self._logs.evaluation(step, seconds, value, seed)
            self._progress.returns[step] = returns
            del self._progress.pending[step], self._found[step]
            self._view.evaluated(step, returns)
            done.append(step)
        return done

    def _send(self, step: int) -> None:
        episodes = self._progress.config.loop.evaluation_episodes
        self._crew.start_evaluation(self._progress.pending[step].policies, step, episodes)
