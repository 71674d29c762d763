from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from duoka.network.keys import Key
from duoka.network.signing import SIGNATURE, SignatureError, sign_object, verify_object

KEY = Key(b"a secret of the tests")


def test_what_a_rank_has_sealed_is_what_the_others_have() -> None:
    value = {"a": [1, 2.5, None], "b": {3}}
    assert verify_object(sign_object(value, KEY), KEY) == value
    assert verify_object(sign_object(value, Key()), Key()) == value  # a run without a key


@pytest.mark.parametrize("signature", ["", "0" * SIGNATURE, KEY.sign(b"object", b""), "\u00e9" * SIGNATURE])
def test_a_pickle_that_nobody_has_signed_runs_nothing(signature: str, tmp_path: Path) -> None:
    class Calls:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    with pytest.raises(SignatureError, match="were not unpickled"):
        verify_object(signature.encode() + pickle.dumps(Calls()), KEY)
    with pytest.raises(SignatureError):
        verify_object(sign_object(Calls(), Key(b"another secret")), KEY)
    assert not (tmp_path / "ran").exists()
