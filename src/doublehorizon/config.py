"""Every number of the algorithm, with its reason under it.

A `Config` is what a user may change. What depends on the environment (how many steps an iteration has, how
long a fit may last) is computed from it in `schedule`, never assigned later.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval

from doublehorizon.config_checks import (
    Count,
    CountOrZero,
    Dropout,
    MovingRate,
    NonNegative,
    Positive,
    Share,
    check_fields,
    require,
)
from doublehorizon.errors import unknown

ActivationName = Literal["silu", "relu"]


@dataclass(frozen=True)
class Horizons:
    """How far imagined rollouts reach."""

    distribution: CountOrZero = 40
    """Steps of the detached rollout (DR) that spreads training states to where the policy goes, 20 in the paper. 0:
    training starts from what was really seen."""
    training: CountOrZero = 5
    """Steps of the differentiable rollout (TR) that estimates values; longer ones give noisier gradients. 0: critics
    and actor learn from single steps: imagined ones or, without a model, real ones (SAC)."""


@dataclass(frozen=True)
class ModelConfig:
    """The ensemble that predicts reward and next state. Per-layer numbers go from the input to the output."""

    members: CountOrZero = 8
    """Networks in the ensemble; their disagreement is what the model does not know. 0: no model."""
    width: Count = 256
    """Units of each hidden layer."""
    activation: ActivationName = "silu"
    """Activation function of the hidden layers."""
    dropout: tuple[Dropout, Dropout, Dropout] = (0.0225, 0.015, 0.0075)
    """Dropout after each hidden layer while fitting: most where features are most redundant. Three times the paper's,
    as no rows are held out to say when to stop."""
    norm_eps: tuple[Positive, Positive, Positive] | None = (1.0, 0.1, 0.01)
    """LayerNorm's epsilon before layers 2, 3 and 4. Large values leave small activations small. None: no LayerNorm."""
    weight_decay: tuple[NonNegative, NonNegative, NonNegative, NonNegative] = (2.5e-4, 5e-4, 7.5e-4, 1e-3)
    """AdamW decay per layer, weights and biases."""
    noise: Literal["constant", "state"] = "constant"
    """Whether the noise that a member predicts is the same everywhere, as in the paper, or depends on state and action.
    Where something happens rarely, as when a lander touches the ground, a constant noise drowns the exact rest."""
    noise_decay: NonNegative = 1e-2
    """AdamW decay of the log noise scales, towards a scale of one."""
    min_noise: Positive = 1e-3
    """Below this (normalised) noise scale the likelihood no longer rewards a smaller one."""
    storage: Literal["float16", "float32"] = "float16"
    """How a GPU keeps the model's hidden layers between two products. float16 has TensorFloat-32's 10-bit mantissa at
    half the memory traffic, which is what a fit is bound by. A CPU keeps float32."""
    rollout_noise: NonNegative | None = None
    """Factor on the noise that members add to imagined states; with 0 each follows its mean. None: 1 where an episode
    may end, as noise makes a policy careful that may fall, else 0."""
    reward_noise: NonNegative = 1e-3
    """Noise on the training target of the reward, in units of its spread (of 1 where `policy.reward_unit` is one). It
    keeps constant rewards learnable."""


@dataclass(frozen=True)
class FitConfig:
    """How the ensemble is fitted, once per iteration: a little, to all rows (`batches_per_step`), or until it no longer
    gets better on rows held out for that, as in the paper."""

    learning_rate: Positive = 2e-3
    """AdamW's step size; the optimiser starts afresh with each fit."""
    batch_size: Count = 512
    """Rows of a minibatch, shared by all members."""
    batches_per_step: Positive | None = 1.5
    """Minibatches of a fit for each step since the last one; all rows are trained on and count the same. None: rows are
    held out, the others have random weights, and the numbers below say when a fit stops."""
    recent_share: Share = 0.5
    """Share of each minibatch that comes from the newest fifth of the rows, where the policy goes now. Only where no
    rows are held out."""
    batches_per_epoch: Count = 6
    """Minibatches that are drawn at once; where rows are held out, also those between two validations, and batches of
    rows to validate on, at most."""
    base_epochs: Positive = 50.0
    """Patience is this times ln(observation size + 1) epochs without improvement."""
    max_epochs_factor: Positive = 5.0
    """A fit ends after this many times its patience, improving or not."""
    batches_factor: Positive | None = 2.0
    """A fit also ends after this many times its most epochs, counted in minibatches. Early fits, with one or two
    minibatches per epoch, may use all their epochs, later ones, with six, a third. None: no such end, as the paper."""
    first_effort: Positive | None = None
    """Factor on the epochs, the termination model's minibatches and the joint updates of the first fit's iteration.
    None: the number of random iterations before it, so that there are as many updates as there were steps."""
    accept_p: Share = 0.1
    """A new best model must beat the old one at this significance level in a paired test."""
    keep_p: Share = 0.5
    """Any improvement at this level resets the patience without moving the best model."""
    held_out_every: Annotated[int, Ge(2)] = 5
    """One in this many transitions is kept for validation, forever."""


@dataclass(frozen=True)
class TerminatorConfig:
    """The ensemble that learns which steps end an episode, where no rule says so, and the rewards of those steps."""

    members: Count = 5
    """Networks in the ensemble; their mean is the probability."""
    width: Count = 64
    """Units of each of the two hidden layers."""
    learning_rate: Positive = 1e-3
    """Adam's step size."""
    sparsity: NonNegative = 0.1
    """L1 penalty of the first layer: with each of Adam's steps its weights shrink by this share of the learning rate.
    An end shows in few numbers of the observation; without the penalty, networks overfit the few ends that there are.
    """
    batch_size: Annotated[int, Ge(2)] = 256
    """Rows of a minibatch; half of them end an episode, however rare that is."""
    batches: Count = 300
    """Minibatches of each fit, more in the first; networks go on from where the last fit left them."""
    rewards: bool = True
    """Learn rewards of terminating steps here, where a termination rule is known, too, and leave them out of the
    model's targets and of the reward's spread. A terminal penalty is a jump that the model would smear over the steps
    before it. False in the paper."""


@dataclass(frozen=True)
class CriticConfig:
    """The ensemble of value functions."""

    members: Count = 5
    """Critics in the ensemble; the actor follows their mean."""
    target_members: Count | None = None
    """Critics whose minimum is the target, drawn anew for each update. None: 2, as in the paper, where an episode may
    end, else 1."""
    width: Count = 256
    """Units of each hidden layer."""
    activation: ActivationName = "silu"
    """Activation function of the hidden layers."""
    dropout: Dropout = 1e-3
    """Dropout after each hidden layer in the critic's loss (nowhere else)."""
    norm_eps: Positive | None = 1e-5
    """LayerNorm's epsilon before layers 2, 3 and 4. None: no LayerNorm."""
    target_rate: MovingRate = 0.005
    """Polyak rate (tau): share of the critics that moves into the target critics with each update."""
    quantile: Annotated[float, Interval(ge=0, lt=0.5)] = 0.01
    """The bounds of Q come from this quantile of imagined rewards and its mirror image."""
    bounds_rate: MovingRate = 3e-4
    """How fast the bounds follow."""
    bounds: Literal["all", "alive", "alive_and_zero", "endings"] = "endings"
    """Which rewards set the bounds. endings: imagined rewards of steps that go on, earned forever; where episodes end,
    also 0 and the rewards of the steps that really ended one, which are earned once. The others take the reward of an
    ending for one that could be earned forever: all imagined rewards, those before termination, or those and 0."""


@dataclass(frozen=True)
class PolicyConfig:
    """Actor, temperature, and the loop that improves them."""

    width: Count = 256
    """Units of each of the actor's three hidden layers."""
    batch_size: Count = 256
    """Start states, and so imagined trajectories, of an update. A distribution rollout has this many, or a multiple."""
    learning_rate: Positive = 3e-4
    """Adam's step size for actor, critics and temperature."""
    keep_moments: bool = False
    """Keep Adam's moments from one iteration to the next; otherwise they start afresh, as the model has changed."""
    discount: Annotated[float, Interval(gt=0, lt=1)] | None = None
    """How much a reward one step later is worth. None: such that 1 / (1 - discount), the steps that count, are two
    fifths of an episode, within 0.95..0.995; 0.995, the paper's, for episodes of 500 steps and more."""
    initial_temperature: Positive = 0.1
    """Weight of the entropy bonus before it is tuned, in units of the reward."""
    reward_unit: Literal["spread", "size", "one"] = "spread"
    """In which units of the reward temperature and losses are measured, so that the scale of rewards does not matter.
    spread: its standard deviation in the replay; size: the same, but once an episode has ended its distance from 0,
    which is what an ended one earns. one: none, as in the paper."""
    target_entropy_per_action: float = -1.0
    """The temperature steers the policy's entropy towards this times the number of actions."""
    updates_per_step: Positive = 2.0
    """Joint updates of critic and actor per environment step: the update-to-data ratio. 1 in the paper."""
    critic_only_share: NonNegative = 0.25
    """After each fit the critics first train alone, for this many updates per step of an iteration."""
    refresh_every: Count = 20
    """Updates between two distribution rollouts."""
    ring_capacity: Count = 51_200
    """Capacity of the model buffer, a ring of imagined states that training rollouts start from, about 98 updates'
    worth; without training rollouts, of imagined steps."""
    states_per_refresh: Count = 5120
    """States that each distribution rollout adds at least; it has more rows side by side where its horizon is short."""
    clear_each_iteration: bool = False
    """Empty the model buffer at each iteration, as the paper's text says and its code never did."""
    replay_start_share: Share = 0.0
    """Share of training rollouts that start in real states of the replay instead of imagined ones. Without
    distribution rollouts all do."""


@dataclass(frozen=True)
class LoopConfig:
    """Collection and evaluation."""

    steps_per_iteration: Count | None = 200
    """Agent steps between two fits (L). None: the time limit, within 200..1000, rounded to a multiple of 20, as in the
    paper."""
    steps_per_turn: Count | None = None
    """Agent steps collected with one policy, which then learns. None: those of an iteration, as the model is fitted
    once in each. A few, where there is no model."""
    seed_episodes: CountOrZero = 2
    """Random actions before the first fit: the steps of so many episodes, each as long as the time limit, within
    200..1000. There are none where transitions come from a file."""
    seed_iterations: CountOrZero | None = None
    """The same, as a number of iterations. None: those of `seed_episodes`."""
    first_actions: Literal["held", "independent"] = "independent"
    """Random actions before the first fit: each held for 1 to 30 steps, so that their effects do not average out, or
    new in every step, as in the paper."""
    random_episodes: bool = False
    """Now and then an episode is random like the first ones, ever more seldom: at step t one in t / (time limit). None
    are where a seed policy acts first or transitions come from a file."""
    evaluate_every: Count | None = None
    """Iterations between evaluations; there is one at step 0, after the first fit and at the end, too. None: those of 5
    episodes, counted as for `seed_episodes`."""
    evaluation_episodes: CountOrZero | None = None
    """Test episodes per evaluation, with the deterministic policy. 0: none. None: 10, but 0 with `single_env` and with
    an environment object that is not of a registered Gymnasium id, whose steps may be expensive."""
    time_limit: Count | None = None
    """Agent steps after which an episode is cut off. None: what the environment's registration says or, if it says
    nothing, 1000; it may end earlier by itself."""
    action_repeat: Count | None = None
    """Simulator steps for which each action is held; their rewards add up. None: 2 for DMControl, otherwise 1."""
    num_envs: Count = 1
    """Environments per seed that collect side by side, for slow simulators; an iteration has as many steps as ever."""
    single_env: bool = False
    """For real hardware (a robot, a plant): one environment, in the main process, for one seed. It is idle while the
    agent learns: between two episodes or, if it has methods `pause` and `resume`, paused. No action is replayed, and
    `check_env` does not run. An environment object is always used like this."""
    step_timeout: Positive = 300.0
    """Seconds after which an environment that has not come back from a reset or an action is given up."""
    replay_episodes: Literal["auto", "never"] = "auto"
    """Whether a resumed run continues an interrupted episode by repeating its actions, which is exact on a simulator.
    auto: if the environment is made by an id or a function, its metadata do not say `"replay_episodes": False`, and its
    reset returns the same first observation. never: a new episode begins, as for an environment object."""
    replay_capacity: Count = 1_000_000
    """Transitions kept at most; the oldest go first."""
    checkpoint_every: Count | None = None
    """Iterations between checkpoints. None: each, or as often as writing takes a twentieth of the time at most."""
    keep_checkpoints: Count = 3
    """Checkpoints that are kept: the last ones."""


@dataclass(frozen=True)
class Config:
    """A whole experiment's numbers, one set for every task. The defaults are the paper's, but for how the model is
    fitted (a little and often), two updates per step, longer distribution rollouts, fewer random steps, less exact
    products on a GPU, and what follows from the task (see `schedule`); `presets.paper` has the paper's."""

    horizons: Horizons = field(default_factory=Horizons)
    model: ModelConfig = field(default_factory=ModelConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    terminator: TerminatorConfig = field(default_factory=TerminatorConfig)
    termination: Literal["auto", "known", "learned", "never"] = "auto"
    """How the model knows when an episode ends: by a known rule, by learning it, or never but by the time limit. auto:
    the known rule while it agrees with the environment, else learned."""
    precision: Literal["tensorfloat32", "float32"] = "tensorfloat32"
    """How a GPU multiplies matrices. tensorfloat32 rounds the factors to 10 bits and is faster."""
    deterministic: bool = False
    """Have a GPU repeat itself to the last bit, at the price of some speed; a CPU always does."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_model()
        require(
            (self.critic.target_members or 1) <= self.critic.members,
            "critic.target_members",
            self.critic.target_members,
            f"between 1 and critic.members ({self.critic.members})",
        )
        self._check_loop()

    def with_(self, **values: Any) -> "Config":
        """The same but for some values, `group__name` each: `dh.presets.quick.with_(policy__width=64)`. All change at
        once, as they must agree."""
        groups: dict[str, Any] = {}
        for name, value in values.items():
            group, _, inner = name.partition("__")
            if group not in self.__dataclass_fields__:
                raise unknown("setting", group, self.__dataclass_fields__)
            record = groups.get(group, getattr(self, group))
            if inner and inner not in getattr(record, "__dataclass_fields__", {}):
                raise unknown(f"setting in {group}", inner, getattr(record, "__dataclass_fields__", {}))
            groups[group] = replace(record, **{inner: value}) if inner else value
        return replace(self, **groups)

    @property
    def has_model(self) -> bool:
        """Whether anything is imagined."""
        return self.model.members > 0

    @property
    def kept_per_row(self) -> int:
        """States that a row of a distribution rollout adds to the model buffer; steps, where those are learnt from."""
        return self.horizons.distribution + (self.horizons.training > 0)

    @property
    def distribution_rows(self) -> int:
        """Rows of a distribution rollout: as many batches as give `policy.states_per_refresh` states."""
        batch = self.policy.batch_size
        return batch * -(-self.policy.states_per_refresh // (batch * self.kept_per_row))

    def _check_model(self) -> None:
        members, batch, reach = self.model.members, self.policy.batch_size, max(*vars(self.horizons).values())
        needed = "at least 2" if reach > 0 else "0, as both horizons are 0 and nothing is imagined (see the preset sac)"
        require(members >= 2 if reach > 0 else members == 0, "model.members", members, needed)
        require(
            members == 0 or batch % members == 0,
            "policy.batch_size",
            batch,
            f"a multiple of model.members ({members}), so that each member gets an equal share of the rows",
        )
        if self.horizons.distribution > 0:
            kept = self.distribution_rows * self.kept_per_row
            require(
                self.policy.ring_capacity >= kept,
                "policy.ring_capacity",
                self.policy.ring_capacity,
                f"at least one distribution rollout ({kept} states)",
            )

    def _check_loop(self) -> None:
        steps, turn, multiple = self.loop.steps_per_iteration, self.loop.steps_per_turn, steps_multiple(self)
        if turn is not None:
            require(not self.has_model, "loop.steps_per_turn", turn, "None where there is a model")
            wanted = math.lcm(self.policy.refresh_every, self.fit.held_out_every)
            what = f"a multiple of {wanted} (policy.refresh_every and fit.held_out_every)"
            require(turn % wanted == 0, "loop.steps_per_turn", turn, what)
            ratio, per_turn = self.policy.updates_per_step, turn * self.policy.updates_per_step
            whole = f"such that a turn has a multiple of policy.refresh_every ({self.policy.refresh_every}) updates"
            require(per_turn % self.policy.refresh_every == 0, "policy.updates_per_step", ratio, whole)
        if steps is not None:
            require(
                steps % multiple == 0,
                "loop.steps_per_iteration",
                steps,
                f"a multiple of {multiple} (policy.refresh_every, fit.held_out_every and loop.steps_per_turn)",
            )


def steps_multiple(config: Config) -> int:
    """What the steps of an iteration must be a multiple of."""
    return math.lcm(config.policy.refresh_every, config.fit.held_out_every, config.loop.steps_per_turn or 1)
