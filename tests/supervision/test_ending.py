from __future__ import annotations

import json

import pytest

from duoka.errors import OptionError, PeerLost, ScriptError, TimedOut
from duoka.supervision import ending
from duoka.supervision.ending import Ending, is_consequence


def caught(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The error as it is after it was raised, from its cause if there is one."""
    try:
        raise error from cause
    except BaseException as raised:
        return raised


def test_an_ending_is_one_line_and_comes_back_the_same() -> None:
    one = ending.raised(caught(ValueError("two\nlines, é and \udc80")))
    line = one.line()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert Ending.from_line(line) == one
    json.loads(line)


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (3, 3, ""),
        (-1, 255, ""),
        (256, 0, ""),
        (True, 1, ""),
        ("sorry", 1, "sorry"),
        (2.5, 1, "2.5"),
        (("a", 1), 1, "('a', 1)"),
    ],
)
def test_sys_exit(value: object, code: int, said: str) -> None:
    end = ending.exited(SystemExit(value))
    assert (end.how, end.code, end.said) == ("exited", code, said)


def test_an_exception() -> None:
    end = ending.raised(caught(ValueError("boom")))
    assert (end.how, end.code, end.kind, end.error) == (
        "raised",
        1,
        "ValueError",
        "ValueError: boom",
    )
    assert end.trace.startswith("Traceback (most recent call last):\n")
    assert end.trace.endswith("ValueError: boom\n")


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (OptionError("--x", 1, "2"), 2), (PeerLost("no"), 1)]
)
def test_exit_codes_of_exceptions(error: BaseException, code: int) -> None:
    assert ending.raised(caught(error)).code == code


def test_a_script_that_cannot_be_read_is_told_and_not_traced() -> None:
    end = ending.raised(caught(ScriptError("there is no script")))
    assert (end.how, end.code, end.said, end.trace) == ("exited", 2, "duoka: error: there is no script", "")


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40000"


class DistBackendError(RuntimeError):
    """As torch.distributed's, which is raised by NCCL alone."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("[...] Read error [127.0.0.1]:3: Connection reset by peer"),
        RuntimeError("[...] Timed out waiting 3000ms for recv operation to complete"),
        DistBackendError("NCCL error: remote process exited or there was a network error"),
        PeerLost("rank 1 went away"),
        TimedOut("rank 1 did not come"),
        caught(ValueError("could not train"), RuntimeError(GLOO)),
        caught(ValueError("a"), caught(KeyError("b"), PeerLost("c"))),
    ],
)
def test_what_only_says_that_another_rank_went_away(error: BaseException) -> None:
    assert is_consequence(error)
    assert ending.raised(error).consequence


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Connection closed by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 16 vs 4"),
        ConnectionResetError("the data server"),
        caught(ValueError("a"), KeyError("b")),
    ],
)
def test_what_is_a_rank_s_own_fault(error: BaseException) -> None:
    assert not is_consequence(error)


def while_handling(network_error: BaseException, error: BaseException) -> BaseException:
    """The error as it is when it is raised in an except clause."""
    try:
        try:
            raise network_error
        except BaseException:
            raise error  # noqa: B904
    except BaseException as raised:
        return raised


def test_an_error_while_a_lost_connection_was_handled_is_its_consequence() -> None:
    assert is_consequence(while_handling(RuntimeError(GLOO), ValueError("on the way")))


def test_an_error_that_denies_to_come_from_another_is_not_its_consequence() -> None:
    denying = ValueError("on the way")
    denying.__suppress_context__ = True
    while_handling(RuntimeError(GLOO), denying)
    denying.__suppress_context__ = True
    assert not is_consequence(denying)


@pytest.mark.parametrize(("code", "consequence"), [(3, True), ("giving up", True), (0, False)])
def test_giving_up_after_a_lost_connection_is_a_consequence(code: object, consequence: bool) -> None:
    error = while_handling(RuntimeError(GLOO), SystemExit(code))
    assert isinstance(error, SystemExit)
    assert ending.exited(error).consequence == consequence
