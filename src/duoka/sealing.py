"""Python objects on their way from rank to rank: signed with the run's key, and looked at before they are unpickled.

A pickle runs what it names, and the connections of gloo and NCCL ask nobody who they are.
"""

from __future__ import annotations

import pickle
from typing import Any

from duoka.errors import RunError
from duoka.keys import Key

SIGNATURE = 64  # bytes


class Forged(RunError):
    """What came from another rank was not signed with the run's key. Nothing of it has been read."""


def sealed(value: Any, key: Key) -> bytes:
    """A value, which pickle must know, and its signature in front."""
    data = pickle.dumps(value)
    return key.sign(b"object", data).encode() + data


def opened(data: bytes, key: Key) -> Any:
    """The value that a rank of the run has sealed.

    Raises:
        Forged: no rank of the run has.
    """
    signature, data = data[:SIGNATURE].decode("ascii", "replace"), data[SIGNATURE:]
    if not key.signed(signature, b"object", data):
        raise Forged("what came from another rank is not signed with the run's key; nothing of it has been read")
    return pickle.loads(data)
