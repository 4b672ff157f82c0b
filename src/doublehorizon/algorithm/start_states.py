"""Where training starts: in imagined states of the model buffer, in real ones of the replay, or in a mixture.

Where there is no training rollout (`horizons.training` is 0) training starts not from states but from whole steps, and
both sources hold those.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from doublehorizon.algorithm import model_buffer
from doublehorizon.algorithm.model_buffer import ModelBuffer, Rows, States
from doublehorizon.algorithm.replay_buffer import ReplayBuffer
from doublehorizon.algorithm.rollouts import visited
from doublehorizon.algorithm.types import Task, Transition, blank_transitions
from doublehorizon.config import Config


class StartStates(eqx.Module):
    """Samples start states from the model buffer (`imagined`; None where there are no distribution rollouts) and from
    the replay, in the same form (`real`)."""

    imagined: ModelBuffer | None
    real: ModelBuffer

    def sample(self, config: Config, key: PRNGKeyArray) -> Rows:
        """A batch of rows for one update. The key is consumed."""
        batch_size = config.policy.batch_size
        num_real = round(config.policy.replay_start_share * batch_size)
        if self.imagined is None or num_real == batch_size:
            return model_buffer.sample(self.real, batch_size, key)
        if num_real == 0:
            return model_buffer.sample(self.imagined, batch_size, key)
        key_real, key_imagined = jr.split(key)
        real = model_buffer.sample(self.real, num_real, key_real)
        imagined = model_buffer.sample(self.imagined, batch_size - num_real, key_imagined)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), real, imagined)


def start_states(
    config: Config, num_rows: int | Int[Array, ""], replay: ReplayBuffer, imagined: ModelBuffer | None
) -> StartStates:
    """The sources of an iteration: what was imagined, and the first `num_rows` rows of the replay."""
    rows = States(replay.rows.obs) if config.horizons.training > 0 else replay.rows
    return StartStates(imagined, ModelBuffer(rows, replay.position, jnp.asarray(num_rows, jnp.int32)))


def empty_model_buffer(config: Config, task: Task) -> ModelBuffer | None:
    """Room for what distribution rollouts bring; None where there are none."""
    if config.horizons.distribution == 0:
        return None
    capacity = config.policy.ring_capacity
    if config.horizons.training > 0:
        return model_buffer.empty(States(jnp.zeros((capacity, task.obs_size))))
    return model_buffer.empty(blank_transitions(capacity, task.obs_size, task.act_size))


def kept_rows(config: Config, steps: Transition, last: Float[Array, "batch obs"]) -> Rows:
    """What a distribution rollout, its steps `[horizon, batch]` and its last states, leaves in the model buffer."""
    kept = States(visited(steps, last)) if config.horizons.training > 0 else steps
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)


def as_transitions(start: Rows) -> Transition | None:
    """The sampled rows as steps, where training starts from those."""
    return start if isinstance(start, Transition) else None
