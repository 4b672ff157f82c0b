"""How long the rest of a run will take, judged by the iteration that was just done.

Iterations are not alike: the first one works longer (`fit.first_effort`), and epochs grow with the replay. So the time
of a fit is divided by the work it was, and multiplied by the work that is planned.
"""

from doublehorizon.algorithm.agent import iteration_budget
from doublehorizon.algorithm.types import Budget, Task
from doublehorizon.config import Config


def seconds_left(
    config: Config,
    task: Task,
    steps: int,
    num_rows: list[int],
    done: tuple[Budget, float, dict[str, float]],
) -> float:
    """Upper estimate of the remaining seconds, if every fit runs to its cap. `num_rows` are the rows stored at the end
    of each remaining iteration, `done` is the last one: its budget, the mean epochs of its seeds, its seconds by
    phase."""
    budget, epochs, seconds = done
    work = epochs * _epoch_work(config, budget)  # none without a model, which only takes statistics
    fit = seconds["time/fit_seconds"] / work if work > 0 else 0.0
    improve = seconds["time/improve_seconds"] / _policy_work(config, steps, budget)
    other = seconds["time/collect_seconds"] + (0.0 if work > 0 else seconds["time/fit_seconds"])
    total = 0.0
    for rows in num_rows:
        planned = iteration_budget(config, task, min(rows, config.loop.replay_capacity), steps)
        total += fit * planned.max_epochs * _epoch_work(config, planned)
        total += improve * _policy_work(config, steps, planned) + other
    return total


def _epoch_work(config: Config, budget: Budget) -> float:
    """In forward passes over a minibatch: a gradient is worth three."""
    if config.fit.batches_per_step is not None:
        return 3.0 * budget.fit_batches
    held_out = budget.num_rows // config.fit.held_out_every
    chunks = min(config.fit.batches_per_epoch, -(-held_out // config.fit.batch_size))
    return 3.0 * budget.fit_batches + chunks


def _policy_work(config: Config, steps: int, budget: Budget) -> float:
    """In joint updates: one of the critics alone is worth 0.4."""
    return budget.num_rounds * config.policy.refresh_every + 0.4 * steps * config.policy.critic_only_share
