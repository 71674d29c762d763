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
    story.timeline.free(rows)
    assert megabytes(story, ONE) == 42
    assert megabytes(story, DDP) == 38
    whole = 10 + 5  # the block, and the part of a coming one
    assert megabytes(story, FSDP) == 5 + 10 + 3 + 4 + 1 + whole
    offloaded = replace(FSDP, offloads=True)
    assert megabytes(story, offloaded) == 3 + 4 + 1 + whole
    assert on_host(story.record, offloaded) == 30 * MB
    assert on_host(story.record, replace(offloaded, devices=4, machines=2)) == 15 * MB
    assert on_host(story.record, FSDP) == 0


def test_hsdp_divides_the_model_by_the_devices_of_a_machine() -> None:
    story = Story(8)
    story.alive(8, "parameter", 0)
    story.alive(16, "state", 0)
    story.make(8, "rows")
    assert megabytes(story, MemoryLayout("hsdp", 4, machines=2)) == 4 + 8 + 2 + (8 + 4)
    assert megabytes(story, MemoryLayout("fsdp", 4, machines=2)) == 2 + 4 + 2 + (8 + 2)


@pytest.mark.parametrize(("batch", "devices", "share"), [(8, 4, 2 / 8), (7, 2, 4 / 7), (3, 4, 1.0), (None, 2, 1.0)])
def test_the_largest_share_counts(batch: int | None, devices: int, share: float) -> None:
    story = Story(batch)
    story.make(56, "rows")
    assert megabytes(story, MemoryLayout("ddp", devices)) == pytest.approx(56 * share)


def test_the_peak_is_that_of_a_moment() -> None:
    story = Story()
    first = story.make(8, "rows")
    story.timeline.free(first)
    story.make(6, "constant")
    assert megabytes(story, ONE) == 8
    assert megabytes(story, DDP) == 6


def test_gradients_are_copied_to_buckets_until_the_backward_pass_ends() -> None:
    story = Story()
    story.alive(40, "parameter", 0)
    story.begin("backward")
    story.make(20, "gradient", 0)
    story.make(20, "gradient", 0)
    story.begin("step")
    story.make(5, "optimizer")
    assert megabytes(story, ONE) == 85
    assert megabytes(story, DDP) == 120  # both gradients in buckets


def test_buckets_hold_what_accumulates() -> None:
    story = Story()
    story.alive(40, "parameter", 0)
    story.begin("backward")
    story.make(40, "gradient", 0)
    story.begin("forward")
    story.begin("backward")  # adds to the gradients that are there
    story.make(5, "rows")
    story.begin("step")
    assert megabytes(story, DDP) == 40 + 40 + 2.5 + 40


def test_a_block_is_released_when_its_gradients_are_sent() -> None:
    story = Story()
    story.alive(10, "parameter", 0)
    assert megabytes(story, FSDP) == 5 + 10 + 5  # its part, the whole block, the part of a coming one
    story.begin("backward")
    story.make(10, "gradient", 0)
    story.begin("step")
    assert megabytes(story, FSDP) == 5 + 10 + 20 + 5  # its part, whole gradients, what is sent and received
    assert story.moments[-1].gathered == 0
    assert story.moments[-1].sent == 20 * MB
    story.make(1, "optimizer")
    last = story.moments[-1]
    assert last.gathered == last.coming == last.gradients == last.sent == 0


def test_whole_gradients_of_a_block_are_sent_in_a_copy() -> None:
    story = Story()
    story.alive(6, "parameter", 0)
    story.alive(4, "parameter", 0)
    story.make(6, "gradient", 0)
    story.make(4, "gradient", 0)
    story.begin("step")
    assert megabytes(story, FSDP) == 5 + 10 + 20 + 5
    assert megabytes(story, ONE) == 20


def test_gradients_of_one_block_are_sent_at_a_time() -> None:
    story = Story()
    story.alive(6, "parameter", 0)
    story.alive(4, "parameter", 1)
    story.begin("backward")
    story.make(4, "gradient", 1)
    story.make(6, "gradient", 0)
    *_, sent, last = story.moments
    assert (sent.gradients / MB, sent.sent / MB, sent.gathered / MB) == (4, 8, 6)
    assert (last.gradients / MB, last.sent / MB, last.gathered / MB) == (6, 8, 6)


def test_what_is_in_no_block_stays_whole() -> None:
    story = Story()
    story.alive(10, "parameter", -1)
    assert megabytes(story, FSDP) == 10


def test_activations_are_computed_again() -> None:
    story = Story()
    for call in range(3):
        story.make(10, "rows", call=call)
        out = story.make(2, "rows", call=call)
        story.timeline.leave(call, [out])
    story.begin("backward")
    for number in (4, 2, 0):
        story.timeline.free(number)
    assert megabytes(story, ONE) == 36
    assert megabytes(story, FSDP) == 18
    assert megabytes(story, MemoryLayout("fsdp", 2, checkpoints=True)) == (10 + 2 + 2 + 2) / 2


def test_copies_in_another_dtype_are_there_with_their_block() -> None:
    story = Story()
    for block in range(3):
        story.alive(10, "parameter", block)
    for block in range(3):
        story.make(5, "constant", block)
    for number in (3, 4, 5):
        story.timeline.free(number)
    assert megabytes(story, DDP) == 45
    assert megabytes(story, FSDP) == 15 + 2 * (10 + 5) + (10 + 5) / 2  # parts, two blocks, the part of a third


@pytest.mark.parametrize(("sizes", "gathered"), [([10, 10, 10, 4], 20), ([10, 4], 14), ([4, 10, 4], 18), ([], 0)])
def test_no_more_is_whole_than_twice_the_largest(sizes: list[int], gathered: int) -> None:
    story = Story()
    for block, size in enumerate(sizes):
        story.alive(size, "parameter", block)
    (moment,) = story.moments
    assert (moment.gathered / MB, moment.coming / MB) == (gathered, max(sizes, default=0))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    story = Story()
    story.alive(1, "parameter", 0)
    story.timeline.leave(0, [story.make(2, "rows", call=0)])
    record = story.record
    record.write(tmp_path)
    assert MemoryRecord.read(tmp_path) == record
