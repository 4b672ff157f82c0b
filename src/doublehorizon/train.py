"""The loop around the algorithm: collect, learn, evaluate, log, keep. Host code; the arithmetic is in `agent.py`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from doublehorizon import agent
from doublehorizon.agreement import check_reward, check_termination
from doublehorizon.checkpoints import Keeper, NoKeeper
from doublehorizon.errors import RunError
from doublehorizon.estimate import seconds_left
from doublehorizon.evaluations import Evaluations
from doublehorizon.learning import Clock, Metrics, learn
from doublehorizon.logs import RunLogs
from doublehorizon.progress import Programs, Progress, Snapshot, prior_batch
from doublehorizon.signals import unstoppable
from doublehorizon.trackers import Tracker
from doublehorizon.view import View
from doublehorizon.workers import Crew


class Callback:
    """What a user wants done on the way. Each method may return False to stop the run; a plain function in its place is
    called as `on_iteration`."""

    def on_iteration(self, progress: Progress) -> bool | None:
        """After each iteration; `progress.step`, `progress.policies` and `progress.last_returns()` tell how it goes."""

    def on_evaluation(self, progress: Progress, step: int, returns: dict[int, float]) -> bool | None:
        """When the test that was started at `step` is done: the mean return of each seed."""


CallbackLike = Callback | Callable[[Progress], Any] | None


class _Function(Callback):
    def __init__(self, function: Callable[[Progress], Any]):
        self._function = function

    def on_iteration(self, progress: Progress) -> Any:
        return self._function(progress)


def train(
    progress: Progress,
    crew: Crew,
    out: Path | None,
    view: View,
    callback: CallbackLike = None,
    trackers: Sequence[Tracker] = (),
) -> None:
    """Iterates until the run's goal is reached, or the callback returns False. However it ends, the run stands at the
    end of an iteration, and `out` holds a checkpoint of that."""
    boundary = progress.snapshot(progress.log_sizes)
    keeper = NoKeeper() if out is None else Keeper(out, progress)
    try:
        if not progress.log_sizes:  # a new folder has a checkpoint first of all: there always is one to go on from
            keeper.keep_first(boundary)
        logs = _opened_logs(progress, out, view, trackers)
        boundary = progress.snapshot(logs.sizes())
        keeper.keep(boundary)
        callback = callback if isinstance(callback, Callback) else _Function(callback or (lambda progress: None))
        for boundary in _boundaries(progress, crew, logs, view, callback):
            keeper.offer(boundary)
    except BaseException:
        with unstoppable(), suppress(RunError):  # a disk that fails now has failed before: that is being told
            progress.rewind(boundary)
            keeper.keep_last(boundary)
        raise
    with unstoppable():
        progress.log_sizes = boundary.log_sizes
        keeper.keep_last(boundary)


def _boundaries(progress: Progress, crew: Crew, logs: RunLogs, view: View, callback: Callback) -> Iterator[Snapshot]:
    """The run itself: a snapshot after each iteration, and one at the end."""
    evaluations = Evaluations(progress, crew, view, logs)
    clock = Clock(progress.seconds)
    view.begin(progress.step, progress.returns)
    if progress.programs is None:
        progress.programs = Programs(progress)
    if progress.iteration == 0:
        _learn_from_records(progress, clock, logs, view)
        evaluations.start()
    going = True
    while going and progress.step < progress.goal:
        metrics = _iterate(progress, crew, clock, view)
        if metrics is not None:
            _log_progress(logs, progress, metrics, clock.laps | _elapsed(progress))
        if _is_evaluation(progress):
            evaluations.start()
            progress.episodes = crew.episodes  # an environment object has been reset
        going = _told(callback, progress, evaluations.gather())
        _show_progress(progress, metrics, clock.laps, view)
        going = callback.on_iteration(progress) is not False and going
        yield progress.snapshot(logs.sizes())
    if progress.policies is not None:
        evaluations.start()
    view.phase("evaluating")
    _told(callback, progress, evaluations.gather(block=True))
    _tell_notes(crew, view)
    progress.episodes = crew.episodes
    yield progress.snapshot(logs.sizes())


def _told(callback: Callback, progress: Progress, tests: list[int]) -> bool:
    """Tells of tests that are done; whether to go on."""
    return all([callback.on_evaluation(progress, step, progress.returns[step]) is not False for step in tests])


def _opened_logs(progress: Progress, out: Path | None, view: View, trackers: Sequence[Tracker]) -> RunLogs:
    logs = RunLogs(out, progress.log_sizes, trackers)
    if logs.lost:
        view.warn(f"{out}: progress.csv or eval.csv is shorter than it was; its last rows are missing")
    return logs


def _learn_from_records(progress: Progress, clock: Clock, logs: RunLogs, view: View) -> None:
    """Where what was recorded before is enough, the first policy comes from it alone: nothing random is done."""
    if progress.first_fit > 0 or progress.policies is not None:
        return
    ends = check_termination(progress, prior_batch(progress), view)
    metrics = ends | learn(progress, clock, view)
    progress.seconds = clock.total()
    _log_progress(logs, progress, metrics, {"time/collect_seconds": 0.0, **clock.laps, **_elapsed(progress)})


def _elapsed(progress: Progress) -> dict[str, float]:
    return {"time/time_elapsed": progress.seconds}


def _show_progress(progress: Progress, metrics: Metrics | None, laps: dict[str, float], view: View) -> None:
    """Where the run stands and, once something was learnt, how long the rest takes at most."""
    steps, learnt = progress.iteration_steps, progress.iteration - progress.first_fit
    is_whole = learnt > 0 or progress.turn_steps == steps  # in many turns, the first iteration has one that learns
    if metrics is None or not is_whole:
        view.advance(progress.step, progress.iteration)
        return
    last = -(-progress.goal // (steps * progress.spec.action_repeat))
    plan = agent.plan(progress.config, progress.task, progress.num_rows, steps, first=learnt == 0)
    done = (plan, float(np.mean(metrics.get("model/epochs", 0.0))), laps)
    rows = [progress.stored_at(i) for i in range(progress.iteration + 1, last + 1)]
    left = seconds_left(progress.config, progress.task, steps, rows, done)
    figures = {name: float(np.mean(value)) for name, value in metrics.items()}
    view.advance(progress.step, progress.iteration, left, figures)
    if learnt == (0 if progress.first_fit > 0 and progress.turn_steps == steps else 1):  # the first whole one
        view.estimated(progress.seconds + left)


def _iterate(progress: Progress, crew: Crew, clock: Clock, view: View) -> Metrics | None:
    """One iteration: a turn with a model, many without one. The metrics, per seed, are those of its last turn, and
    None while only random steps are collected."""
    clock.start()
    learns = progress.policies is not None
    steps = progress.turn_steps if learns else progress.iteration_steps
    metrics, ends = None, []
    while progress.begun < progress.iteration_steps:
        view.phase("collecting")
        batch = crew.collect(progress.policies, steps, progress.step)
        _tell_notes(crew, view)
        ends.append(check_termination(progress, batch, view))
        check_reward(progress, batch, view)
        progress.begun += steps
        progress.store(batch)
        progress.episodes = crew.episodes
        clock.lap("time/collect_seconds")
        if learns or progress.iteration + 1 >= progress.first_fit:
            metrics = learn(progress, clock, view)
    progress.completed()
    progress.seconds = clock.total()
    return None if metrics is None else _mean_of_turns(ends) | metrics


def _mean_of_turns(turns: list[Metrics]) -> Metrics:
    """Figures of the steps that were collected; those of turns in which there was nothing to count do not count."""
    if len(turns) == 1:
        return turns[0]
    stacked = {name: np.stack([turn[name] for turn in turns]).astype(np.float64) for name in turns[0]}
    counted = {name: np.isfinite(values) for name, values in stacked.items()}
    with np.errstate(invalid="ignore"):  # nothing to count in any turn
        return {
            name: np.where(counted[name], values, 0.0).sum(0) / counted[name].sum(0) for name, values in stacked.items()
        }


def _tell_notes(crew: Crew, view: View) -> None:
    for note in crew.pop_notes():
        view.warn(note)


def _is_evaluation(progress: Progress) -> bool:
    due = progress.iteration % progress.config.loop.evaluate_every == 0
    return progress.policies is not None and (due or progress.iteration == progress.first_fit)


def _log_progress(logs: RunLogs, progress: Progress, metrics: Metrics, seconds: dict[str, float]) -> None:
    for k, seed in enumerate(progress.seeds):
        figures = {name: value[k].item() for name, value in sorted(metrics.items())}
        logs.progress(progress.step, progress.iteration, seed, figures | seconds)
