from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from duoka.keys import Key
from duoka.sealing import SIGNATURE, Forged, opened, sealed

KEY = Key(b"a secret of the tests")


def test_what_a_rank_has_sealed_is_what_the_others_have() -> None:
    value = {"a": [1, 2.5, None], "b": {3}}
    assert opened(sealed(value, KEY), KEY) == value
    assert opened(sealed(value, Key()), Key()) == value  # a run without a key


@pytest.mark.parametrize("signature", ["", "0" * SIGNATURE, KEY.sign(b"object", b""), "\u00e9" * SIGNATURE])
def test_a_pickle_that_nobody_has_signed_runs_nothing(signature: str, tmp_path: Path) -> None:
    class Calls:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    with pytest.raises(Forged, match="nothing of it has been read"):
        opened(signature.encode() + pickle.dumps(Calls()), KEY)
    with pytest.raises(Forged):
        opened(sealed(Calls(), Key(b"another secret")), KEY)
    assert not (tmp_path / "ran").exists()
