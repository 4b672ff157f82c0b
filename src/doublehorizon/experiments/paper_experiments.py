"""The paper's experiments: which variants are compared, and where in the authors' results their curves are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from doublehorizon.config import Config
from doublehorizon.config_json import changed
from doublehorizon.errors import unknown
from doublehorizon.experiments.jobs import Job
from doublehorizon.presets import RELATIVES, Changes, refuse_renamed

_MAIN = ("gym/esvg", "dmc/esvg")
TASKS = ("paper/HalfCheetah", "paper/Hopper", "paper/Walker2d", "paper/Ant", "paper/Humanoid")


@dataclass(frozen=True)
class Variant:
    """Values that differ from the rest, and folders in which published curves may be."""

    changes: Changes
    published: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperExperiment:
    """An experiment: what it asks, and its variants by name; the first one is what the others are compared with."""

    question: str
    variants: dict[str, Variant]


def _each(name: str, values: Mapping[Any, tuple[str, ...]], also: Changes | None = None) -> dict[str, Variant]:
    short = name.rsplit(".", 1)[-1]
    return {f"{short}-{value:g}": Variant({**(also or {}), name: value}, found) for value, found in values.items()}


EXPERIMENTS = {
    "ablation": PaperExperiment(
        "what do distribution and training rollouts contribute?",
        {
            "dhmbpo": Variant({}, _MAIN),
            "no-dr": Variant(RELATIVES["no-dr"], ("ablation/no-roll", "roll/no-roll")),
            "no-tr": Variant(RELATIVES["no-tr"], ("roll/no-t-roll",)),
            "sac": Variant(RELATIVES["sac"], ("gym/sac", "dmc/sac")),
        },
    ),
    "dr-horizon": PaperExperiment(
        "how long should distribution rollouts be?",
        _each(
            "horizons.distribution",
            {20: _MAIN, 0: ("ablation/no-roll", "roll/no-roll"), 10: ("d_roll_len/10",), 40: ("d_roll_len/40",)},
        ),
    ),
    "tr-horizon": PaperExperiment(
        "how long should training rollouts be?",
        _each(
            "horizons.training",
            {5: ("t_roll_len/5", *_MAIN)} | {t: (f"t_roll_len/{t}",) for t in (1, 3, 7, 9)},
        ),
    ),
    "utd": PaperExperiment(
        "what do more updates per environment step bring?",
        _each("policy.updates_per_step", {1.0: _MAIN} | {float(n): (f"utd/{n}",) for n in (2, 4, 8)}),
    ),
    "architecture": PaperExperiment(
        "what do the model's activation, LayerNorm and dropout contribute?",
        {
            "dhmbpo": Variant({}, _MAIN),
            "relu": Variant({"model.activation": "relu"}, ("ablation/ReLU",)),
            "no-dropout": Variant({"model.dropout": (0.0, 0.0, 0.0)}, ("ablation/no_drop",)),
            "no-layernorm": Variant({"model.norm_eps": None}, ("ablation/no_ln",)),
        },
    ),
    "no-tr-utd": PaperExperiment(
        "how many updates per step are needed without training rollouts?",
        _each(
            "policy.updates_per_step",
            {1.0: ("roll/no-t-roll",), 2.0: (), 4.0: (), 8.0: (), 16.0: ()},
            RELATIVES["no-tr"],
        ),
    ),
}


def paper_experiment(name: str) -> PaperExperiment:
    """The experiment of that name."""
    refuse_renamed(name)
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def jobs_of(chosen: PaperExperiment, base: Config, tasks: tuple[str, ...], **others: object) -> list[Job]:
    """A job per task and variant; `others` are fields that all jobs share."""
    return [
        Job(task, name, changed(base, variant.changes), **others)  # type: ignore[arg-type]
        for task in tasks
        for name, variant in chosen.variants.items()
    ]
