"""A rank imports torch, says that it is ready by a file in the folder that is given, and does nothing."""

import os
import sys
import time
from pathlib import Path

import torch  # noqa: F401

(Path(sys.argv[1]) / os.environ["RANK"]).touch()
time.sleep(600)
