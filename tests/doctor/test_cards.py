from __future__ import annotations

import pytest

from duoka.doctor.host import check_card, check_links, examine_cards
from duoka.hardware import inventory
from duoka.hardware.vendors import nvidia
from duoka.hardware.vendors.nvidia import Link
from tests.hardware.driver import play


@pytest.mark.parametrize(
    ("recording", "levels"),
    [
        ("one", ["ok"]),
        ("lost", ["ok", "fault", "fault"]),
        ("mig", ["ok"]),
        ("eight", ["advice", "ok", "advice", "ok", "ok", "advice", "ok", "ok"]),
        ("none", []),
    ],
)
def test_cards(recording: str, levels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, recording)
    assert [check_card(gpu).level for gpu in inventory.read().gpus] == levels
    assert [finding.level for finding in examine_cards()][: len(levels)] == levels


def test_a_hot_card(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "one")["cards"][0]["nvmlDeviceGetTemperature"] = 91
    assert "91°C" in check_card(inventory.read().gpus[0]).what


def test_links() -> None:
    links = [Link(0, 1, True, 12), Link(0, 2, False, 0), Link(1, 2, True, 0), Link(0, 3, None, 0)]
    assert [(finding.level, finding.what) for finding in check_links(links)] == [
        ("ok", "12 NVLinks"),
        ("advice", "no direct access to each other's memory"),
        ("ok", "PCI, direct"),
        ("ok", "PCI"),
    ]


def test_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "eight")
    assert len(list(check_links(nvidia.links()))) == 28
