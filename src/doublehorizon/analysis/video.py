"""A policy at work, as a video. Needs no JAX."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from doublehorizon.acting.policy import NumpyPolicy
from doublehorizon.errors import UserError
from doublehorizon.run.run_reader import Run

_LARGEST_RATE = 60  # frames per second; more cannot be seen


def record_video(
    run: Run,
    seed: int,
    policy: NumpyPolicy,
    path: Path,
    episodes: int = 1,
    env: str | None = None,
    on_frame: Callable[[], None] = lambda: None,
) -> float:
    """Writes an mp4 file of test episodes at real speed; their mean return."""
    av = _import_av()
    simulator = run.simulator(env, "rgb_array")
    rate = float(simulator.env.metadata.get("render_fps") or 30) / simulator.spec.action_repeat
    every = max(1, round(rate / _LARGEST_RATE))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    total = 0.0
    try:
        with av.open(str(partial), "w", format="mp4") as container:
            stream = None
            for episode in range(episodes):
                obs, done, step = simulator.reset(seed + episode), False, 0
                while not done:
                    if step % every == 0:
                        picture = _even(_picture(simulator))
                        stream = stream or _stream(container, round(rate / every), picture)
                        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
                        on_frame()
                    obs, reward, ended, cut = simulator.step(policy.act(obs))
                    total, done, step = total + reward, ended or cut, step + 1
            if stream is not None:
                container.mux(stream.encode())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        simulator.close()
    return total / episodes


def _picture(simulator: Any) -> np.ndarray:
    try:
        picture = simulator.env.render()
    except Exception as problem:  # whatever a graphics library raises
        raise UserError(
            f"{simulator.spec.name} cannot be drawn here: {type(problem).__name__} {problem}. Without a display MuJoCo "
            "needs EGL (Debian: libegl1) or OSMesa (libosmesa6, and MUJOCO_GL=osmesa)."
        ) from problem
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        raise UserError(
            f"{simulator.spec.name} draws no pictures: made with render_mode='rgb_array', its render() must return an "
            "array [height, width, 3]."
        )
    return picture


def _even(picture: np.ndarray) -> np.ndarray:
    """The video format needs even sizes."""
    height, width = picture.shape[:2]
    return np.ascontiguousarray(picture[: height // 2 * 2, : width // 2 * 2, :3].astype(np.uint8))


def _stream(container: Any, rate: int, picture: np.ndarray) -> Any:
    stream = container.add_stream("libx264", rate=max(1, rate))
    stream.height, stream.width = picture.shape[:2]
    stream.pix_fmt = "yuv420p"  # what every player and browser shows
    return stream


def _import_av() -> Any:
    try:
        import av  # type: ignore[import-not-found]
    except ImportError as problem:
        raise UserError("videos need a package that is not installed: pip install 'doublehorizon[video]'.") from problem
    return av
