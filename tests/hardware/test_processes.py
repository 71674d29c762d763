from __future__ import annotations

import os
import pwd
import sys
import time

import psutil
import pytest

from duoka.hardware.processes import describe


def test_this_process() -> None:
    user, command, since = describe(os.getpid())
    assert since is not None
    assert 0 < time.time() - since < 24 * 3600
    assert since == pytest.approx(psutil.Process().create_time(), abs=2)
    assert user == pwd.getpwuid(os.getuid()).pw_name
    assert os.path.basename(sys.executable)[:6] in command


def test_one_that_is_not_there() -> None:
    assert describe(4194304 + 1) == ("", "", None)
