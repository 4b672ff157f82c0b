"""Reads run folders, finished or running: their facts, policies, test returns and environment. Needs no JAX."""

import csv
import fcntl
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doublehorizon.acting.policy import NumpyPolicy, load_policy
from doublehorizon.atomic_files import read_file, read_json
from doublehorizon.config import Config, LoopConfig
from doublehorizon.envs.make import EnvSpec, Simulator, describe, make
from doublehorizon.errors import UserError


@dataclass(frozen=True)
class Run:
    """What `config.json` says."""

    folder: Path
    name: str
    env: dict[str, Any]
    seeds: list[int]
    steps: int
    loop: LoopConfig
    """Time limit and action repeat; a run of another version may have had fields that are not known here."""

    def policies(self, seeds: list[int] | None = None) -> dict[int, NumpyPolicy]:
        """Each seed's policy, or those of some seeds."""
        wanted = seeds or self.seeds
        unknown = [seed for seed in wanted if seed not in self.seeds]
        if unknown:
            raise UserError(f"{self.folder} has no seed {unknown[0]}. Its seeds: {', '.join(map(str, self.seeds))}.")
        files = {seed: self.folder / "policy" / f"seed{seed}.safetensors" for seed in wanted}
        missing = [file for file in files.values() if not file.exists()]
        if missing:
            raise UserError(f"{missing[0]} is not there: the run has not learnt a policy yet.")
        return {seed: load_policy(file) for seed, file in files.items()}

    def chosen_policies(self, seeds: tuple[int, ...], best: bool) -> dict[str, tuple[int, NumpyPolicy]]:
        """What a user asks for, by name, each with the seed of its episodes: `best`, the policy with the best test of
        the whole run, or the last ones of some seeds, by default of all."""
        if best and seeds:
            given = " ".join(map(str, seeds))
            raise UserError(f"--best is one policy of all seeds, so --seeds {given} cannot be given with it.")
        if best:
            return {"best": (self.seeds[0], load_policy(self.folder, best=True))}
        return {str(seed): (seed, policy) for seed, policy in self.policies(list(seeds)).items()}

    def simulator(self, env: str | None = None, render_mode: str | None = None) -> Simulator:
        """The run's environment, or the one that a user names: code is only imported if they do."""
        if env is None and (":" in self.name or not self.env.get("registered")):
            raise UserError(
                f"{self.folder} was trained on {self.name!r}, which is not a registered id: name what makes it with "
                "--env module:function."
            )
        made = make(env or self.name, self.loop, render_mode)
        return Simulator(made, _same_sizes(self, describe(made, Config(loop=self.loop), env or self.name)))

    def evaluations(self) -> dict[int, dict[int, float]]:
        """Test return by step and seed."""
        found: dict[int, dict[int, float]] = {}
        path = self.folder / "eval.csv"
        for row in read_rows(path):
            try:
                found.setdefault(int(row["step"]), {})[int(row["seed"])] = float(row["reward"])
            except (KeyError, ValueError) as problem:
                raise UserError(f"{path} is damaged: {type(problem).__name__} {problem}.") from problem
        return found


def read_run(folder: Path) -> Run:
    """Reads a run folder's `config.json`, or says what is wrong with it."""
    path = folder / "config.json"
    try:
        about = read_json(path)
        env, seeds = dict(about["env"]), [int(seed) for seed in about["seeds"]]
        steps, values = int(about.get("steps", 0)), about["config"]["loop"]
        limit, repeat = (_whole(values.get(name)) for name in ("time_limit", "action_repeat"))
        loop = LoopConfig(time_limit=limit, action_repeat=repeat)
        return Run(folder, str(env["name"]), env, seeds, steps, loop)
    except OSError as problem:
        raise UserError(f"{folder} is no run folder: {path.name} cannot be read ({problem.strerror}).") from problem
    except UserError as problem:
        raise UserError(f"{path} is damaged: {problem}") from problem
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise UserError(f"{path} is damaged: {type(problem).__name__} {problem}.") from problem


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a log; the last one is left out if it is being written."""
    try:
        text = read_file(path).decode()
        rows = [row for row in csv.DictReader(io.StringIO(text, newline=""))]
    except OSError as problem:
        raise UserError(f"{path} cannot be read: {problem.strerror}.") from problem
    except (UnicodeDecodeError, csv.Error) as problem:
        raise UserError(f"{path} is damaged: {problem}.") from problem
    return [row for row in rows if None not in row.values() and None not in row]


def _same_sizes(run: Run, spec: EnvSpec) -> EnvSpec:
    now = spec.facts()
    then = {"layout": now["layout"]} | run.env  # runs of version 0.1 say nothing of it
    for name in ("obs_size", "act_size", "layout"):
        if then.get(name) != now[name]:
            raise UserError(f"{run.folder} was trained with {name} {then.get(name)}, but {spec.name} has {now[name]}.")
    return spec


NO_GAIN = "no evaluated policy beat the first evaluation, of random actions or the seed policy"


def no_gain(returns: dict[int, dict[int, float]]) -> bool:
    """Whether there are tests, and none has a higher mean return than the one at step 0."""
    means = {step: sum(values.values()) / len(values) for step, values in returns.items()}
    at_start = means.pop(0, None)
    return at_start is not None and bool(means) and max(means.values()) <= at_start


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands, as `list` shows it."""

    run: str
    env: str
    seeds: int
    step: int
    steps: int
    last_return: float | None
    state: str
    note: str = ""


def status_of(folder: Path) -> RunStatus:
    """Reads a run folder; one that cannot be read is listed with the reason."""
    try:
        run = read_run(folder)
        step, last = _progress_of(run)
        tests = run.evaluations()
        tested = max(tests, default=run.steps)  # its last test may still be missing
    except UserError as problem:
        return RunStatus(str(folder), "?", 0, 0, 0, None, str(problem))
    state = "running" if _is_locked(folder) else "done" if min(step, tested) >= run.steps else "stopped"
    note = NO_GAIN if no_gain(tests) else ""
    return RunStatus(str(folder), run.name, len(run.seeds), step, run.steps, last, state, note)


def _progress_of(run: Run) -> tuple[int, float | None]:
    """The step of the last checkpoint or test, whichever is later; and that test's mean return."""
    tests = run.evaluations()
    last = max(tests, default=None)
    kept = run.folder / "checkpoints"
    steps = [int(path.name) for path in kept.iterdir() if path.name.isdecimal()] if kept.is_dir() else []
    value = None if last is None else sum(tests[last].values()) / len(tests[last])
    return max([*steps, last or 0]), value


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
