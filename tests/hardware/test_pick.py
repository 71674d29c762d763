from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import DeviceError, DevicesBusy
from duoka.hardware.choice import choose, user_of
from duoka.hardware.gpu import Gpu, GpuProcess, Holder
from duoka.hardware.inventory import Inventory
from duoka.hardware.inventory import read as read_inventory
from duoka.hardware.spec import parse
from tests.hardware.driver import play, put

GIB = 1 << 30


def card(index: int, **facts: object) -> Gpu:
    return replace(Gpu(index, f"GPU-{index}", "A100", 80 * GIB, 600 << 20, 0, processes=()), **facts)


def picked(text: str, *gpus: Gpu, visible: str | None = None) -> list[int | None]:
    return [device.index for device in choose(parse(text), replace(Inventory(gpus, 16, ""), visible=visible)).devices]


BOB = GpuProcess(7, "compute", 9 * GIB, "bob", "python x.py")
COMPUTING = {"processes": (BOB,), "used": 10 * GIB, "utilisation": 90}
DRAWING = {"processes": (GpuProcess(8, "graphics", 20 << 20, "ann", "Xorg"),)}
TAKEN = {"holder": Holder(9, "duoka run a.py", 0.0)}


def test_free_is_where_nobody_computes() -> None:
    cards = card(0, **COMPUTING), card(1, **DRAWING), card(2, **TAKEN), card(3)
    assert picked("free:2", *cards) == [1, 3]
    with pytest.raises(DevicesBusy) as error:
        picked("free:3", *cards)
    assert str(error.value) == (
        "--devices free:3: 2 GPUs are available now; GPU 0: bob pid 7 python x.py; "
        "GPU 2: duoka run a.py (pid 9) has locked it; --wait, or wait= in Python, queues until they are free"
    )


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"used": 5 * GIB}, "5.0 GiB are in use by processes that cannot be seen from here"),
        ({"used": int(1.5 * GIB)}, ""),  # the driver's own, on a large card
        ({"utilisation": 40}, "40% busy by processes that cannot be seen from here"),
        ({"processes": None, "used": None, "utilisation": None}, ""),
        (DRAWING, ""),
        (COMPUTING, "bob pid 7 python x.py"),
    ],
)
def test_who_computes_on_a_card(facts: dict[str, object], said: str) -> None:
    assert user_of(card(0, **facts)) == said


def test_best_is_the_least_work_then_the_most_memory_and_never_another_runs() -> None:
    cards = card(0, **COMPUTING), card(1, used=20 * GIB), card(2, used=10 * GIB), card(3, **TAKEN)
    assert picked("best:1", *cards) == [2]
    assert picked("best:3", *cards) == [0, 1, 2]
    with pytest.raises(DevicesBusy, match=r"GPU 3: duoka run a.py"):
        picked("best:4", *cards)


def test_memory_is_a_condition() -> None:
    cards = card(0), card(1, memory=24 * GIB), card(2, used=75 * GIB, processes=())
    assert picked("best:1,mem>=40G", *cards) == [0]
    with pytest.raises(DevicesBusy, match=r"GPU 2: 5.0 GiB are free"):
        picked("best:2,mem>=40G", *cards)
    with pytest.raises(DeviceError, match=r"2 GPUs are asked for; they have GPU 0 80.0 GiB, GPU 1 24.0 GiB") as error:
        picked("best:2,mem>=79G", card(0), card(1, memory=24 * GIB))
    assert not isinstance(error.value, DevicesBusy)


def test_more_than_there_are_is_not_worth_waiting_for() -> None:
    with pytest.raises(DeviceError) as error:
        picked("free:2", card(0))
    assert not isinstance(error.value, DevicesBusy)


def test_broken_and_split_cards_are_not_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "lost")
    inventory = read_inventory()
    choice = choose(parse("free:1"), inventory)
    assert [device.index for device in choice.devices] == [0]
    with pytest.raises(DeviceError, match="can be used here"):
        choose(parse("free:2"), inventory)
    assert "left out: GPU is lost" in choose(parse("auto"), inventory).notes[0]
    with pytest.raises(DeviceError, match="GPU 1 cannot be used: GPU is lost"):
        choose(parse("0,1"), inventory)


FIRST, SECOND = "MIG-11111111-0000-5000-8000-000000000001", "MIG-22222222-0000-5000-8000-000000000002"


def test_parts_are_picked_and_named_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "mig")
    split = read_inventory()
    for text, uuid in (("free:1", SECOND), ("free:1,mem>=4G", SECOND), ("best:1,mem>=9G", FIRST), ("MIG-1", FIRST)):
        (device,) = choose(parse(text), split).devices
        assert device.uuid == uuid
    assert (str(device), device.index, device.part, device.number) == ("GPU 0:0", 0, 0, "0:0")
    with pytest.raises(DevicesBusy, match=r"0 GPUs are available now; GPU 0:0: pid 4194305|no GPUs are available"):
        choose(parse("free:1,mem>=9G"), split)
    with pytest.raises(DeviceError, match=r"no GPUs can be used here; a part of a GPU \(MIG\) works alone"):
        choose(parse("free:2"), split)
    with pytest.raises(DeviceError, match=f"GPU 0 is split \\(MIG\\); name one of its parts: {FIRST}, {SECOND}"):
        choose(parse("0,"), split)
    with pytest.raises(DeviceError, match="MIG-3 cannot be used"):
        choose(parse("MIG-3"), split)
    for text in ("auto", "cuda", "1"):
        choice = choose(parse(text), split)
        assert [device.uuid for device in choice.devices] == [FIRST]
        assert "--devices free:1 takes one that nobody uses" in choice.notes[0]


@pytest.mark.parametrize("visible", [SECOND, "MIG-22222222"])
def test_a_part_that_cuda_visible_devices_names_is_all_there_is(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, "mig")
    for text in ("auto", "free:1", "best:1", "1", "cuda", "MIG-2"):
        choice = choose(parse(text), replace(read_inventory(), visible=visible))
        assert [device.uuid for device in choice.devices] == [SECOND]
        assert "respected: cuda:0 = GPU 0:2" in choice.notes[-1]
    with pytest.raises(DeviceError, match=f"CUDA_VISIBLE_DEVICES={visible} allows GPU 0:2"):
        choose(parse("MIG-1"), replace(read_inventory(), visible=visible))


def test_whole_cards_are_taken_before_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = play(monkeypatch, "one")
    split = play(monkeypatch, "mig")
    put(monkeypatch, {**whole, "cards": [*split["cards"], *whole["cards"]]})
    both = read_inventory()
    choice = choose(parse("auto"), both)
    assert [device.number for device in choice.devices] == ["1"]
    assert choice.notes == ("GPU 0 is left out: it is split into parts (MIG), of which a run can use one",)
    assert [device.number for device in choose(parse("free:1"), both).devices] == ["1"]
    with pytest.raises(DeviceError, match="1 GPU can be used here; a part of a GPU"):
        choose(parse("free:2"), both)


def test_the_choice_and_its_reason_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "eight")
    choice = choose(parse("free:2"), replace(read_inventory(), visible="0,1,2,5,6"))
    assert [device.index for device in choice.devices] == [1, 6]
    assert choice.notes[0].startswith("--devices free:2 picked GPU 1 (0% busy, 79.4 GiB free), GPU 6 (0% busy")
    assert "not GPU 0: pid 4194301; GPU 2: pid 4194302, pid 4194303; GPU 5: 40.0 GiB are in use" in choice.notes[0]
    assert "cuda:0 = GPU 1, cuda:1 = GPU 6" in choice.notes[1]


def test_names_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "eight")
    inventory = read_inventory()
    assert [device.index for device in choose(parse("GPU-55c05a1b,GPU-22"), inventory).devices] == [5, 2]
    for text, said in (("GPU-9", "GPU-9 cannot be used; this machine has"), ("GPU-5,GPU-55", "more of its UUID")):
        with pytest.raises(DeviceError, match=said):
            choose(parse(text), inventory)


facts = st.fixed_dictionaries({}, optional={"used": st.integers(0, 80 * GIB), "utilisation": st.integers(0, 100)})


@given(st.lists(st.tuples(facts, st.sampled_from([{}, COMPUTING, DRAWING, TAKEN])), min_size=1, max_size=8))
def test_what_is_picked_is_always_free(drawn: list[tuple[dict[str, object], dict[str, object]]]) -> None:
    cards = [card(index, **(some | more)) for index, (some, more) in enumerate(drawn)]
    free = [one.index for one in cards if one.holder is None and not user_of(one)]
    for count in range(1, len(cards) + 1):
        if count <= len(free):
            assert set(picked(f"free:{count}", *cards)) <= set(free)
        else:
            with pytest.raises(DevicesBusy):
                picked(f"free:{count}", *cards)
