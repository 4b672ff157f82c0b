"""Holds the tasks `paper/...` against another MuJoCo, such as the one that the published curves were made with.

    python -m venv OLD && OLD/bin/pip install "mujoco==2.3.7" "gymnasium==0.29.1" "numpy<2"
    python benchmarks/contacts.py --others OLD/bin/python

Both simulate the same episodes from the same model files, without ends; printed is the largest difference of positions
and velocities. With `--states FILE` it is the other one: it needs MuJoCo and Gymnasium alone.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import gymnasium
import mujoco
import numpy as np

FRAME_SKIPS = {"HalfCheetah": 5, "Hopper": 4, "Walker2d": 4, "Ant": 5, "Humanoid": 5}
EPISODES, STEPS = 60, 25


def plain_model(name: str) -> mujoco.MjModel:
    """The model as this MuJoCo reads its file."""
    folder = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
    file = {"HalfCheetah": "half_cheetah"}.get(name, name.lower())
    return mujoco.MjModel.from_xml_path(str(folder / f"{file}.xml"))


def states(model: mujoco.MjModel, skip: int) -> np.ndarray:
    """Positions and velocities of episodes with random starts and actions, `[episode, step, ...]`."""
    rng, data, found = np.random.default_rng(0), mujoco.MjData(model), []
    start = data.qpos.copy()
    low, high = model.actuator_ctrlrange.T
    for _ in range(EPISODES):
        mujoco.mj_resetData(model, data)
        data.qpos[:] = start + rng.uniform(-5e-3, 5e-3, model.nq)
        data.qvel[:] = rng.uniform(-5e-3, 5e-3, model.nv)
        mujoco.mj_forward(model, data)
        for _ in range(STEPS):
            data.ctrl[:] = rng.uniform(low, high)
            mujoco.mj_step(model, data, skip)
            found.append(np.concatenate([data.qpos, data.qvel]))
    return np.array(found).reshape(EPISODES, STEPS, -1)


def compare(others: str) -> None:
    from doublehorizon.envs import paper  # the other interpreter has no such thing

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "states.npz"
        subprocess.run([others, __file__, "--states", str(file)], check=True)
        with np.load(file) as loaded:
            expected = dict(loaded)
    print(f"MuJoCo {mujoco.__version__} against {expected.pop('version')}: largest difference within {STEPS} steps")
    for name, skip in FRAME_SKIPS.items():
        as_read, ours = (states(m, skip) for m in (plain_model(name), paper.TASKS[name]().model))
        apart = [float(np.abs(found - expected[name]).max()) for found in (as_read, ours)]
        print(f"  {name:12s} the file as it is {apart[0]:8.1e}    paper/{name} {apart[1]:8.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", metavar="PYTHON", help="another Python, with the other MuJoCo")
    parser.add_argument("--states", metavar="FILE", help="write the states that this MuJoCo finds")
    options = parser.parse_args()
    if options.states:
        found = {name: states(plain_model(name), skip) for name, skip in FRAME_SKIPS.items()}
        np.savez(options.states, version=mujoco.__version__, **found)
    elif options.others:
        compare(options.others)
    else:
        parser.error("say --others PYTHON")
