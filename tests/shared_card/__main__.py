"""Run a command that sees one GPU as several: python -m tests.shared_card 2 duoka run --devices 0,1 train.py"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.shared_card import variables

env = {**os.environ, **variables(int(sys.argv[1]))}
env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
os.execvpe(sys.argv[2], sys.argv[2:], env)
