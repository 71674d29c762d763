from __future__ import annotations

import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import image_files
from examples.image_files import BadFile
from tests.flows.flow import ROOT, Flow


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_idx(folder: Path, ending: str = "") -> np.ndarray:
    """The four files, 8 images and labels in each; returns the training images."""
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (8, 28, 28), np.uint8)
    for name in image_files.FASHION_MNIST:
        data = idx(images if "images" in name else np.arange(8, dtype=np.uint8))
        (folder / (name + ending)).write_bytes(gzip.compress(data, mtime=0) if ending else data)
    return images


def test_idx_files_are_read_where_torchvision_puts_them(tmp_path: Path) -> None:
    written = write_idx(tmp_path / "FashionMNIST/raw")
    train, test = image_files.fashion_mnist(str(tmp_path), limit=5)
    images, labels = train.tensors
    torch.testing.assert_close((images + 1) * 127.5, torch.tensor(written[:5, None], dtype=torch.float32))
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert len(test) == 5


def test_packed_files_must_be_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path, ".gz")
    with pytest.raises(BadFile, match=r"is not the published file: its MD5 is"):
        image_files.fashion_mnist(str(tmp_path))
    for name in image_files.FASHION_MNIST:
        digest = hashlib.md5((tmp_path / f"{name}.gz").read_bytes()).hexdigest()
        monkeypatch.setitem(image_files.FASHION_MNIST, name, digest)
    assert len(image_files.fashion_mnist(str(tmp_path))[0]) == 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: b"\x1f\x8b" + data[2:], "it begins 1f8b0803, not 00000803"),
        (lambda data: data[:-1], "should hold 6272 bytes for .*, and has 6271"),
        (lambda data: data + b"x", "and has 6273"),
        (lambda data: data[:9], "download it again"),
        (lambda data: b"", "download it again"),
        (lambda data: idx(np.zeros((7, 28, 28), np.uint8)), "7 images and 8 labels"),
    ],
)
def test_a_wrong_idx_file_is_refused(tmp_path: Path, change: object, says: str) -> None:
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(BadFile, match=says):
        image_files.fashion_mnist(str(tmp_path))


def test_a_missing_file_among_others_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(BadFile, match="but no t10k-labels-idx1-ubyte or"):
        image_files.fashion_mnist(str(tmp_path))


def test_cifar10_python_version_is_unpickled_only_if_it_is_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
    for name in image_files.CIFAR10:
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [9, 0, 3, 1]}, protocol=2))
    with pytest.raises(BadFile, match="is not the published file"):
        image_files.cifar10(str(tmp_path))
    for name in image_files.CIFAR10:
        monkeypatch.setitem(image_files.CIFAR10, name, hashlib.md5((folder / name).read_bytes()).hexdigest())
    train, test, classes = image_files.cifar10(str(tmp_path))
    assert (len(train), len(test), classes[9]) == (20, 4, "truck")
    torch.testing.assert_close(
        (test.tensors[0] + 1) * 127.5, torch.tensor(rows.reshape(4, 3, 32, 32), dtype=torch.float32)
    )


def test_cifar10_binary_version(tmp_path: Path) -> None:
    rows = np.zeros((10_000, 3073), np.uint8)
    rows[:, 0] = np.arange(10_000) % 10
    rows[1, 1] = 255  # the first pixel, red
    for name in image_files.CIFAR10:
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    train, _, _ = image_files.cifar10(str(tmp_path), limit=3)
    images, labels = train.tensors
    assert labels.tolist() == [0, 1, 2]
    assert images[1, 0, 0, 0] == 1
    assert images.sum() == 2 - images.numel()
    (tmp_path / "test_batch.bin").write_bytes(rows[:-1].tobytes())
    with pytest.raises(BadFile, match="should have 30730000 bytes, and has 30726927"):
        image_files.cifar10(str(tmp_path))


def test_digits_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, test = image_files.fashion_mnist(str(tmp_path))
    assert f"no FashionMNIST in {tmp_path}" in capsys.readouterr().out
    assert (len(train), len(test), tuple(train[0][0].shape)) == (1437, 360, (1, 28, 28))
    train, test, classes = image_files.cifar10(str(tmp_path), limit=7)
    assert f"no CIFAR-10 in {tmp_path}" in capsys.readouterr().out
    assert (len(train), len(test), tuple(train[0][0].shape), len(classes)) == (7, 7, (3, 32, 32), 10)


def test_a_wrong_file_ends_the_script_with_one_line(flow: Flow) -> None:
    (flow.folder / "data").mkdir()
    (flow.folder / "data/train-images-idx3-ubyte").write_bytes(b"junk")
    script = ROOT / "examples/fashion_mnist.py"
    for result in (flow.python([script]), flow.run(["run", "--quiet", "--devices", "cpu:2", script])):
        assert result.returncode == 1
        assert result.stdout == ""
        assert result.stderr.count("it begins 6a756e6b, not 00000803; download it again") == 1
        assert "Traceback" not in result.stderr
