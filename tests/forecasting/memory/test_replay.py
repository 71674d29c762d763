from __future__ import annotations

import pytest

from duoka.forecasting.memory.replay import MemoryLayout, peak
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


def test_a_parameter_by_itself_is_received_and_sent_without_a_copy() -> None:
    story = Story()
    weight = story.alive(10, "parameter", 0)
    story.now("used", weight)
    assert megabytes(story, FSDP) == 5 + 5 + 10
    story.now("backward")
    story.make(10, "gradient", 0)
    story.now("step")
    assert megabytes(story, FSDP) == 5 + 10 + 10 + 5  # it is released; what is sent and received, and its part


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
        story.now("enter", call)
        story.make(10, "rows", call=call)
        out = story.make(2, "rows", call=call)
        story.record.returned[call] = [out]
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
    assert megabytes(story, FSDP) == 15 + 10 + 5 + (5 + 10)  # parts, a block and its copy; the next one comes
