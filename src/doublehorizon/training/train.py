"""The loop around the algorithm: collect, check, learn, evaluate, log, keep. Host code; the arithmetic is in
`algorithm/agent.py`."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from doublehorizon.acting.env_runner import Batch
from doublehorizon.acting.policy import best_policy_file
from doublehorizon.acting.recorded_data import longest_recorded_cut
from doublehorizon.acting.workers import WorkerPool
from doublehorizon.algorithm import agent
from doublehorizon.errors import RunError, UserError
from doublehorizon.run.checkpoint_writer import CheckpointWriter, NoCheckpoints
from doublehorizon.run.logs import RunLogs
from doublehorizon.run.progress import Programs, Progress, prior_batch
from doublehorizon.run.run_state import RunState
from doublehorizon.run.trackers import Tracker
from doublehorizon.schedule import discount, evaluate_every
from doublehorizon.signals import unstoppable
from doublehorizon.training.callbacks import Callback, Evaluation, SaveBest, as_callback
from doublehorizon.training.env_checks import check_reward, check_termination
from doublehorizon.training.evaluations import Evaluations
from doublehorizon.training.learning_phase import Clock, SeedMetrics, learn
from doublehorizon.training.live_view import View
from doublehorizon.training.time_left import seconds_left
from doublehorizon.training.trouble_signs import TroubleSigns

_EPISODE_FIGURES = ("rollout/ep_rew_mean", "rollout/ep_len_mean")


def train(
    progress: Progress,
    pool: WorkerPool,
    out: Path | None,
    view: View,
    callback: Callback | None = None,
    trackers: Sequence[Tracker] = (),
) -> None:
    """Iterates until the run's goal is reached, or the callback returns False. However it ends, the run stands at the
    end of an iteration, and `out` holds a checkpoint of that, and the policy with the best test."""
    boundary = progress.state
    called = as_callback(callback if out is None else [SaveBest(best_policy_file(out)), callback])
    checkpoints = NoCheckpoints() if out is None else CheckpointWriter(out, progress)
    try:
        if not boundary.log_sizes:  # a new folder has a checkpoint first of all: there always is one to go on from
            checkpoints.write_first(boundary)
        logs = _open_logs(progress, out, view, trackers)
        boundary = progress.update(log_sizes=logs.sizes())
        checkpoints.write(boundary)
        for boundary in _boundaries(progress, pool, logs, view, called):
            checkpoints.write_if_due(boundary)
    except BaseException:
        with unstoppable(), suppress(RunError):  # a disk that fails now has failed before: that is being reported
            progress.go_back(boundary)
            rows = pool.unkept(progress.step)
            checkpoints.write_last(boundary if rows is None else progress.update(ahead=rows))
        raise
    with unstoppable():
        checkpoints.write_last(boundary)


def _boundaries(
    progress: Progress, pool: WorkerPool, logs: RunLogs, view: View, callback: Callback
) -> Iterator[RunState]:
    """The run itself: its state after each iteration, and at the end."""
    evaluations = Evaluations(progress, pool, view, logs)
    clock, signs = Clock(progress.state.seconds), TroubleSigns()
    view.begin(progress.step, progress.iteration, progress.returns)
    if progress.machinery.programs is None:
        progress.machinery.programs = Programs(progress)
    pool.restore(progress.step)
    _show_notes(pool, view)
    if progress.iteration == 0:
        _learn_from_records(progress, clock, logs, view)
        evaluations.start()
    going = True
    while going and progress.step < progress.goal:
        metrics = _iterate(progress, pool, clock, view)
        if metrics is not None:
            _log_progress(logs, progress, metrics, clock.laps | _elapsed(progress))
        if _is_evaluation(progress):
            evaluations.start()
            progress.update(episodes=pool.episodes)  # an environment object has been reset
        going = _report_evaluations(callback, progress, evaluations.gather())
        _show_signs(signs, progress, metrics or {}, view)
        _show_progress(progress, metrics, clock.laps, view, pool.is_single)
        going = callback.on_iteration(progress) is not False and going
        yield progress.update(log_sizes=logs.sizes())
    if progress.policies is not None:
        evaluations.start()
    elif going:
        random = progress.setup.first_fit * progress.setup.iteration_steps * progress.spec.action_repeat
        view.say(f"{progress.step} steps were all random, nothing is learnt yet: that begins after {random} of them")
    view.phase("evaluating")
    _report_evaluations(callback, progress, evaluations.gather(block=True))
    _show_notes(pool, view)
    yield progress.update(episodes=pool.episodes, log_sizes=logs.sizes())


def _report_evaluations(callback: Callback, progress: Progress, done: list[Evaluation]) -> bool:
    """Calls back for the tests that are done; whether to go on."""
    return all([callback.on_evaluation(progress, evaluation) is not False for evaluation in done])


def _open_logs(progress: Progress, out: Path | None, view: View, trackers: Sequence[Tracker]) -> RunLogs:
    logs = RunLogs(out, progress.state.log_sizes, trackers)
    if logs.lost:
        view.warn(f"{out}: progress.csv or eval.csv is shorter than it was; its last rows are missing")
    return logs


def _learn_from_records(progress: Progress, clock: Clock, logs: RunLogs, view: View) -> None:
    """Where what was recorded before is enough, the first policy comes from it alone: nothing random is done."""
    if progress.setup.first_fit > 0 or progress.policies is not None:
        return
    recorded = prior_batch(progress)
    ends = _check_termination(progress, recorded, view)
    if not progress.spec.registered and progress.config.loop.time_limit is None:  # nobody says how long episodes are
        truncated = longest_recorded_cut({name: rows[0] for name, rows in recorded.items()})
        _see_truncation(progress, truncated, 0, view)
    no_episodes = dict.fromkeys(_EPISODE_FIGURES, np.full(len(progress.seeds), np.nan))
    metrics = ends | no_episodes | learn(progress, clock, view)
    progress.update(seconds=clock.total())
    no_steps = {"time/collect_seconds": 0.0, "time/waited_seconds": 0.0}
    _log_progress(logs, progress, metrics, no_steps | clock.laps | _elapsed(progress))


def _iterate(progress: Progress, pool: WorkerPool, clock: Clock, view: View) -> SeedMetrics | None:
    """One iteration: a turn of collecting and learning, or many where `loop.steps_per_turn` says so. The metrics, per
    seed, are those of its last turn, and None while only random steps are collected."""
    clock.start()
    pool.begin()
    setup, learns = progress.setup, progress.policies is not None
    steps = setup.turn_steps if learns else setup.iteration_steps
    learns = learns or progress.iteration + 1 >= setup.first_fit
    metrics, ends = None, []
    while progress.state.begun < setup.iteration_steps:
        view.phase("collecting")
        clock.end_wait()
        batch = pool.collect(progress.policies, steps, progress.step, then_waits=learns)
        clock.begin_wait()
        _show_notes(pool, view)
        ends.append(_check_termination(progress, batch, view) | _training_episodes(pool))
        _check_reward(progress, batch, view)
        _see_truncation(progress, pool.longest_cut, pool.longest, view)
        progress.update(begun=progress.state.begun + steps, episodes=pool.episodes, ahead=pool.ahead)
        progress.store(batch)
        clock.lap("time/collect_seconds")
        if learns:
            repeats = 0 if metrics is None else metrics["train/repeats"]
            metrics = learn(progress, clock, view)
            metrics["train/repeats"] += repeats
    progress.update(iteration=progress.iteration + 1, begun=0, seconds=clock.total())
    return None if metrics is None else _mean_of_turns(ends) | metrics


def _check_termination(progress: Progress, batch: Batch, view: View) -> SeedMetrics:
    """Checks the termination rule. One that contradicts the environment would teach the policy a wrong world: from then
    on the model learns when episodes end, unless the user insists on the rule."""
    found = check_termination(progress.spec, batch)
    if found.problem:
        name = progress.spec.name
        if progress.config.termination == "known":
            raise UserError(
                f"the termination rule of {name} contradicts the environment in {found.problem}. Mend the rule (a "
                "method is_terminal(next_obs) that works on arrays [..., observation]), or let it be learnt "
                "(termination 'auto')."
            )
        view.warn(
            f"{name}: its known termination rule is wrong in {found.problem}; the model now learns when episodes end"
        )
        progress.update(termination="learned")
        progress.update(agent=agent.learn_termination(progress.config, progress.task, progress.agent))
        progress.machinery.programs = Programs(progress)
    return found.metrics


def _see_truncation(progress: Progress, truncated: int, longest: int, view: View) -> None:
    """Where the environment itself truncates episodes, sooner than the time limit says: values look less far ahead.
    `truncated` is the length of the longest episode that was truncated, 0 if none was, `longest` that of any: an
    episode that lasts longer than a truncated one shows that this was not the limit."""
    known = progress.state.cut_after
    if known is None and not 0 < truncated < progress.spec.time_limit:
        return
    after = min(max(known or 0, truncated, longest), progress.spec.time_limit)
    if after == known:
        return
    before = discount(progress.config, progress.task.episode_steps)
    progress.update(cut_after=after)
    now = discount(progress.config, progress.task.episode_steps)
    if now != before:
        view.say(f"{progress.spec.name}: episodes last up to {after} steps; the discount is {now:.4g}")
        progress.machinery.programs = Programs(progress)


def _training_episodes(pool: WorkerPool) -> SeedMetrics:
    """Mean return and length of the episodes that ended while collecting; not a number where none did."""
    ended = [np.array(pool.ended[seed] or [(np.nan, np.nan)]) for seed in pool.seeds]
    return dict(zip(_EPISODE_FIGURES, np.stack([found.mean(axis=0) for found in ended], axis=1), strict=True))


def _check_reward(progress: Progress, batch: Batch, view: View) -> None:
    """Says, once, where a user's reward function differs from the rewards of the first steps."""
    problem = check_reward(progress.task, batch) if progress.step == 0 else ""
    if problem:
        view.warn(
            f"{progress.spec.name}: the given reward function differs from the environment's reward in {problem}; the "
            "policy learns from the function"
        )


def _num_learnt(progress: Progress) -> int:
    """Iterations since the first fit."""
    return progress.iteration - progress.setup.first_fit


def _show_signs(signs: TroubleSigns, progress: Progress, metrics: SeedMetrics, view: View) -> None:
    steps = _num_learnt(progress) * progress.setup.iteration_steps
    updates = int(steps * progress.config.policy.updates_per_step)
    for line in signs.new(progress.seeds, updates, metrics, progress.returns):
        view.warn(line)


def _elapsed(progress: Progress) -> dict[str, float]:
    return {"time/time_elapsed": progress.state.seconds}


def _show_progress(
    progress: Progress, metrics: SeedMetrics | None, laps: dict[str, float], view: View, is_single: bool
) -> None:
    """Where the run stands and, once something was learnt, how long the rest takes at most."""
    setup = progress.setup
    steps, learnt = setup.iteration_steps, _num_learnt(progress)
    is_whole = learnt > 0 or setup.turn_steps == steps  # in many turns, the first iteration has one that learns
    if metrics is None or not is_whole:
        view.advance(progress.step, progress.iteration)
        return
    last = -(-progress.goal // (steps * setup.spec.action_repeat))
    effort = setup.first_effort if learnt == 0 else None
    budget = agent.iteration_budget(setup.config, progress.task, progress.num_rows, steps, effort)
    done = (budget, float(np.mean(metrics.get("model/epochs", 0.0))), laps)
    rows = [setup.stored_at(i) for i in range(progress.iteration + 1, last + 1)]
    left = seconds_left(setup.config, progress.task, steps, rows, done)
    figures = {name: float(np.mean(value[np.isfinite(value)])) for name, value in metrics.items() if _any(value)}
    figures |= {"time/waited_seconds": laps["time/waited_seconds"]} if is_single else {}
    view.advance(progress.step, progress.iteration, left, figures)
    if learnt == (0 if setup.first_fit > 0 and setup.turn_steps == steps else 1):  # the first whole one
        view.estimated(progress.state.seconds + left)


def _any(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())


def _mean_of_turns(turns: list[SeedMetrics]) -> SeedMetrics:
    """Figures of the steps that were collected; those of turns in which there was nothing to count do not count."""
    if len(turns) == 1:
        return turns[0]
    stacked = {name: np.stack([turn[name] for turn in turns]).astype(np.float64) for name in turns[0]}
    counted = {name: np.isfinite(values) for name, values in stacked.items()}
    with np.errstate(invalid="ignore"):  # nothing to count in any turn
        return {
            name: np.where(counted[name], values, 0.0).sum(0) / counted[name].sum(0) for name, values in stacked.items()
        }


def _show_notes(pool: WorkerPool, view: View) -> None:
    for note in pool.pop_notes():
        view.warn(note)


def _is_evaluation(progress: Progress) -> bool:
    due = progress.iteration % evaluate_every(progress.config, progress.setup.spec.time_limit) == 0
    return progress.policies is not None and (due or progress.iteration == progress.setup.first_fit)


def _log_progress(logs: RunLogs, progress: Progress, metrics: SeedMetrics, seconds: dict[str, float]) -> None:
    for k, seed in enumerate(progress.seeds):
        figures = {name: value[k].item() for name, value in sorted(metrics.items())}
        logs.progress(progress.step, progress.iteration, seed, figures | seconds)
