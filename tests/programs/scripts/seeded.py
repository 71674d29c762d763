"""Runs a program that seeds nothing: `seeded.py program.py ...`."""

import random
import runpy
import sys
from pathlib import Path

import numpy as np
import torch

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
