from __future__ import annotations

import json

import numpy
import pytest
import torch

import duoka
from duoka.system.code_files import is_standard, is_users


@pytest.mark.parametrize(
    ("file", "standard", "users"),
    [
        (json.__file__, True, False),
        ("<frozen importlib._bootstrap>", True, False),
        ("<string>", True, False),
        (torch.__file__, False, False),
        (numpy.__file__, False, False),
        (duoka.__file__, False, False),
        (__file__, False, True),
        ("/home/someone/train.py", False, True),
        ("/home/someone/.local/lib/python3.11/site-packages/datasets/builder.py", False, False),
        ("/usr/lib/python3/dist-packages/datasets/builder.py", False, False),
        ("train.py", False, True),
        ("/home/someone/.local/bin/duoka", False, False),
    ],
)
def test_whose_a_file_is(file: str, standard: bool, users: bool) -> None:
    assert (is_standard(file), is_users(file)) == (standard, users)
