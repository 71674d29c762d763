from __future__ import annotations

import pytest
import torch

import duoka
from duoka.errors import VersionError
from duoka.private.lookup import parts_of


def test_what_is_missing_is_named_with_all_versions() -> None:
    versions = f"duoka {duoka.__version__} does not work with torch {torch.__version__}"
    with (
        pytest.raises(VersionError, match=versions.replace("+", r"\+")) as caught,
        parts_of("torch", torch.__version__),
    ):
        torch._C._not_there  # type: ignore[attr-defined]  # noqa: B018
    assert "has no attribute '_not_there'" in str(caught.value)
    assert "install a newer duoka, or a version of torch that it is tested with: 2.10 to 2.15" in str(caught.value)


def test_what_is_there_is_left_alone() -> None:
    with parts_of("torch", torch.__version__):
        assert torch._C is not None
