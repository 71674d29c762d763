from __future__ import annotations

import subprocess
import sys

import pytest

import duoka
from duoka import errors


def test_all_is_sorted_and_there() -> None:
    assert duoka.__all__ == sorted(duoka.__all__)
    assert set(duoka.__all__) <= set(dir(duoka))
    for name in duoka.__all__:
        assert getattr(duoka, name) is not None


def test_every_error_is_public() -> None:
    types = {name: one for name, one in vars(errors).items() if isinstance(one, type)}
    assert {name for name, one in types.items() if issubclass(one, errors.DuokaError)} <= set(duoka.__all__)


def test_what_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'duoka' has no attribute 'strat'"):
        duoka.strat  # noqa: B018


def test_importing_duoka_imports_nothing_else() -> None:
    source = "import sys; before = set(sys.modules); import duoka; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-I", "-c", source], capture_output=True, text=True, check=True)
    extra = [name for name in eval(done.stdout) if name.partition(".")[0] not in sys.stdlib_module_names]
    assert extra == ["duoka"]


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert duoka.__version__ == version("duoka")
