"""Runs a program that seeds nothing, or trains too long: `short.py STEPS program.py ...`.

It ends after so many steps of an optimizer (0: at its own end), when it shows what has become of the parameters.
"""

import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

left = int(sys.argv.pop(1))


def count(optimizer: Any, *_: object) -> None:
    global left
    left -= 1
    if left == 0:
        for group in optimizer.param_groups:
            print("parameters", *(f"{float(value.detach().abs().sum()):.4e}" for value in group["params"]))
        sys.exit()


torch.set_num_threads(1)  # as a worker on a machine with two cores has: more of them wait for each other there
random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
if left:
    register_optimizer_step_post_hook(count)
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
