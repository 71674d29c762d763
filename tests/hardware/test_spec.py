from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duoka.errors import OptionError
from duoka.hardware.spec import MOST_WORKERS, Request, parse


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("auto", Request("auto")),
        ("AUTO ", Request("auto")),
        ("cpu", Request("cpu", count=1)),
        ("cpu:4", Request("cpu", count=4)),
        ("2", Request("auto", count=2)),
        ("02", Request("auto", count=2)),
        ("1,", Request("gpu", indices=(1,))),
        ("0,3", Request("gpu", indices=(0, 3))),
        ("3, 0", Request("gpu", indices=(3, 0))),
        ("0-3", Request("gpu", indices=(0, 1, 2, 3))),
        ("2-2", Request("gpu", indices=(2,))),
        ("0-1,4", Request("gpu", indices=(0, 1, 4))),
        ("gpu", Request("gpu")),
        ("gpu:1", Request("gpu", indices=(1,))),
        ("cuda", Request("cuda")),
        ("cuda:1", Request("cuda", indices=(1,))),
        ("cuda:0,2", Request("cuda", indices=(0, 2))),
        ("cuda:0-2", Request("cuda", indices=(0, 1, 2))),
        ("free:2", Request("gpu", count=2, pick="free")),
        ("best:1", Request("gpu", count=1, pick="best")),
        ("free:2,mem>=10G", Request("gpu", count=2, pick="free", memory=10 << 30)),
        ("FREE:2, mem >= 10 GiB", Request("gpu", count=2, pick="free", memory=10 << 30)),
        ("best:1,mem>=1.5g", Request("gpu", count=1, pick="best", memory=3 << 29)),
        ("free:1,mem>=500MB", Request("gpu", count=1, pick="free", memory=500 << 20)),
        ("GPU-3c1a6d0e", Request("gpu", uuids=("GPU-3c1a6d0e",))),
        ("gpu-3C1A6D0E-7f2b,GPU-8", Request("gpu", uuids=("GPU-3c1a6d0e-7f2b", "GPU-8"))),
        ("MIG-5A2F", Request("gpu", uuids=("MIG-5a2f",))),
        ("mig-gpu-3c1a/1/0", Request("gpu", uuids=("MIG-GPU-3c1a/1/0",))),
        ("mps", Request("mps")),
        ("xpu", Request("xpu")),
        ("xpu:1", Request("xpu", indices=(1,))),
        ("npu:0,1", Request("npu", indices=(0, 1))),
    ],
)
def test_grammar(text: str, request_: Request) -> None:
    assert parse(text) == request_


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", ""),
        ("free", "write how many, for example free:1"),
        ("free:", "write how many"),
        ("best:x", "write how many, for example best:1"),
        ("free:0", "no worker"),
        ("free:2,mem", "'free:2,mem>=10G'; a shell takes `>` for itself: quote it"),
        ("free:2,mem>10G", "the one condition is free memory"),
        ("free:2,mem>=10X", "the one condition is free memory"),
        ("GPU-xyz", "'gpu-xyz' is not the beginning of a UUID"),
        ("GPU-3c,1", "numbers and UUIDs do not mix"),
        ("GPU-3c,GPU-3c", "given twice"),
        ("MIG-3c,MIG-4d", "a part of a GPU (MIG) works alone"),
        ("GPU-3c,MIG-4d", "a part of a GPU (MIG) works alone"),
        ("MIG-", "'mig-' is not the beginning of a UUID"),
        ("MIG-xyz", "'mig-xyz' is not the beginning of a UUID"),
        ("0:2", "name a part of a GPU (MIG) by its UUID, which `duoka gpus` shows"),
        ("cuda:0:2", "name a part of a GPU (MIG) by its UUID"),
        ("gpus:0,1", "write gpu:0,1"),
        ("tpu", ""),
        ("cuda0", ""),
        ("1.5", ""),
        ("²", ""),
        ("0x1", ""),
        ("0", "no worker; for GPU 0 alone write `0,` or `gpu:0`"),
        ("000", "no worker"),
        ("cpu:0", "no worker"),
        ("cpu:", "a number of workers is expected"),
        ("cpu:0,1", "a number of workers is expected"),
        ("cpu:-1", "a number of workers is expected"),
        ("cpu:1000000", "more than 1024 workers"),
        ("9" * 5000, "more than 1024 workers"),
        ("-1", "not negative; for all GPUs write `gpu`"),
        ("0,-1", "not negative"),
        ("0,0", "0 is given twice"),
        ("0-2,1", "1 is given twice"),
        ("3-1", "runs backwards; write 1-3"),
        ("0-99999999999999", "not a number or a range"),
        ("0-999999999", "device numbers end at 1023"),
        (",", "a number is missing"),
        ("0,,1", "a number is missing"),
        ("1,,", "a number is missing"),
        ("0-", "'0-' is not a number or a range"),
        ("0-1-2", "'0-1-2' is not a number or a range"),
        ("cuda:", "a number is missing"),
        ("cuda:x", "'x' is not a number"),
        ("cuda:0,cuda:1", "write cuda:0,1"),
        ("auto:2", ""),
    ],
)
def test_what_is_wrong_is_said(text: str, hint: str) -> None:
    with pytest.raises(OptionError) as error:
        parse(text)
    assert (error.value.option, error.value.value) == ("--devices", text)
    assert hint in error.value.hint
    assert bool(hint) == bool(error.value.hint)
    assert str(error.value).startswith("--devices must be auto, cpu, ")


numbers = st.lists(st.integers(0, MOST_WORKERS - 1), min_size=1, max_size=20, unique=True).map(tuple)
requests = st.one_of(
    st.sampled_from([Request("auto"), Request("gpu"), Request("cuda"), Request("mps"), Request("xpu")]),
    st.builds(Request, st.sampled_from(["auto", "cpu"]), count=st.integers(1, MOST_WORKERS)),
    st.builds(Request, st.just("gpu"), indices=numbers),
    st.builds(
        Request,
        st.just("gpu"),
        count=st.integers(1, MOST_WORKERS),
        pick=st.sampled_from(["free", "best"]),
        memory=st.integers(0, 1 << 45),
    ),
    st.builds(Request, st.just("gpu"), uuids=st.sampled_from([("GPU-1", "GPU-2c"), ("MIG-5a2f",)])),
    st.builds(Request, st.sampled_from(["cuda", "npu", "mps", "xpu"]), indices=numbers),
)


def written(request: Request) -> str:
    """Write a request in the grammar."""
    if request.pick:
        return f"{request.pick}:{request.count}" + f",mem>={request.memory}" * bool(request.memory)
    if request.uuids:
        return ",".join(request.uuids)
    if request.indices:
        return f"{request.type}:{','.join(map(str, request.indices))}"
    if request.count is None:
        return request.type
    return str(request.count) if request.type == "auto" else f"{request.type}:{request.count}"


@given(requests)
def test_what_is_written_reads_the_same(request_: Request) -> None:
    assert parse(written(request_)) == request_


@given(st.integers(0, MOST_WORKERS - 1), st.integers(0, 30))
def test_a_range_is_its_list(first: int, length: int) -> None:
    last = min(first + length, MOST_WORKERS - 1)
    listed = ",".join(map(str, range(first, last + 1))) + ","
    assert parse(f"{first}-{last}") == parse(listed)


@given(st.text("0123456789,-: cpudamfre>=G", max_size=12) | st.text(max_size=8))
def test_anything_is_a_request_or_an_option_error(text: str) -> None:
    with contextlib.suppress(OptionError):
        assert parse(str(parse(text))) == parse(text)


WORDS = ["auto", "cpu", "cuda", "gpu", "free", "best", "mps", "xpu", "GPU-", "MIG-", "mem", ">=", "10G", "1.5", "TB"]
PIECES = [*WORDS, *"0123456789", *":,-./ ", "٣", "1e9", "nan", "inf", "\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=9))
@settings(max_examples=200)
def test_pieces_of_the_grammar_in_any_order_are_a_request_or_an_option_error(pieces: list[str]) -> None:
    text = "".join(pieces)
    with contextlib.suppress(OptionError):
        request = parse(text)
        assert parse(str(request)) == request
        assert request.count is None or 1 <= request.count <= MOST_WORKERS
