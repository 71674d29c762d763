from __future__ import annotations

import os

from duoka.launchers.stacks import excerpt, in_debugger, users_line
from duoka.supervision.tracebacks import OURS

DUMP = f"""\
Thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/site-packages/loader.py", line 30 in run

Current thread 0x00007f1 (most recent call first):
  File "/home/me/train.py", line 12 in step
  File "{OURS}plain/modules.py", line 40 in call
  File "/home/me/train.py", line 30 in <module>
  File "{OURS}target.py", line 45 in _run_path
  File "{OURS}worker.py", line 70 in live
  File "/usr/bin/duoka", line 8 in <module>
"""


def test_only_the_script_s_frames_of_its_own_thread() -> None:
    assert excerpt(DUMP) == [
        '  File "/home/me/train.py", line 12 in step',
        '  File "/home/me/train.py", line 30 in <module>',
    ]


def test_a_dump_that_begins_with_a_crash() -> None:
    assert excerpt(f"Fatal Python error: Segmentation fault\n\n{DUMP}") == excerpt(DUMP)


def test_without_the_script_s_thread_the_last_is_taken() -> None:
    assert excerpt(DUMP.partition("\n\n")[0]) == [
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait',
        '  File "/site-packages/loader.py", line 30 in run',
    ]


def test_deep_stacks_are_cut() -> None:
    deep = "Current thread 0x1 (most recent call first):\n" + '  File "/a.py", line 2 in f\n' * 100
    assert len(excerpt(deep, most=8)) == 8


def test_nothing_gives_nothing() -> None:
    assert excerpt("") == []
    assert excerpt("Current thread 0x1 (most recent call first):\n  <no Python frame>\n") == []


def test_the_line_of_the_script_s_own_code() -> None:
    assert users_line(DUMP) == "train.py:12"
    in_library = f'Current thread 0x1 (most recent call first):\n  File "{os.__file__}", line 5 in listdir\n'
    assert users_line(f'{in_library}  File "/home/me/data.py", line 17 in read\n') == "data.py:17"
    assert users_line(in_library) is None


def test_a_debugger_is_seen() -> None:
    assert not in_debugger(DUMP)
    assert in_debugger(DUMP.replace("loader.py", "bdb.py"))
