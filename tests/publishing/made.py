"""A publisher of this process."""

from __future__ import annotations

from duoka.publishing import Publisher
from duoka.supervision.status_board import StatusBoard


def publisher() -> Publisher:
    return Publisher(StatusBoard.create(1), 0)
