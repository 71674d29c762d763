from __future__ import annotations

from pathlib import Path

import pytest

from duoka.hardware.vendors import ascend

# The form of what npu-smi prints, with two cards of which the second has two chips.
NUMBERS = """\
        NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
        2                              0                              0                              Ascend 910B3
        2                              1                              -                              Mcu
        5                              0                              1                              Ascend 910B3
        5                              1                              2                              Ascend 910B3
        5                              2                              -                              Mcu
"""
TABLE = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 2     910B3               | OK            | 93.1        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 7           0    / 0          3391 / 65536         |
+===========================+===============+====================================================+
| 5     910B3               | Alarm         | -           41                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3349 / 65536         |
| 1                         | 0000:C3:00.0  | 0           0    / 0          3350 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 2       0                 | 4194301       | python3                  | 2048                    |
+===========================+===============+====================================================+
| No running processes found in NPU 5                                                            |
+===========================+===============+====================================================+
"""


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "davinci_manager").touch()
    monkeypatch.setattr(ascend, "DRIVER", tmp_path / "davinci_manager")


def test_npus_and_their_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend, "output", lambda *words: NUMBERS if "-m" in words else TABLE)
    answer = ascend.ask()
    assert (answer.why_none, answer.versions) == ("", {"driver": "24.1.rc2"})
    assert answer.lacking == "the package torch_npu is missing"
    first, second, third = answer.gpus
    assert (first.index, first.uuid, first.name) == (0, "NPU-0000:C1:00.0", "Ascend 910B3")
    assert (first.memory, first.used, first.utilisation) == (65536 << 20, 3391 << 20, 7)
    assert (first.temperature, first.power, first.problem) == (40, 93.1, "")
    assert [(user.pid, user.memory) for user in first.processes or ()] == [(4194301, 2048 << 20)]
    assert (second.index, second.power, second.problem) == (1, None, "npu-smi says Alarm")
    assert (third.index, third.uuid, third.processes) == (2, "NPU-0000:C3:00.0", ())


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*words: str) -> str:
        raise OSError("dcmi module initialize failed")

    monkeypatch.setattr(ascend, "output", fails)
    assert ascend.ask().why_none == "the Ascend driver does not answer (dcmi module initialize failed)"
    monkeypatch.setattr(ascend, "output", lambda *words: "")
    assert ascend.ask().why_none == "npu-smi lists no NPU"
