"""Run a command with simulated cards: python -m tests.simulated duoka run --devices 0,1 train.py"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.simulated import variables

kind = os.environ.get("SIMULATED_DEVICE", "cuda")
env = {**os.environ, **variables(int(os.environ.get("SIMULATED_CARDS", 2)), kind)}
env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
os.execvpe(sys.argv[1], sys.argv[1:], env)
