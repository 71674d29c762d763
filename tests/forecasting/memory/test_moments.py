from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from duoka.forecasting.moments import MemoryLayout, MemoryRecord, on_host, peak
from tests.forecasting.memory.made import MB, Story

ONE, DDP, FSDP = MemoryLayout("single", 1), MemoryLayout("ddp", 2), MemoryLayout("fsdp", 2)


def megabytes(story: Story, layout: MemoryLayout) -> float:
    return peak(story.record, layout) / MB


def test_rows_are_shared_and_parameters_are_not_with_ddp() -> None:
    story = Story()
    story.alive(10, "parameter", 0)
    story.alive(20, "state", 0)
    story.alive(3, "kept")
    rows = story.make(8, "rows")
    story.make(1, "constant")
    story.now("freed", rows)
    assert megabytes(story, ONE) == 42
    assert megabytes(story, DDP) == 38
    assert megabytes(story, FSDP) == 5 + 10 + 3 + 4 + 1
    offloaded = replace(FSDP, offloads=True)
    assert megabytes(story, offloaded) == 3 + 4 + 1
    assert on_host(story.record, offloaded) == 30 * MB
    assert on_host(story.record, replace(offloaded, devices=4, machines=2)) == 15 * MB
    assert on_host(story.record, FSDP) == 0


def test_hsdp_divides_the_model_by_the_devices_of_a_machine() -> None:
    story = Story(8)
    story.alive(8, "parameter", 0)
    story.alive(16, "state", 0)
    story.make(8, "rows")
    assert megabytes(story, MemoryLayout("hsdp", 4, machines=2)) == 4 + 8 + 2
    assert megabytes(story, MemoryLayout("fsdp", 4, machines=2)) == 2 + 4 + 2


@pytest.mark.parametrize(("batch", "devices", "share"), [(8, 4, 2 / 8), (7, 2, 4 / 7), (3, 4, 1.0), (None, 2, 1.0)])
def test_the_largest_share_counts(batch: int | None, devices: int, share: float) -> None:
    story = Story(batch)
    story.make(56, "rows")
    assert megabytes(story, MemoryLayout("ddp", devices)) == pytest.approx(56 * share)


def test_the_peak_is_that_of_a_moment() -> None:
    story = Story()
    first = story.make(8, "rows")
    story.now("freed", first)
    story.make(6, "constant")
    assert megabytes(story, ONE) == 8
    assert megabytes(story, DDP) == 6


def test_gradients_are_copied_to_buckets_until_the_backward_pass_ends() -> None:
    story = Story()
    story.alive(40, "parameter", 0)
    story.make(20, "gradient", 0)
    story.make(20, "gradient", 0)
    story.now("step")
    story.make(5, "optimizer")
    assert megabytes(story, ONE) == 85
    assert megabytes(story, DDP) == 120  # both gradients in buckets, of which the second is sent at the end


def test_blocks_come_together_with_what_is_received() -> None:
    story = Story()
    weight = story.alive(6, "parameter", 0)
    story.alive(4, "parameter", 0)
    other = story.alive(6, "parameter", 1)
    story.now("used", weight)
    assert megabytes(story, FSDP) == 8 + 5 + 10 + 10  # parts, sent, received, put together
    story.now("used", other)
    assert megabytes(story, FSDP) == 8 + 5 + 10 + 10
    assert megabytes(story, DDP) == 16


def test_a_block_is_released_when_its_gradients_are_sent() -> None:
    story = Story()
    weight = story.alive(10, "parameter", 0)
    story.now("used", weight)
    assert megabytes(story, FSDP) == 5 + 5 + 10 + 10
    assert story.moments[-1].gathered == 10 * MB
    story.now("backward")
    story.make(10, "gradient", 0)
    story.now("step")
    assert megabytes(story, FSDP) == 5 + 10 + 20  # its part, whole gradients, what is sent and received
    assert story.moments[-1].gathered == story.moments[-1].gradients == 0
    assert story.moments[-1].sent == 20 * MB


def test_whole_gradients_of_a_block_are_sent_in_a_copy() -> None:
    story = Story()
    story.alive(6, "parameter", 0)
    story.alive(4, "parameter", 0)
    story.make(6, "gradient", 0)
    story.make(4, "gradient", 0)
    story.now("step")
    assert megabytes(story, FSDP) == 5 + 10 + 20
    assert megabytes(story, ONE) == 20


def test_what_is_in_no_block_stays_whole() -> None:
    story = Story()
    story.alive(10, "parameter", -1)
    assert megabytes(story, FSDP) == 10


def test_activations_are_computed_again() -> None:
    story = Story()
    for call in range(3):
        story.make(10, "rows", call=call)
        out = story.make(2, "rows", call=call)
        story.returned[call] = [out]
        story.now("leave", call)
    story.now("backward")
    for number in (4, 2, 0):
        story.now("freed", number)
    assert megabytes(story, ONE) == 36
    assert megabytes(story, FSDP) == 18
    assert megabytes(story, MemoryLayout("fsdp", 2, checkpoints=True)) == (10 + 2 + 2 + 2) / 2


def test_copies_in_another_dtype_are_there_with_their_block() -> None:
    story = Story()
    first = story.alive(10, "parameter", 0)
    second = story.alive(10, "parameter", 1)
    third = story.alive(10, "parameter", 2)
    for group, number in enumerate((first, second, third)):
        story.now("used", number)
        story.make(5, "constant", group)
    for number in (3, 4, 5):
        story.now("freed", number)
    assert megabytes(story, DDP) == 45
    # Parts, a block and its cast, and the last block: what each device sends, what comes, and its copy.
    assert megabytes(story, FSDP) == 15 + (10 + 5) + (5 + 10 + 10)


def used(sizes: list[int], *blocks: int) -> Story:
    story = Story()
    numbers = [story.alive(size, "parameter", block) for block, size in enumerate(sizes)]
    for block in blocks:
        story.now("used", numbers[block])
    return story


def gathered(*story: list[int] | int) -> tuple[float, float]:
    sizes, *blocks = story
    last = used(sizes, *blocks).moments[-1]  # type: ignore[arg-type]
    return last.gathered / MB, last.received / MB


def test_no_more_is_whole_than_twice_the_largest() -> None:
    sizes = [10, 10, 10, 4]
    assert gathered(sizes, 0, 1) == (20, 0)
    assert gathered(sizes, 0, 1, 2) == (20, 0)  # without 0
    assert gathered(sizes, 0, 1, 2, 3) == (14, 0)  # without 1


def test_a_block_that_is_used_again_is_not_gathered_again() -> None:
    assert [moment.copied / MB for moment in used([10, 10], 0, 0).moments] == [0, 10, 0]
    assert gathered([10, 10], 0, 1, 0) == (20, 0)


def test_the_next_block_comes_while_one_is_used_but_not_before_a_step() -> None:
    story = used([10] * 4, 0, 1)
    story.now("used", 2)
    *_, second, third, _ = story.moments
    assert (second.gathered / MB, second.received / MB) == (20, 10)  # block 1, and what is received of block 2
    assert (third.gathered / MB, third.received / MB, third.copied / MB) == (20, 10, 10)
    story = used([10] * 4, 0, 1)
    story.now("step")
    story.now("used", 2)
    before = story.moments[-3]
    assert (before.gathered / MB, before.received) == (20, 0)  # blocks 0 and 1


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    story = Story()
    story.alive(1, "parameter", 0)
    story.returned[0] = [story.make(2, "rows", call=0)]
    story.now("leave", 0)
    record = story.record
    record.write(tmp_path)
    assert MemoryRecord.read(tmp_path) == record
