"""A run in memory, as three records: what never changes, what a checkpoint holds, and the machinery."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from doublehorizon.acting.env_runner import Batch
from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.algorithm import agent
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.agent import AgentState
from doublehorizon.algorithm.devices import Devices, find_devices, place
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.types import Task, Transition
from doublehorizon.config import Config
from doublehorizon.envs.env_source import adapted
from doublehorizon.envs.make import EnvSpec
from doublehorizon.errors import UserError
from doublehorizon.run.prior_knowledge import PriorKnowledge, make_task, try_functions
from doublehorizon.run.replay_files import Archived
from doublehorizon.run.run_state import LeftOut, RunState
from doublehorizon.schedule import first_effort, seed_iterations, steps_per_iteration, steps_per_turn
from doublehorizon.signals import unstoppable

_FEWEST_ITERATIONS = 8  # for which a replay has room


@dataclass(frozen=True)
class RunSetup:
    """What never changes."""

    config: Config
    spec: EnvSpec
    seeds: list[int]
    devices: Devices
    knowledge: PriorKnowledge = field(default_factory=PriorKnowledge)
    prior_rows: int = 0
    """Transitions in each seed's replay that were there before the first step."""
    given: list[str] = field(default_factory=list)
    """What was known beforehand when the run began; after a resume not all of it need be at hand again."""

    @property
    def iteration_steps(self) -> int:
        """Agent steps of an iteration."""
        return steps_per_iteration(self.config, self.spec.time_limit)

    @property
    def turn_steps(self) -> int:
        """Agent steps that are collected with one policy."""
        return steps_per_turn(self.config, self.spec.time_limit)

    @property
    def first_fit(self) -> int:
        """The iteration at whose end the first fit happens; 0 where recorded transitions are enough."""
        return seed_iterations(self.config, self.spec.time_limit, self.prior_rows > 0)

    @property
    def first_effort(self) -> float:
        """Factor on the work of the first iteration that learns. With transitions from a file it is what it would have
        been without."""
        return first_effort(self.config, seed_iterations(self.config, self.spec.time_limit))

    def stored_at(self, iteration: int) -> int:
        """How many transitions had been stored at the end of that iteration."""
        return self.prior_rows + iteration * self.iteration_steps


@dataclass
class Machinery:
    """What belongs to no checkpoint: the replay's memory on the devices, compiled programs, bookkeeping of files."""

    replay: ReplayBuffer
    """On the devices; its memory is reused when rows are stored."""
    archived: Archived = field(default_factory=Archived)
    """Which of its rows are on the disk."""
    programs: "Programs | None" = None
    """The compiled fit and policy optimisation; None before the first `train`, or where they would be others now."""
    originals: dict[LeftOut, Transition] = field(default_factory=dict)
    """Rows of the replay that were left out."""
    whole: bool = True
    """False where an iteration was broken off whose new rows had replaced old ones: such a run cannot go on."""


@dataclass
class Progress:
    """A run: where it stands, and what it needs to go on."""

    setup: RunSetup
    state: RunState
    machinery: Machinery

    @property
    def config(self) -> Config:
        return self.setup.config

    @property
    def seeds(self) -> list[int]:
        return self.setup.seeds

    @property
    def agent(self) -> AgentState:
        """Networks and all else that learning changes, on the devices."""
        return self.state.agent

    @property
    def replay(self) -> ReplayBuffer:
        return self.machinery.replay

    @property
    def policies(self) -> list[NumpyPolicy] | None:
        """Each seed's policy after the last whole iteration; None before the first fit."""
        return self.state.policies

    @property
    def returns(self) -> dict[int, dict[int, float]]:
        """Test return by step and seed, of all tests that are done."""
        return self.state.returns

    @property
    def iteration(self) -> int:
        """Iterations that are complete."""
        return self.state.iteration

    @property
    def goal(self) -> int:
        """Simulator steps to which the run was asked to go."""
        return self.state.goal

    @property
    def spec(self) -> EnvSpec:
        """What is known of the environment; a termination rule that it contradicted is marked as learned."""
        return replace(self.setup.spec, termination=self.state.termination)

    @property
    def task(self) -> Task:
        task = make_task(self.spec, self.setup.knowledge, self.state.cut_after)
        # only the rule for the discount asks how long episodes are; without it, every length is the same program
        return task if self.config.policy.discount is None else replace(task, episode_steps=None)

    @property
    def step(self) -> int:
        """Simulator steps so far, per seed."""
        agent_steps = self.state.iteration * self.setup.iteration_steps + self.state.begun
        return agent_steps * self.setup.spec.action_repeat

    @property
    def num_stored(self) -> int:
        """Transitions that were ever stored in each seed's replay."""
        return self.setup.stored_at(self.state.iteration) + self.state.begun

    @property
    def capacity(self) -> int:
        """Transitions for which there is room in each seed's replay."""
        return self.replay.rows.reward.shape[1]

    @property
    def num_rows(self) -> int:
        """Transitions in each seed's replay."""
        return min(self.num_stored, self.capacity)

    def last_returns(self) -> dict[int, float]:
        """The most recent test return of each seed that has one."""
        return {seed: value for step in sorted(self.returns) for seed, value in self.returns[step].items()}

    def update(self, **changes: Any) -> RunState:
        """The run's state with some fields changed."""
        self.state = replace(self.state, **changes)
        return self.state

    def store(self, batch: Batch) -> None:
        """Puts every seed's new transitions, `[seed, step, ...]`, into its replay."""
        rows = Transition(**{name: jnp.asarray(value) for name, value in batch.items()})
        with unstoppable():  # the old replay's memory is reused
            self.machinery.replay, changed = agent.store((rows, self.agent), self.replay)
            self.update(agent=changed)

    def leave_out(self, entries: tuple[LeftOut, ...]) -> None:
        """Puts a copy of another row in the place of each of these, if they are still stored."""
        entries = tuple(entry for entry in entries if entry.row >= self.num_stored - self.capacity)
        if not entries:
            return
        places = [(self.seeds.index(entry.seed), entry.row % self.capacity) for entry in entries]
        sources = [(self.seeds.index(entry.seed), entry.copy_of % self.capacity) for entry in entries]
        originals = replays.rows_at(self.replay, places)
        self.machinery.originals |= dict(zip(entries, originals, strict=True))
        self.machinery.replay = replays.with_rows(self.replay, places, replays.rows_at(self.replay, sources))

    def _bring_back(self, entries: tuple[LeftOut, ...]) -> None:
        """Undoes `leave_out`."""
        places = [(self.seeds.index(entry.seed), entry.row % self.capacity) for entry in entries]
        rows = [self.machinery.originals.pop(entry) for entry in entries]
        if entries:
            self.machinery.replay = replays.with_rows(self.replay, places, rows)

    def move_to(self, spec: EnvSpec) -> list[str]:
        """Goes on in another environment with the same spaces, where episodes begin anew; what is assumed of it."""
        spec, assumed = adapted(spec, self.spec.facts(), "this agent")
        if self.state.termination == "known" and spec.terminates is None:
            raise UserError(
                f"this agent knows when episodes of {self.spec.name} end, but not when those of {spec.name} do: give "
                "the environment a method is_terminal(next_obs)."
            )
        self.setup = replace(self.setup, spec=spec)
        self.update(episodes={}, cut_after=None)
        self.machinery.programs = None
        return assumed

    def go_back(self, to: RunState) -> None:
        """Goes back to where the run stood, from anywhere inside the iteration that came next."""
        self._bring_back(self.state.left_out[len(to.left_out) :])
        moved = to.iteration != self.state.iteration or self.state.begun > 0
        self.machinery.whole = not moved or self.num_stored <= self.capacity
        if (to.termination, to.cut_after) != (self.state.termination, self.state.cut_after):
            self.machinery.programs = None
        self.state = to
        self.machinery.replay = replays.rewound(self.replay, self.num_stored)


class Programs:
    """The fit and the policy optimisation, compiled in the background while the first steps are collected."""

    def __init__(self, progress: Progress):
        config, task, steps = progress.config, progress.task, progress.setup.turn_steps
        # only their shapes count: `store` may already have reused the memory of these arrays
        state, replay, devices = progress.agent, progress.replay, progress.setup.devices
        budget = agent.iteration_budget(config, task, steps, steps).traced()
        self.fit = agent.fit_model.in_background(devices, config, budget, replay, state)
        self.improve = agent.improve_policy.in_background(devices, config, task, steps, budget, replay, state)


def begin(
    config: Config,
    spec: EnvSpec,
    seeds: list[int],
    capacity: int,
    devices: Devices | None = None,
    knowledge: PriorKnowledge | None = None,
) -> Progress:
    """An untrained run with `capacity` rows in each replay (see `capacity_for`); what was recorded before is in it."""
    knowledge = knowledge or PriorKnowledge()
    task = make_task(spec, knowledge)
    try_functions(spec.name, task)
    devices = devices or find_devices(None, len(seeds))
    blank = agent.untrained(config, task, capacity, jnp.asarray(seeds))
    state, replay = place(devices, blank)  # as those of a run that is read from a file: the same programs serve both
    setup = RunSetup(config, spec, seeds, devices, knowledge, knowledge.num_rows, knowledge.given)
    progress = Progress(setup, RunState(state, spec.termination), Machinery(replay))
    if knowledge.data is not None:
        progress.store({name: np.stack([rows] * len(seeds)) for name, rows in knowledge.data.items()})
    return progress


def fetch_policies(setup: RunSetup, state: AgentState) -> list[NumpyPolicy]:
    """Each seed's policy, brought to the host."""
    actor, normalizer = jax.device_get((state.actor_critic.actor, state.world.obs_normalizer))
    layers = actor.mlp.layers
    low, high = (np.asarray(x, np.float32) for x in (setup.spec.action_low, setup.spec.action_high))
    return [
        NumpyPolicy(
            tuple(layer.weight[k] for layer in layers),
            tuple(layer.bias[k] for layer in layers),
            normalizer.mean[k],
            normalizer.std[k],
            low,
            high,
            setup.spec.layout,
        )
        for k in range(len(setup.seeds))
    ]


def prior_batch(progress: Progress) -> Batch:
    """What was recorded before the first step, `[seed, row, ...]`; before anything else is stored."""
    rows = jax.device_get(progress.replay.rows)
    return {name: getattr(rows, name)[:, : progress.setup.prior_rows] for name in rows.__dataclass_fields__}


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
    setup, machinery = progress.setup, progress.machinery
    capacity = capacity_for(setup.config, setup.spec, total_steps, setup.prior_rows)
    if capacity > progress.capacity:
        num_rows = jnp.asarray(progress.num_rows, jnp.int32)
        machinery.replay = jax.vmap(lambda replay: replays.grow(replay, capacity, num_rows))(machinery.replay)
        machinery.programs = None
