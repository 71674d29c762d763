"""Python objects sent between ranks: pickled, and signed with the run's key.

Unpickling can execute code, and connections of torch's collectives do not authenticate their ends.
"""

from __future__ import annotations

import pickle
from typing import Any

from duoka.errors import RunError
from duoka.network.keys import Key

SIGNATURE = 64  # bytes


class SignatureError(RunError):
    """Data from another rank without the signature of the run's key. It was not unpickled."""


def sign_object(value: Any, key: Key) -> bytes:
    """Pickle a value, with its signature in front."""
    data = pickle.dumps(value)
    return key.sign(b"object", data).encode() + data


def verify_object(data: bytes, key: Key) -> Any:
    """Unpickle a value that `sign_object` has pickled.

    Raises:
        SignatureError: the signature is not the run's.
    """
    signature, data = data[:SIGNATURE].decode("ascii", "replace"), data[SIGNATURE:]
    if not key.signed(signature, b"object", data):
        raise SignatureError("data from another rank are not signed with the run's key, and were not unpickled")
    return pickle.loads(data)
