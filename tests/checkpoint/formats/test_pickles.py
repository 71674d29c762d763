from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from duoka.checkpoint.formats import Stored, pickles
from duoka.errors import UnsafePickle, WeightsError
from tests.checkpoint.nets import Net


def saved(tmp_path: Path, content: Any, **how: Any) -> Path:
    torch.save(content, tmp_path / "x.pth", **how)
    return tmp_path / "x.pth"


@pytest.mark.parametrize("zipped", [True, False])
def test_the_tree_is_what_was_saved(zipped: bool, tmp_path: Path) -> None:
    content = {"a": [torch.ones(2), {"b": 3, 4: "x"}], "c": (1.5, None), "d": {"e": torch.zeros(())}}
    tree = pickles.read(saved(tmp_path, content, _use_new_zipfile_serialization=zipped)).tree
    assert isinstance(tree["a"][0], Stored)
    assert tree["a"][1] == {"b": 3, 4: "x"}
    assert tree["c"] == [1.5, None]
    assert tree["d"]["e"].shape == ()


def test_every_flipped_byte_of_a_tensor_is_found(tmp_path: Path) -> None:
    numbers = torch.arange(1.0, 17)
    path = saved(tmp_path, {"w": numbers})
    data = path.read_bytes()
    start = data.index(numbers.numpy().tobytes())
    for number in range(start, start + 64):
        path.write_bytes(data[:number] + bytes([data[number] ^ 1]) + data[number + 1 :])
        contents = pickles.read(path)
        with pytest.raises(WeightsError, match=r"the checksum of .*data/0 in it is wrong"):
            contents.check()


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, {"w": torch.ones(16)})
    finally:
        torch.serialization.set_crc32_options(True)
    contents = pickles.read(path)
    contents.check()
    assert torch.equal(contents.tree["w"].read(), torch.ones(16))


def test_what_is_named_by_a_pickle_is_found_in_every_protocol() -> None:
    for protocol in range(6):
        stream = io.BytesIO(pickle.dumps([print, {"eval": eval}], protocol))
        assert pickles._names_in(stream)[0] >= {"builtins.print", "builtins.eval"}
    assert pickles._names_in(io.BytesIO(b"c__builtin__\neval\n."))[0] == {"builtins.eval"}
    assert pickles._names_in(io.BytesIO(b"(S'ls'\nios\nsystem\n."))[0] == {"os.system"}


def test_a_bare_pickle_is_no_file_of_torch(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"w": 1}, 2))
    with pytest.raises(WeightsError, match=r"x\.pkl"):
        pickles.read(tmp_path / "x.pkl")


def test_torchscript_is_told_from_weights(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/constants.pkl", b"")
        archive.writestr("x/data.pkl", b"")
    with pytest.raises(WeightsError, match="is a TorchScript program, not weights"):
        pickles.read(tmp_path / "x.pt")


def test_a_compressed_zip_is_not_unpacked(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(3)})
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "y.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in archive.namelist():
            bomb.writestr(name, archive.read(name))
    with pytest.raises(WeightsError, match="is compressed"):
        pickles.read(tmp_path / "y.pth")


def test_another_zip_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme", b"")
    with pytest.raises(WeightsError, match=r"not one of torch\.save's: it has no data\.pkl"):
        pickles.read(tmp_path / "x.zip")


@pytest.mark.parametrize("zipped", [True, False])
def test_what_goes_in_circles_is_refused(zipped: bool, tmp_path: Path) -> None:
    content: dict[str, Any] = {"w": torch.ones(2)}
    content["self"] = content
    with pytest.raises(WeightsError, match="form a cycle"):
        pickles.read(saved(tmp_path, content, _use_new_zipfile_serialization=zipped))


@pytest.mark.parametrize(
    ("sizes", "strides", "offset", "numbers"),
    [
        ((1 << 40,), (0,), 0, 4),
        ((1 << 62, 4), (0, 1), 0, 4),
        ((1 << 30,), (1,), 0, 1 << 30),
        ((4,), (1,), 1 << 40, 4),
    ],
    ids=["one number expanded", "more than there can be", "a forged length", "an offset beyond the end"],
)
def test_a_forged_tensor(
    sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, numbers: int, tmp_path: Path
) -> None:
    class Forged:
        def __reduce__(self) -> tuple[Any, ...]:
            args = (("storage", numbers), offset, sizes, strides, False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, args

    class Pickler(pickle.Pickler):
        def persistent_id(self, found: Any) -> Any:
            is_storage = isinstance(found, tuple) and found[:1] == ("storage",)
            return ("storage", torch.FloatStorage, "0", "cpu", found[1]) if is_storage else None

    path, data = saved(tmp_path, {"w": torch.ones(4)}), io.BytesIO()
    Pickler(data, protocol=2).dump({"w": Forged()})
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, data.getvalue() if name.endswith("data.pkl") else content)
    with pytest.raises(WeightsError, match="cannot be read"):
        pickles.read(path)


def test_a_module_within_itself_is_refused(tmp_path: Path) -> None:
    net = Net()
    net.features.add_module("again", net.features)
    with pytest.raises(WeightsError, match="form a cycle"):
        pickles.read(saved(tmp_path, net), "inert")


def test_a_class_cannot_be_smuggled_in_as_inert(tmp_path: Path) -> None:
    class Namespace:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, ("raise SystemExit",)

    path = saved(tmp_path, {"w": torch.ones(2), "args": Namespace()})
    with pytest.raises(UnsafePickle, match=r"`builtins\.exec`"):
        pickles.read(path)
    assert pickles.read(path, "inert").tree["args"] == {}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_small_file_that_would_be_a_tree_without_end_is_refused(zipped: bool, tmp_path: Path) -> None:
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(WeightsError, match="too many"):
        pickles.read(saved(tmp_path, {"w": bomb}, _use_new_zipfile_serialization=zipped))


def test_a_record_whose_name_is_damaged(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(3)})
    data = path.read_bytes()
    place = data.index(b"x/data/0")
    path.write_bytes(data[:place] + b"\x80" + data[place + 1 :])
    with pytest.raises(WeightsError, match="is damaged"):
        pickles.read(path).check()
