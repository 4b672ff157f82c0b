"""How long the parts of the algorithm take on this machine, and what share of its limits they reach.

The work is the algorithm's own, on random data of a task's sizes. Operations and bytes are counted by hand, from the
shapes of the networks: what the algorithm needs, not what a compiler makes of it.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from doublehorizon.algorithm import agent
from doublehorizon.algorithm import replay_buffer as replays
from doublehorizon.algorithm.agent import AgentState
from doublehorizon.algorithm.devices import Devices, Program, over_seeds
from doublehorizon.algorithm.kernels import on_gpu
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.start_states import start_states
from doublehorizon.algorithm.types import Budget, Task, Transition
from doublehorizon.algorithm.updates import UpdateContext, critic_only_update, fresh_opt_states, joint_update
from doublehorizon.analysis.profiling import profile
from doublehorizon.config import Config
from doublehorizon.schedule import steps_per_iteration, target_members

STEPS = 1000  # of which all is told: also the time limit, by which a config may set the steps of an iteration


@dataclass(frozen=True)
class Part:
    """A piece of work: its time, and what it needs per seed."""

    milliseconds: float
    flops: float
    bytes: float
    kind: str = "update"
    """"fit" where products are in the model's storage type."""


# -- what the work needs ------------------------------------------------------------------------------------


def weights_of(config: Config, task: Task) -> dict[str, int]:
    """Weights of one network of each kind."""

    def chain(size_in: int, width: int, size_out: int) -> int:
        return size_in * width + 2 * width * width + width * size_out

    both = task.obs_size + task.act_size
    return {
        "model": chain(both, config.model.width, 1 + task.obs_size),
        "actor": chain(task.obs_size, config.policy.width, 2 * task.act_size),
        "critic": chain(both, config.critic.width, 1),
    }


def update_needs(config: Config, task: Task, joint: bool) -> tuple[float, float]:
    """Operations and bytes of a joint or a critic-only update. Every product needs twice as many operations as it has
    weights, for each row; every network's weights are read once per product; Adam reads and writes three copies."""
    size, horizon, batch = weights_of(config, task), config.horizons.training, config.policy.batch_size
    model, actor = horizon, horizon + 1  # forwards through every step
    # those that are the target; all of them forwards, and backwards to inputs and to weights
    critics = target_members(config, task.can_end) + 3 * config.critic.members
    if joint:
        model, actor = 2 * model, 5 * actor  # back to the states; and the actor's gradient over all states
        critics += 2 * config.critic.members  # after the last step, forwards and backwards
    products = model * size["model"] + actor * size["actor"] + critics * size["critic"]
    reads = model * config.model.members * size["model"] + actor * size["actor"] + critics * size["critic"]
    trained = config.critic.members * size["critic"] * 9 + (size["actor"] * 7 if joint else 0)
    return 2.0 * batch * products, 4.0 * (reads + trained)


def rollout_needs(config: Config, task: Task) -> tuple[float, float]:
    """A distribution rollout."""
    size, horizon = weights_of(config, task), config.horizons.distribution
    flops = 2.0 * config.distribution_rows * horizon * (size["model"] + size["actor"])
    return flops, 4.0 * horizon * (config.model.members * size["model"] + size["actor"])


def epoch_needs(config: Config, task: Task, batches: int, validation_rows: int) -> tuple[float, float]:
    """An epoch of a fit. A hidden layer is written and read 2 times forwards and 7 backwards (its product, what it is
    activated to, their slopes), in 2 bytes on a GPU; Adam passes 7 times over the weights."""
    weights, members, rows = weights_of(config, task)["model"], config.model.members, batches * config.fit.batch_size
    flops = 2.0 * members * weights * (3 * rows + validation_rows)
    unit = 2 if on_gpu() and config.model.storage == "float16" else 4
    passes = (4 + 7) * rows + 4 * validation_rows
    return flops, members * (3.0 * config.model.width * unit * passes + 7 * 4 * weights * batches)


# -- the machine's limits ---------------------------------------------------------------------------------


def limits() -> dict[str, float]:
    """Operations per second of a large product, and bytes per second of a large copy, as XLA does them here."""
    size, rows = (8192, 2**28) if on_gpu() else (2048, 2**25)
    found = {}
    for name in ("float32", *(("float16",) if on_gpu() else ())):
        x = jnp.ones((size, size), name)
        with jax.default_matmul_precision("tensorfloat32"):
            found[f"{name}_flops"] = 2 * size**3 / _median(jax.jit(lambda x: x @ x), x)
    times = 8  # within one call, as fresh memory would have to be fetched from the system first
    copies = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, x: -x, x))
    found["bytes"] = times * 8 * rows / _median(copies, jnp.ones(rows))
    return found


def _median(function: Callable, *arguments: Any, repeats: int = 7) -> float:
    """Seconds of a call, after a first one that warms up."""
    jax.block_until_ready(function(*arguments))
    return float(np.median([seconds(lambda: function(*arguments)) for _ in range(repeats)]))


def seconds(call: Callable) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begun


# -- the parts --------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """An untrained agent of `num_seeds` seeds with a replay full of random rows."""

    config: Config
    task: Task
    num_seeds: int
    num_rows: int
    state: AgentState
    replay: ReplayBuffer

    @property
    def iteration_steps(self) -> int:
        return steps_per_iteration(self.config, STEPS)

    def budget(self, epochs: int = 1, rounds: int = 1) -> Budget:
        """Epochs of full size, none of them the last for want of improvement."""
        planned = agent.iteration_budget(self.config, self.task, self.num_rows, self.iteration_steps)
        return replace(planned, patience=10**6, max_epochs=epochs, num_rounds=rounds).traced()


def prepare(config: Config, task: Task, num_seeds: int, num_rows: int) -> Bench:
    sizes = (task.obs_size, task.act_size, config.model.members, config.fit.held_out_every)

    def one(seed: jax.Array) -> tuple[ReplayBuffer, AgentState, Transition]:
        key_obs, key_act = jr.split(jr.key(seed))
        obs = jr.normal(key_obs, (num_rows, task.obs_size))
        act = jr.uniform(key_act, (num_rows, task.act_size), minval=-1.0)
        rows = Transition(obs, act, obs[:, 0], obs + 0.1 * jnp.sin(obs), jnp.zeros(num_rows))
        return replays.empty(num_rows, *sizes), agent.initial_state(config, task, seed), rows

    replay, state, rows = jax.jit(lambda seeds: over_seeds(jax.vmap(one), seeds))(jnp.arange(num_seeds))
    replay, state = agent.store((rows, state), replay)
    return Bench(config, task, num_seeds, num_rows, state, replay)


def measure(bench: Bench, devices: Devices, say: Callable[[str], None], profiled: bool = False) -> dict[str, Any]:
    """Each part's median time; programs are compiled side by side first. With `profiled`, also what the kernels of 20
    joint updates and of 10 epochs take."""
    config, task, every = bench.config, bench.task, bench.config.policy.refresh_every
    runs = {
        "joint_update": _updates(bench, joint_update),
        "critic_only_update": _updates(bench, critic_only_update),
        "distribution_rollout": _rollouts(bench),
    }
    say("compiling")
    count, arrays = jnp.asarray(1, jnp.int32), (bench.state, bench.replay)
    waiting = {name: Program(run, "none").in_background(devices, *arrays, count) for name, run in runs.items()}
    budget, data = bench.budget(), (bench.replay, bench.state)
    fit = agent.fit_model.in_background(devices, config, budget, *data)
    improve = agent.improve_policy.in_background(devices, config, task, bench.iteration_steps, budget, *data)

    batches, held_out = int(budget.fit_batches), 0
    if config.fit.batches_per_step is None:
        held_out = min(
            bench.num_rows // config.fit.held_out_every, config.fit.batches_per_epoch * config.fit.batch_size
        )
    programs = {name: background.result() for name, background in waiting.items()}
    fit, improve = fit.result(), improve.result()
    parts = {}
    for name, (unit, needs) in {
        "joint_update": (every, update_needs(config, task, joint=True)),
        "critic_only_update": (every, update_needs(config, task, joint=False)),
        "distribution_rollout": (1, rollout_needs(config, task)),
    }.items():
        run = programs[name]
        say(name.replace("_", " "))
        parts[name] = Part(_per_unit(lambda n, run=run: run(bench.state, bench.replay, jnp.asarray(n))) / unit, *needs)
    say("fit epoch")

    def epochs(n: int) -> Any:
        bench.state, metrics = fit(config, bench.budget(n), bench.replay, bench.state)
        return metrics

    parts["fit_epoch"] = Part(_per_unit(epochs), *epoch_needs(config, task, batches, held_out), "fit")
    say("replay.add")
    parts["replay_add"] = _store(bench)
    say(f"{STEPS} steps")
    result = {"parts": parts, "thousand_steps": _thousand_steps(bench, fit, improve, parts)}
    if profiled:
        say("profile")
        joint = programs["joint_update"]
        result["profiles"] = {
            f"{every} joint updates": profile(lambda: joint(bench.state, bench.replay, count)),
            "10 epochs": profile(lambda: epochs(10)),
        }
    return result


def peak_gib(devices: Devices) -> float:
    """The most memory used so far: of the first device, or where it does not say, of this process."""
    stats = devices[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _updates(bench: Bench, update: Callable) -> Callable:
    """`count` rounds of updates, their inputs drawn as in `agent.improve_policy`."""
    config, task = bench.config, bench.task

    def one(state: AgentState, replay: ReplayBuffer, count: jax.Array) -> Any:
        context = UpdateContext(config, task, state.world.in_storage_dtype())
        size = jnp.asarray(config.policy.ring_capacity, jnp.int32)
        full = eqx.tree_at(lambda buffer: buffer.size, state.model_buffer, size)
        starts = start_states(config, bench.num_rows, replay, full)

        def body(i: jax.Array, learner: Any) -> Any:
            key = jr.fold_in(state.key, i)
            return agent.repeat(update, config.policy.refresh_every, context, starts, learner, key)[0]

        return jax.lax.fori_loop(0, count, body, (state.actor_critic, fresh_opt_states(config, state.actor_critic)))

    return _for_all_seeds(config, one)


def _rollouts(bench: Bench) -> Callable:
    """`count` distribution rollouts."""
    config, task = bench.config, bench.task

    def one(state: AgentState, replay: ReplayBuffer, count: jax.Array) -> Any:
        context = UpdateContext(config, task, state.world.in_storage_dtype())

        def body(i: jax.Array, buffer: Any) -> Any:
            num_rows, key = jnp.asarray(bench.num_rows, jnp.int32), jr.fold_in(state.key, i)
            return agent.refresh(context, num_rows, replay, state.actor_critic, buffer, key)

        return jax.lax.fori_loop(0, count, body, state.model_buffer)

    return _for_all_seeds(config, one)


def _for_all_seeds(config: Config, one: Callable) -> Callable:
    def all_seeds(state: AgentState, replay: ReplayBuffer, count: jax.Array) -> Any:
        with jax.default_matmul_precision(config.precision):
            return over_seeds(jax.vmap(lambda state, replay: one(state, replay, count)), state, replay)

    return all_seeds


def _per_unit(run: Callable[[int], Any], budget: float = 2.0) -> float:
    """Milliseconds per unit: a longer call minus a shorter one, so that what a call costs in itself cancels."""
    seconds(lambda: run(1))
    few = max(1, min(20, int(budget / 10 / seconds(lambda: run(1)))))
    differences = [seconds(lambda: run(3 * few)) - seconds(lambda: run(few)) for _ in range(5)]
    return 1e3 * float(np.median(differences)) / (2 * few)


def _store(bench: Bench) -> Part:
    new = slice(bench.iteration_steps)
    rows = jax.tree.map(lambda x: np.asarray(x[:, new]), bench.replay.rows)  # as they come from the workers
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        bench.replay, bench.state = agent.store((jax.tree.map(jnp.asarray, rows), bench.state), bench.replay)
        jax.block_until_ready(bench.replay)
        times.append(time.perf_counter() - begun)
    size = sum(x.nbytes for x in jax.tree.leaves(rows)) / bench.num_seeds
    return Part(1e3 * float(np.median(times[1:])), 0.0, 2.0 * size)


def _thousand_steps(bench: Bench, fit: Callable, improve: Callable, parts: dict[str, Part]) -> dict[str, Any]:
    """What learning from so many steps takes, with fits that run to their cap; from the parts if that is minutes."""
    config, task, steps = bench.config, bench.task, bench.iteration_steps
    planned = agent.iteration_budget(config, task, bench.num_rows, steps)
    epochs, rounds, iterations = planned.max_epochs, planned.num_rounds, max(1, round(STEPS / steps))
    critic_only = round(steps * config.policy.critic_only_share)
    learning = (
        rounds * (config.policy.refresh_every * parts["joint_update"].milliseconds)
        + (rounds + 1) * parts["distribution_rollout"].milliseconds
        + critic_only * parts["critic_only_update"].milliseconds
    )
    fits = iterations * epochs * parts["fit_epoch"].milliseconds
    stored = iterations * parts["replay_add"].milliseconds
    estimate = stored + fits + iterations * learning
    measured = estimate < 30e3
    if measured:

        def whole() -> Any:
            budget = bench.budget(epochs, rounds)
            for _ in range(iterations):
                bench.state, _ = fit(config, budget, bench.replay, bench.state)
                bench.state, metrics = improve(config, task, steps, budget, bench.replay, bench.state)
            return metrics

        seconds(whole)
        estimate = 1e3 * seconds(whole) + stored
    return {
        "milliseconds": estimate,
        "fits_milliseconds": fits,
        "iterations": iterations,
        "epochs": epochs,
        "measured": measured,
    }
