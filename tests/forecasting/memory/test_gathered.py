from __future__ import annotations

from duoka.forecasting.memory.gathered import Gathered


def test_no_more_is_whole_than_twice_the_largest() -> None:
    blocks = Gathered({0: 10, 1: 10, 2: 10, 3: 4}, 2)
    blocks.use(0)
    blocks.use(1)
    assert blocks.size == 20
    blocks.use(2)
    assert blocks.size == 20  # without 0
    blocks.use(3)
    assert blocks.size == 14  # without 1


def test_a_block_that_is_here_is_not_gathered_again() -> None:
    blocks = Gathered({0: 10, 1: 10}, 2)
    assert blocks.use(0) == 25  # what is sent and received, and the block
    assert blocks.use(0) == 10
    blocks.use(1)
    assert blocks.use(0) == 20


def test_the_follower_of_the_last_pass_is_gathered_ahead() -> None:
    blocks = Gathered(dict.fromkeys(range(4), 10), 2)
    for block in (0, 1, 2, 3):
        blocks.use(block)
    blocks.step()
    for block in (0, 1):
        blocks.use(block)
    assert blocks.size == 10 + 15  # block 1, and what is sent and received for block 2
    assert blocks.use(2) == 10 + 15 + 10


def test_a_step_makes_blocks_stale() -> None:
    blocks = Gathered({0: 10}, 2)
    blocks.use(0)
    blocks.step()
    assert blocks.size == 10
    assert blocks.use(0) == 25
