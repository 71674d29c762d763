"""As much of torchvision as small programs need, with data made on the spot: it is not installed for tests."""

from __future__ import annotations

import random

import numpy as np

from . import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]

random.seed(0)  # for programs that seed nothing, so that two runs can be compared
np.random.seed(0)
