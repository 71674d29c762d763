from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from duoka.errors import OptionError
from duoka.network.keys import SIGNATURE, Key, SignatureError, key_of, sign_object, verify_object
from duoka.planning.options import Machines

TYPED, AT_HOME = Machines(2, 0, "a", 1), Machines(2, 0, "a", 1, engine="Slurm", home=True, job="7.0")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DUOKA_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_what_has_been_signed() -> None:
    key = Key(b"secret")
    signature = key.sign(b"ab", b"c")
    assert key.signed(signature, b"ab", b"c")
    assert not key.signed(signature, b"a", b"bc")
    assert not key.signed(None, b"ab", b"c")
    assert not Key(b"other").signed(signature, b"ab", b"c")
    assert key.derived("a") != key.derived("b") != key
    assert Key().derived("a") == Key()


def test_where_a_key_comes_from(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_of(TYPED, None) == Key()
    monkeypatch.setenv("DUOKA_KEY", "a secret of the tests")
    given = key_of(TYPED, None)
    assert given.is_given
    assert key_of(AT_HOME, None) != given  # another job
    (home / "file").write_text("a secret of the tests\n")
    (home / "file").chmod(0o600)
    monkeypatch.setenv("DUOKA_KEY", "what is not asked for")
    assert key_of(TYPED, home / "file") == given


def test_the_key_at_home_is_made_once_by_whoever_comes_first(home: Path) -> None:
    found = list[Key]()
    threads = [threading.Thread(target=lambda: found.append(key_of(AT_HOME, None))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(home / "duoka") == ["key"]


@pytest.mark.parametrize(("mode", "content"), [(0o640, "a secret of the tests"), (0o600, "short"), (0o604, "x" * 32)])
def test_a_key_that_cannot_be_used(mode: int, content: str, home: Path) -> None:
    (home / "file").write_text(content)
    (home / "file").chmod(mode)
    with pytest.raises(OptionError, match=r"chmod 600|openssl rand"):
        key_of(TYPED, home / "file")
    with pytest.raises(OptionError, match="a file that can be read"):
        key_of(TYPED, home / "none")


def test_no_home_to_write_into(home: Path) -> None:
    (home / "duoka").write_text("in the way")
    with pytest.raises(OptionError, match="or set DUOKA_KEY"):
        key_of(AT_HOME, None)


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
