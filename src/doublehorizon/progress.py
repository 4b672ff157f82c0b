"""Where a run stands: its state on the device, what it was told beforehand, and its compiled programs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from doublehorizon import agent
from doublehorizon import replay as replays
from doublehorizon.agent import AgentState
from doublehorizon.config import Config, seed_iterations, steps_per_iteration, steps_per_turn
from doublehorizon.devices import Devices, find_devices, over_seeds
from doublehorizon.envs.make import EnvSpec
from doublehorizon.errors import UserError
from doublehorizon.policy import NumpyPolicy
from doublehorizon.replay import Replay
from doublehorizon.scaling import to_own_units
from doublehorizon.seats import Batch, Episode, SeatId
from doublehorizon.signals import unstoppable
from doublehorizon.types import Task, Transition

_FEWEST_ITERATIONS = 8  # for which a replay has room


@dataclass(frozen=True)
class Knowledge:
    """What is known beforehand: the reward as a function of observation, action (in the environment's own units) and
    next observation, all with any leading axes; transitions that were recorded before; and a policy for the first
    steps, instead of chance."""

    reward: Callable[[Any, Any, Any], Any] | None = None
    data: Batch | None = None
    seed_policy: Any = None

    @property
    def num_prior(self) -> int:
        return 0 if self.data is None else len(self.data["reward"])

    @property
    def given(self) -> list[str]:
        """Which of them there are: a run without them would be another."""
        return [name for name in ("data", "reward", "seed_policy") if getattr(self, name) is not None]


@dataclass(frozen=True)
class Pending:
    """A test that has been started: with which policies (None: as in the random steps), and when, in seconds."""

    policies: list[NumpyPolicy] | None
    seconds: float


@dataclass(frozen=True)
class Archived:
    """How many rows of each replay are on the disk, and the digest of the file with the last of them."""

    rows: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A run between two iterations, but for its replay. It only refers to what it holds: none of it is ever changed in
    place."""

    state: AgentState
    spec: EnvSpec
    iteration: int
    seconds: float
    policies: list[NumpyPolicy] | None
    returns: dict[int, dict[int, float]]
    pending: dict[int, Pending]
    episodes: dict[SeatId, Episode]
    log_sizes: dict[str, int]


@dataclass
class Progress:
    """Everything that changes while a run learns. Arrays have a leading seed axis."""

    config: Config
    spec: EnvSpec
    seeds: list[int]
    devices: Devices
    state: AgentState
    replay: Replay
    knowledge: Knowledge = field(default_factory=Knowledge)
    prior_rows: int = 0
    """Transitions in each seed's replay that were there before the first step."""
    iteration: int = 0
    begun: int = 0
    """Agent steps of an iteration that is not complete yet, but whose transitions are stored."""
    seconds: float = 0.0
    returns: dict[int, dict[int, float]] = field(default_factory=dict)
    """Test return by step and seed, of all tests that are done."""
    pending: dict[int, Pending] = field(default_factory=dict)
    """Tests by the step at which they were started."""
    episodes: dict[SeatId, Episode] = field(default_factory=dict)
    """Those that were running when the last steps were collected."""
    log_sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each log that belong to what was done so far."""
    archived: Archived = field(default_factory=Archived)
    given: list[str] = field(default_factory=list)
    """What was known beforehand, as long ago as the run began."""
    goal: int = 0
    """Simulator steps to which the run was asked to go."""
    policies: list[NumpyPolicy] | None = None
    """Each seed's policy after the last whole iteration, on the host; None before the first fit."""
    programs: "Programs | None" = None
    """The compiled fit and policy optimisation; None before the first `train`, or where they would be others now."""
    whole: bool = True
    """False where an iteration was broken off whose new rows had replaced old ones: such a run cannot go on."""

    @property
    def task(self) -> Task:
        return _task(self.spec, self.knowledge)

    @property
    def iteration_steps(self) -> int:
        """Agent steps of an iteration."""
        return steps_per_iteration(self.config, self.spec.time_limit)

    @property
    def turn_steps(self) -> int:
        """Agent steps that are collected with one policy."""
        return steps_per_turn(self.config, self.spec.time_limit)

    @property
    def step(self) -> int:
        """Simulator steps so far, per seed."""
        return (self.iteration * self.iteration_steps + self.begun) * self.spec.action_repeat

    @property
    def num_stored(self) -> int:
        """Transitions that were ever stored in each seed's replay."""
        return self.stored_at(self.iteration) + self.begun

    @property
    def capacity(self) -> int:
        """Transitions for which there is room in each seed's replay."""
        return self.replay.rows.reward.shape[1]

    @property
    def num_rows(self) -> int:
        """Transitions in each seed's replay."""
        return min(self.num_stored, self.capacity)

    @property
    def first_fit(self) -> int:
        """The iteration at whose end the first fit happens; 0 where recorded transitions are enough."""
        return seed_iterations(self.config, self.spec.time_limit, self.prior_rows > 0)

    def stored_at(self, iteration: int) -> int:
        """How many had been stored at the end of that iteration."""
        return self.prior_rows + iteration * self.iteration_steps

    def fetch_policies(self) -> list[NumpyPolicy]:
        """Each seed's policy, brought to the host."""
        actor, normalizer = jax.device_get((self.state.policy.actor, self.state.world.obs_normalizer))
        layers = actor.mlp.layers
        low, high = (np.asarray(x, np.float32) for x in (self.spec.action_low, self.spec.action_high))
        return [
            NumpyPolicy(
                tuple(layer.weight[k] for layer in layers),
                tuple(layer.bias[k] for layer in layers),
                normalizer.mean[k],
                normalizer.std[k],
                low,
                high,
            )
            for k in range(len(self.seeds))
        ]

    def last_returns(self) -> dict[int, float]:
        """The most recent test return of each seed that has one."""
        return {seed: value for step in sorted(self.returns) for seed, value in self.returns[step].items()}

    def completed(self) -> None:
        """What was begun is a whole iteration now."""
        self.iteration, self.begun = self.iteration + 1, 0

    def store(self, batch: Batch) -> None:
        """Puts every seed's new transitions, `[seed, step, ...]`, into its replay."""
        rows = Transition(**{name: jnp.asarray(value) for name, value in batch.items()})
        with unstoppable():  # the old replay's memory is reused
            self.replay, self.state = agent.store((rows, self.state), self.replay)

    def snapshot(self, log_sizes: dict[str, int]) -> Snapshot:
        """Where the run stands; only between two iterations."""
        kept = ("state", "spec", "iteration", "seconds", "policies")
        return Snapshot(
            **{name: getattr(self, name) for name in kept},
            returns=dict(self.returns),
            pending=dict(self.pending),
            episodes=dict(self.episodes),
            log_sizes=log_sizes,
        )

    def rewind(self, to: Snapshot) -> None:
        """Goes back to where the run stood, from anywhere inside the iteration that came next."""
        self.whole = (to.iteration == self.iteration and self.begun == 0) or self.num_stored <= self.capacity
        self.begun = 0
        self.programs = self.programs if to.spec is self.spec else None
        for name in ("state", "spec", "iteration", "seconds", "policies", "episodes", "log_sizes"):
            setattr(self, name, getattr(to, name))
        self.returns, self.pending = dict(to.returns), dict(to.pending)
        position = jnp.full_like(self.replay.position, self.num_stored % self.capacity)
        self.replay = eqx.tree_at(lambda replay: replay.position, self.replay, position)


class Programs:
    """The fit and the policy optimisation, compiled in the background while the first steps are collected."""

    def __init__(self, progress: Progress):
        config, task, steps = progress.config, progress.task, progress.turn_steps
        # only their shapes count: `store` may already have reused the memory of these arrays
        state, replay = progress.state, progress.replay
        effort = agent.plan(config, task, steps, steps, first=True).effort()

        devices, inputs = progress.devices, (config, task, steps, effort, replay)
        self.fit = agent.fit_model.in_background(devices, (config, effort, replay), state)
        self.improve = agent.improve_policy.in_background(devices, inputs, state)


def begin(
    config: Config,
    spec: EnvSpec,
    seeds: list[int],
    capacity: int,
    devices: Devices | None = None,
    knowledge: Knowledge | None = None,
) -> Progress:
    """An untrained run with so many rows in each replay (see `capacity_for`); what was recorded before is in it."""
    knowledge = knowledge or Knowledge()
    _try_functions(spec.name, _task(spec, knowledge))
    blank = blank_seed(config, spec, knowledge, capacity)
    state, replay = eqx.filter_jit(lambda seeds: over_seeds(jax.vmap(blank), seeds))(jnp.asarray(seeds))
    devices = devices or find_devices(None, len(seeds))
    progress = Progress(
        config, spec, seeds, devices, state, replay, knowledge, knowledge.num_prior, given=knowledge.given
    )
    if knowledge.data is not None:
        progress.store({name: np.stack([rows] * len(seeds)) for name, rows in knowledge.data.items()})
    return progress


def blank_seed(
    config: Config, spec: EnvSpec, knowledge: Knowledge, capacity: int
) -> Callable[[jax.Array], tuple[AgentState, Replay]]:
    """A function from a seed to its untrained agent and empty replay."""
    task = _task(spec, knowledge)
    sizes = (spec.obs_size, spec.act_size, config.model.members, config.fit.held_out_every)

    def one_seed(seed: jax.Array) -> tuple[AgentState, Replay]:
        return agent.initial_state(config, task, seed), replays.empty(capacity, *sizes)

    return one_seed


def prior_batch(progress: Progress) -> Batch:
    """What was recorded before the first step, `[seed, row, ...]`; before anything else is stored."""
    rows = jax.device_get(progress.replay.rows)
    return {name: getattr(rows, name)[:, : progress.prior_rows] for name in rows.__dataclass_fields__}


def capacity_for(config: Config, spec: EnvSpec, total_steps: int, prior_rows: int) -> int:
    """Rows of the replay: what was recorded before, and what the run will collect, in a power of two of iterations (as
    each size is compiled anew), but no more than the configured number."""
    steps = steps_per_iteration(config, spec.time_limit)
    iterations = -(-total_steps // (steps * spec.action_repeat))
    room = max(_FEWEST_ITERATIONS, 1 << (iterations - 1).bit_length())
    return min(prior_rows + room * steps, largest_capacity(config, spec.time_limit, prior_rows))


def largest_capacity(config: Config, time_limit: int, prior_rows: int) -> int:
    """Rows of the replay of a run without end: what was recorded before, and whole iterations up to the configured
    number."""
    steps = steps_per_iteration(config, time_limit)
    return prior_rows + max(1, config.loop.replay_capacity // steps) * steps


def extend(progress: Progress, total_steps: int) -> None:
    """Makes room for more steps in a replay that was sized for fewer."""
    capacity = capacity_for(progress.config, progress.spec, total_steps, progress.prior_rows)
    if capacity > progress.capacity:
        num_rows = jnp.asarray(progress.num_rows, jnp.int32)
        progress.replay = jax.vmap(lambda replay: replays.grow(replay, capacity, num_rows))(progress.replay)
        progress.programs = None


def _task(spec: EnvSpec, knowledge: Knowledge) -> Task:
    reward = None
    if knowledge.reward is not None:
        reward = _InOwnUnits(knowledge.reward, spec.action_low, spec.action_high)
    return Task(spec.obs_size, spec.act_size, spec.rule, spec.termination == "learned", reward)


@dataclass(frozen=True)
class _InOwnUnits:
    """A user's reward function, for actions in [-1, 1]. Equal ones are equal, so that nothing is compiled twice."""

    reward: Callable[[Any, Any, Any], Any]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __call__(self, obs: Any, act: Any, next_obs: Any) -> Any:
        low, high = (np.asarray(x, np.float32).reshape((1,) * (act.ndim - 1) + (-1,)) for x in (self.low, self.high))
        return self.reward(obs, to_own_units(act, low, high), next_obs).astype(np.float32)


def _try_functions(name: str, task: Task) -> None:
    """A user's functions must work on JAX's arrays, with any leading axes."""
    obs, act = (jax.ShapeDtypeStruct((2, 3, size), jnp.float32) for size in (task.obs_size, task.act_size))
    for what, function, arguments in (
        ("termination rule", task.terminates, (obs,)),
        ("reward function", task.reward, (obs, act, obs)),
    ):
        if function is None:
            continue
        needs = (
            f"the {what} of {name} must map arrays [..., n] to one value [...] each, with operators, array methods or "
            "jax.numpy"
        )
        try:
            found = jax.eval_shape(function, *arguments)
        except Exception as problem:  # whatever a user's function raises
            raise UserError(f"{needs}; it raised {type(problem).__name__}: {str(problem).splitlines()[0]}") from problem
        if getattr(found, "shape", None) != (2, 3):
            raise UserError(f"{needs}; for arrays [2, 3, n] it returned {found}.")
