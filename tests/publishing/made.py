"""A publisher of this process."""

from __future__ import annotations

from duoka.publishing.publisher import Publisher
from duoka.supervision.status_board import StatusBoard


def publisher() -> Publisher:
    board = StatusBoard.create(1)
    return Publisher(board, board.slot(0))
