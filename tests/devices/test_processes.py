from __future__ import annotations

import os
import pwd
import sys

from duoka.devices.processes import describe


def test_this_process() -> None:
    user, command = describe(os.getpid())
    assert user == pwd.getpwuid(os.getuid()).pw_name
    assert os.path.basename(sys.executable)[:6] in command


def test_one_that_is_not_there() -> None:
    assert describe(4194304 + 1) == ("", "")
