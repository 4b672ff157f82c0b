"""Tasks that are known here by name, with their sizes and the steps that the paper gave them."""

from typing import NamedTuple


class Entry(NamedTuple):
    """A task: observations, actions, and the simulator steps of the paper's runs, if it had it."""

    name: str
    obs_size: int
    act_size: int
    steps: int | None = None


PAPER = (
    Entry("paper/HalfCheetah", 17, 6, 500_000),
    Entry("paper/Hopper", 11, 3, 500_000),
    Entry("paper/Walker2d", 17, 6, 500_000),
    Entry("paper/Ant", 27, 8, 500_000),
    Entry("paper/Humanoid", 45, 17, 500_000),
)
CONTROL_SUITE = (
    Entry("dmc/acrobot-swingup", 6, 1, 500_000),
    Entry("dmc/acrobot-swingup_sparse", 6, 1, 500_000),
    Entry("dmc/cartpole-balance", 5, 1, 250_000),
    Entry("dmc/cartpole-swingup", 5, 1, 250_000),
    Entry("dmc/cartpole-swingup_sparse", 5, 1, 500_000),
    Entry("dmc/cheetah-run", 17, 6, 500_000),
    Entry("dmc/cup-catch", 8, 2, 250_000),
    Entry("dmc/finger-spin", 9, 2, 500_000),
    Entry("dmc/finger-turn_easy", 12, 2, 500_000),
    Entry("dmc/finger-turn_hard", 12, 2, 500_000),
    Entry("dmc/hopper-hop", 15, 4, 500_000),
    Entry("dmc/hopper-stand", 15, 4, 500_000),
    Entry("dmc/humanoid-stand", 67, 21, 500_000),
    Entry("dmc/quadruped-run", 78, 12, 500_000),
    Entry("dmc/reacher-hard", 6, 2, 500_000),
    Entry("dmc/walker-run", 24, 6, 500_000),
    Entry("dmc/walker-stand", 24, 6, 250_000),
    Entry("dmc/walker-walk", 24, 6, 250_000),
)
GYMNASIUM = (
    Entry("Pendulum-v1", 3, 1),
    Entry("MountainCarContinuous-v0", 2, 1),
    Entry("InvertedPendulum-v5", 4, 1),
    Entry("InvertedDoublePendulum-v5", 9, 1),
    Entry("Reacher-v5", 10, 2),
    Entry("Pusher-v5", 23, 7),
    Entry("Swimmer-v5", 8, 2),
    Entry("Hopper-v5", 11, 3),
    Entry("HalfCheetah-v5", 17, 6),
    Entry("Walker2d-v5", 17, 6),
    Entry("Ant-v5", 105, 8),
    Entry("Humanoid-v5", 348, 17),
    Entry("HumanoidStandup-v5", 348, 17),
)
GROUPS = {
    "the paper's tasks": PAPER,
    "DeepMind's control suite, those in the paper (all others work too)": CONTROL_SUITE,
    "Gymnasium (any other id with bounded continuous actions works too)": GYMNASIUM,
}
