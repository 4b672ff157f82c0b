"""A newcomer's first hour: the wheel in a fresh environment, and the commands of the docs, in order."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from test_cli import TINY_OPTIONS

ROOT = Path(__file__).parents[1]
LOAD_ONNX = """
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession("policy.onnx")
print(session.run(None, {"observation": np.array([[1.0, 0.0, 0.0]], np.float32)})[0].shape)
"""


@pytest.mark.slow
def test_the_wheel_installs_and_does_everything(tmp_path):
    def run(*words: str, cwd: Path = tmp_path) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, timeout=900, env=environment)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), cwd=ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python, command = (str(tmp_path / "venv" / "bin" / name) for name in ("python", "doublehorizon"))
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[onnx,video]", "onnxruntime")

    assert "doublehorizon COMMAND --help" in run(command, "--help")
    run(command, "train", "Pendulum-v1", "--steps", "80", "--seeds", "2", "--out", "run", *TINY_OPTIONS.split())
    assert "final test return" in run(command, "resume", "run", "--steps", "120")
    assert "seed 1:" in run(command, "eval", "run", "--episodes", "2")
    run(command, "plot", "run", "--out", "curves.png")
    run(command, "video", "run", "--seeds", "0")
    run(command, "report", "run")
    run(command, "export", "run", "policy.onnx")
    assert run(python, "-c", LOAD_ONNX).strip() == "(1, 1)"
    for name in ("curves.png", "run/video/seed0.mp4", "run/report.html", "policy.onnx"):
        assert (tmp_path / name).stat().st_size > 1000, name
    assert "done" in run(command, "list", ".")
    typed = "import doublehorizon, importlib.resources as r; print((r.files(doublehorizon) / 'py.typed').is_file())"
    assert run(python, "-c", typed).strip() == "True"
