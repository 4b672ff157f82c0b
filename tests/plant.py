"""A plant in a process of its own, which writes down every command; and the environment that talks to it.

python plant.py FOLDER      # serves on FOLDER/socket, writes FOLDER/commands
"""

import json
import os
import socket
import socketserver
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box


class Serve(socketserver.StreamRequestHandler):
    """A client's commands. The plant is where the last command, whosever that was, has left it; its sensor is noisy."""

    position, rng, lock = 0.0, np.random.default_rng(), threading.Lock()

    def handle(self) -> None:
        for line in self.rfile:
            with self.lock, (FOLDER / "commands").open("a") as log:
                log.write(line.decode())
                command = json.loads(line)
                Serve.position = 0.0 if command == "reset" else 0.9 * self.position + command
                seen = [
                    self.position + 1e-3 * self.rng.normal(),
                    self.position**2,
                    1.0,
                ]
            self.wfile.write((json.dumps(seen) + "\n").encode())


class Plant(gym.Env):
    """Its steps take two milliseconds. It fails once, when there is a file FOLDER/fail."""

    observation_space, action_space = Box(-np.inf, np.inf, (3,)), Box(-1.0, 1.0, (1,))

    def __init__(self, folder: Path):
        self.folder = folder
        self.link = socket.socket(socket.AF_UNIX)
        self.link.connect(str(folder / "socket"))
        self.file = self.link.makefile("rwb")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._ask("reset"), {}

    def step(self, action):
        time.sleep(0.002)
        if (self.folder / "fail").exists():
            (self.folder / "fail").unlink()
            raise RuntimeError("the motor is hot")
        return self._ask(float(action[0])), 0.0, False, False, {}

    def close(self):
        self.file.close()
        self.link.close()

    def _ask(self, command) -> np.ndarray:
        self.file.write((json.dumps(command) + "\n").encode())
        self.file.flush()
        return np.asarray(json.loads(self.file.readline()), np.float32)


def make_env() -> gym.Env:
    return Plant(Path(os.environ["PLANT"]))


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    (FOLDER / "commands").touch()
    socketserver.ThreadingUnixStreamServer(str(FOLDER / "socket"), Serve).serve_forever()
