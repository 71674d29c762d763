"""FashionMNIST and CIFAR-10 from the files that their authors publish; scikit-learn's digits where there are none.

Every file is checked: digests of what is published, magic numbers, sizes. A file that is there and is wrong is an
error, never replaced. Images are float32 in [n, channels, height, width] from -1 to 1, labels int64 in [n].
"""

import gzip
import hashlib
import math
import pickle
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

FASHION_MNIST = {  # MD5 of the packed files
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
CIFAR10 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class BadFile(SystemExit):
    """A file is there, but is not what it should be: the script ends with what was found, and what to do."""


def fashion_mnist(folder: str, limit: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set, 1x28x28, from the four IDX files, packed or not, in `folder` or where torchvision
    puts them under it. limit: only the first so many of each; 0 for all."""
    place = _find(folder, ("", "FashionMNIST/raw"), "train-images-idx3-ubyte", "train-images-idx3-ubyte.gz")
    if place is None:
        print(
            f"no FashionMNIST in {folder}: scikit-learn's digits instead. To have it, put\n"
            "there the four .gz files of https://github.com/zalandoresearch/fashion-mnist (data/fashion)"
        )
        return _digits(28, channels=1, limit=limit)
    arrays = {name: _read_idx(_existing(place, name, f"{name}.gz"), digest) for name, digest in FASHION_MNIST.items()}
    return tuple(_dataset(arrays[f"{part}-images-idx3-ubyte"][:, None], arrays[f"{part}-labels-idx1-ubyte"], limit)
                 for part in ("train", "t10k"))  # fmt: skip


def cifar10(folder: str, limit: int = 0) -> tuple[TensorDataset, TensorDataset, list[str]]:
    """Training and test set, 3x32x32, and the names of the classes, from the "python version" or the "binary
    version", unpacked, in `folder` or in the folder of the archive under it. limit: as above."""
    python = _find(folder, ("", "cifar-10-batches-py"), "data_batch_1")
    binary = _find(folder, ("", "cifar-10-batches-bin"), "data_batch_1.bin")
    if python is None and binary is None:
        print(
            f"no CIFAR-10 in {folder}: scikit-learn's digits instead. To have it, unpack\n"
            "there the python or the binary version of https://www.cs.toronto.edu/~kriz/cifar.html"
        )
        return *_digits(32, channels=3, limit=limit), [str(digit) for digit in range(10)]
    parts = {}
    for name, digest in CIFAR10.items():
        if python is not None:
            parts[name] = _read_cifar_pickle(_existing(python, name), digest)
        else:
            parts[name] = _read_cifar_binary(_existing(binary, f"{name}.bin"))
    test_images, test_labels = parts.pop("test_batch")
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts.values(), strict=True))
    return _dataset(images, labels, limit), _dataset(test_images, test_labels, limit), CIFAR10_CLASSES


def _find(folder: str, places: tuple[str, ...], *names: str) -> Path | None:
    return next((Path(folder, p) for p in places if any(Path(folder, p, name).exists() for name in names)), None)


def _existing(place: Path, *names: str) -> Path:
    for name in names:
        if (place / name).exists():
            return place / name
    raise BadFile(f"{place} has other files of the data set, but no {' or '.join(names)}: put it there")


def _check_digest(path: Path, data: bytes, expected: str) -> None:
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != expected:
        raise BadFile(f"{path} is not the published file: its MD5 is {found}, not {expected}; download it again")


def _read_idx(path: Path, digest: str) -> np.ndarray:
    """IDX: two zero bytes, the type (8: bytes), the number of dimensions, the sizes (big-endian), the data."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        _check_digest(path, data, digest)
        data = gzip.decompress(data)
    dimensions = 3 if "images" in path.name else 1
    magic = bytes([0, 0, 8, dimensions])
    if data[:4] != magic:
        raise BadFile(f"{path} is no IDX file of {dimensions}-dimensional bytes: it begins {data[:4].hex()}, "
                      f"not {magic.hex()}; download it again")  # fmt: skip
    begin = 4 + 4 * dimensions
    shape = np.frombuffer(data[4:begin].ljust(4 * dimensions, b"\0"), ">u4").tolist()
    if len(data) - begin != math.prod(shape):
        raise BadFile(f"{path} should hold {math.prod(shape)} bytes for {shape}, and has {len(data) - begin}; "
                      "download it again")  # fmt: skip
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)


def _read_cifar_pickle(path: Path, digest: str) -> tuple[np.ndarray, np.ndarray]:
    data = path.read_bytes()
    _check_digest(path, data, digest)  # so nothing but the published pickle is ever loaded
    batch = pickle.loads(data, encoding="latin1")
    return np.asarray(batch["data"]).reshape(-1, 3, 32, 32), np.asarray(batch["labels"], dtype=np.uint8)


def _read_cifar_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a label and 3x32x32 bytes."""
    data = path.read_bytes()
    if len(data) != 10_000 * 3073:
        raise BadFile(f"{path} should have {10_000 * 3073} bytes, and has {len(data)}; download it again")
    rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def _dataset(images: np.ndarray, labels: np.ndarray, limit: int) -> TensorDataset:
    if len(images) != len(labels) or labels.max(initial=0) > 9:
        found = f"{len(images)} images and {len(labels)} labels up to {labels.max(initial=0)}"
        raise BadFile(f"{found} are no data set of 10 classes; download the files again")
    pixels = torch.tensor(images[: limit or None], dtype=torch.float32) / 127.5 - 1
    return TensorDataset(pixels, torch.tensor(labels[: limit or None], dtype=torch.int64))


def _digits(size: int, channels: int, limit: int) -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train and 360 to test, stretched from 8x8 pixels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # pixels are 0 to 16
    images = F.interpolate(images, (size, size), mode="bilinear").expand(-1, channels, -1, -1).contiguous()
    labels = torch.tensor(digits.target)
    train, test = slice(0, limit or 1437), slice(1437, 1437 + (limit or 360))
    return TensorDataset(images[:1437][train], labels[:1437][train]), TensorDataset(images[test], labels[test])
