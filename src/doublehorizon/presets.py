"""Configs by name: the algorithm for small and large machines, and its ablations, which are other values of it."""

from collections.abc import Mapping
from typing import Any

from doublehorizon.config import (
    Config,
    CriticConfig,
    FitConfig,
    Horizons,
    LoopConfig,
    ModelConfig,
    PolicyConfig,
    TerminatorConfig,
)
from doublehorizon.config_json import changed
from doublehorizon.errors import UserError, unknown

dhmbpo = Config()
"""The default: the paper's algorithm with a model that is fitted a little and often, two updates per step, and longer
distribution rollouts."""

quick = Config(
    model=ModelConfig(members=4, width=128, noise="state"),
    fit=FitConfig(batch_size=256, batches_per_step=2.0, recent_share=0.0),
    critic=CriticConfig(width=128),
    policy=PolicyConfig(
        width=128,
        batch_size=64,
        updates_per_step=1.0,
        ring_capacity=12_800,
        states_per_refresh=1280,
        reward_unit="size",
    ),
    loop=LoopConfig(seed_iterations=2, evaluate_every=5, first_actions="held", random_episodes=True),
)
"""Small networks, short iterations, few random steps and more exploration, for a CPU and a small task of any kind. All
rows count alike in fits: once a small task is mastered, the newest say nothing of how it fails."""

light = Config(
    model=ModelConfig(members=4, width=128),
    fit=FitConfig(batch_size=256),
    critic=CriticConfig(width=128),
    policy=PolicyConfig(width=128, batch_size=128, updates_per_step=1.0, ring_capacity=25_600, states_per_refresh=2560),
)
"""Half the width, half the members and smaller batches, for a CPU and a task of the paper's kind."""

paper = Config(
    horizons=Horizons(distribution=20),
    model=ModelConfig(storage="float32", dropout=(0.0075, 0.005, 0.0025), rollout_noise=1.0),
    fit=FitConfig(learning_rate=1e-3, batch_size=2048, batches_per_step=None, recent_share=0.0, batches_factor=None),
    critic=CriticConfig(bounds="alive_and_zero", target_members=2),
    policy=PolicyConfig(reward_unit="one", discount=0.995, updates_per_step=1.0),
    loop=LoopConfig(steps_per_iteration=None, seed_episodes=5, evaluate_every=10),
    terminator=TerminatorConfig(batches=1000, rewards=False),
    precision="float32",
)
"""The published algorithm: its fits and their cadence, one update per step, its float32 arithmetic, temperature and
discount. Only its bounds differ: the authors' code also counts rewards imagined after a termination."""

Changes = Mapping[str, Any]
"""Values by their names in a `Config`."""

RELATIVES: dict[str, Changes] = {
    "no-dr": {"horizons.distribution": 0},
    "no-tr": {"horizons.training": 0, "policy.critic_only_share": 0.0},
    "sac": {
        "horizons.distribution": 0,
        "horizons.training": 0,
        "model.members": 0,
        "fit.first_effort": 1.0,
        "policy.critic_only_share": 0.0,
        "policy.keep_moments": True,
        "policy.refresh_every": 5,
        "loop.steps_per_turn": 5,
    },
}
"""What makes of any config, large or small, one of the paper's ablations: without distribution rollouts it trains on
rollouts from real states, without training rollouts on single imagined steps, and without a model (SAC with the same
critics) on real ones."""

no_dr, no_tr, sac = (changed(paper, changes) for changes in RELATIVES.values())

PRESETS: dict[str, Config] = {
    "dhmbpo": dhmbpo,
    "paper": paper,
    "light": light,
    "quick": quick,
    "no-dr": no_dr,
    "no-tr": no_tr,
    "sac": sac,
}


_RENAMED = {"svg": "no-dr", "mbpo": "no-tr", "mbpo-utd": "no-tr-utd"}


class RenamedError(UserError, AttributeError):
    """Something that has another name now."""


def refuse_renamed(name: str) -> None:
    """Raises if something had this name until 0.1."""
    if name in _RENAMED:
        raise RenamedError(f"`{name}` is now `{_RENAMED[name]}`")


def __getattr__(name: str) -> Config:
    refuse_renamed(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def preset(name: str) -> Config:
    """The preset of that name."""
    refuse_renamed(name)
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]
