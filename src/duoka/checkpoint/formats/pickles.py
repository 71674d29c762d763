"""Files of torch.save: pickles, read only by torch's restricted unpickler.

All functions and classes that a pickle names are listed before it is loaded, so that a refusal can name them. With
`objects="inert"`, classes that torch does not allow become stand-ins that keep their state and have no code. A whole
pickled module gives its tensors in this way, without running its code.
"""

from __future__ import annotations

import pickletools
import tarfile
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from duoka.checkpoint.formats import FileContents, LoadedTensor
from duoka.errors import UnsafePickle, WeightsError
from duoka.private.python import IMPORT_MAPPING, NAME_MAPPING, without_checksum
from duoka.private.texts import UNPICKLER

# Classes that hold settings and numbers, common in files of training frameworks: always read as stand-ins.
INERT = frozenset(
    {
        "argparse.Namespace",
        *(f"builtins.{name}" for name in ("dict", "float", "frozenset", "int", "list", "object", "str", "tuple")),
        "collections.defaultdict",
        "collections.deque",
        "copyreg._reconstructor",
        *(f"datetime.{name}" for name in ("date", "datetime", "timedelta")),
        *("addict.addict.Dict", "easydict.EasyDict"),
        *("numpy.dtype", "numpy.ndarray", "numpy.core.multiarray.scalar", "numpy.core.multiarray._reconstruct"),
        *("numpy._core.multiarray.scalar", "numpy._core.multiarray._reconstruct"),
        *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
        "torch.torch_version.TorchVersion",
        "lightning.fabric.utilities.data.AttributeDict",
        "lightning.pytorch.utilities.parsing.AttributeDict",
        "lightning_fabric.utilities.data.AttributeDict",
        "pytorch_lightning.utilities.parsing.AttributeDict",
    }
)
INERT_PACKAGES = ("omegaconf.", "yacs.config.", "mmengine.config.", "ml_collections.config_dict.")
BLOCKED = frozenset({"os", "posix", "nt", "sys"})  # a file of weights does not need these modules
DEEPEST = 64  # levels of nested dicts and lists
MOST = 300_000  # dicts and lists in all
SMALL = 1 << 28  # bytes of a tensor that may be larger than its file, such as an expanded number
HINT = (
    '; if its tensors are wanted all the same, objects="inert" (--objects inert) reads them with stand-ins for '
    "these, which run nothing either"
)
ZIP = b"PK\x03\x04"


def matches(path: Path) -> bool:
    """Return True for a zip file, a pickle or torch's old tar file."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(4)
    return head[:1] == b"\x80" or head == ZIP or tarfile.is_tarfile(path)


def read(path: Path, objects: str = "refuse") -> FileContents:
    """Read the tensors, with data on demand from a zip file. Raises WeightsError, UnsafePickle."""
    with open(path, "rb") as file:
        is_zip = file.read(4) == ZIP
    try:
        named, protocol = _named(path, is_zip)
    except WeightsError:
        raise
    except Exception as error:  # zipfile and pickletools raise errors of any type on damaged files
        raise WeightsError(f"{path} is damaged, or not a file of torch.save: {error}") from error
    import torch  # imported late: the code above does not need it

    from duoka.private.torch import allowed_in_pickles

    unknown = sorted(named - set(allowed_in_pickles()))
    inert = [name for name in unknown if objects == "inert" or name in INERT or name.startswith(INERT_PACKAGES)]
    blocked = [name for name in unknown if name.split(".")[0] in BLOCKED]
    if calls := [name for name in unknown if name not in inert or name in blocked]:
        listed = ", ".join(f"`{name}`" for name in calls[:8]) + (", …" if len(calls) > 8 else "")
        text = f"{path} is refused: reading it would call {listed}, and no code of it has been run"
        raise UnsafePickle(text if blocked else text + HINT)
    if protocol > 2:
        raise WeightsError(f"{path} was saved with pickle protocol {protocol}; torch reads safely only protocol 2")
    devices: set[str] = set()

    def onto_cpu(storage: Any, device: str) -> Any:
        devices.add(device)
        return storage

    stand_ins = [(_stand_in(name), name) for name in unknown]
    try:
        with (
            open(path, "rb") as file,
            warnings.catch_warnings(),
            torch.serialization.safe_globals(stand_ins),  # type: ignore[arg-type]
        ):
            warnings.simplefilter("ignore")
            mapped = is_zip and path.suffix != ".safetensors"  # torch would read it as safetensors
            tree = torch.load(path if mapped else file, map_location=onto_cpu, weights_only=True, mmap=mapped)
            plain = _Tree(max(SMALL, path.stat().st_size)).plain(tree)
    except Exception as error:  # torch raises errors of any type on damaged files
        said = str(error).partition(UNPICKLER)[2] or str(error)  # without torch's advice to load with code
        line = next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
        raise WeightsError(f"{path} cannot be read: {line}") from error
    notes = [f"mapped {device} → cpu" for device in sorted(devices - {"cpu"})]
    if unknown:
        notes.append(f"read as inert stand-ins: {', '.join(unknown)}")
    check = (lambda: _check_sums(path)) if is_zip else (lambda: None)
    return FileContents(path, "torch.save" if is_zip else "torch.save, before 1.6", plain, {}, tuple(notes), check)


# The names in a file's pickles, found without loading it.


def _named(path: Path, is_zip: bool) -> tuple[set[str], int]:
    """Return the names of all functions and classes in a file's pickles, and the newest protocol among them."""
    if is_zip:
        with zipfile.ZipFile(path) as archive, _record(archive, _check_records(path, archive)) as stream:
            return _names_in(stream)
    if tarfile.is_tarfile(path):
        raise WeightsError(f"{path} is a tar file of torch 0.1, which torch can only read by running code in it")
    named: set[str] = set()
    newest = 0
    with open(path, "rb") as stream:
        for _ in range(4):  # a magic number, a protocol number, the system's sizes, the objects
            more, protocol = _names_in(stream)
            named |= more
            newest = max(newest, protocol)
    return named, newest


def _check_records(path: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return the record of a zip file that holds its pickle."""
    records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "constants.pkl" in records:
        raise WeightsError(
            f"{path} is a TorchScript program, not weights; save them by "
            f"duoka.save_weights(torch.jit.load({str(path)!r}).state_dict(), 'weights.safetensors')"
        )
    if "data.pkl" not in records:
        raise WeightsError(f"{path} is a zip file, but not one of torch.save's: it has no data.pkl")
    if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
        raise WeightsError(f"{path} is compressed, which torch.save does not do; unpack it and zip it without")
    return records["data.pkl"]


def _record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """Open a record without zipfile's check of its checksum, which torch.save may have omitted."""
    return without_checksum(archive.open(info))


def _names_in(stream: IO[bytes]) -> tuple[set[str], int]:
    """Return the names in one pickle, and its protocol, by scanning its opcodes without executing them."""
    named: set[str] = set()
    protocol = 0
    recent: list[str] = []  # strings as they are pushed; STACK_GLOBAL takes two
    memo: dict[Any, str] = {}
    for operation, argument, _ in pickletools.genops(stream):
        kind: str = operation.name
        if kind == "PROTO":
            protocol = int(argument or 0)
        elif kind in ("GLOBAL", "INST"):
            named.add(_today(*str(argument).split(" ", 1)))
        elif kind == "STACK_GLOBAL":
            named.add(_today(*["?", "?", *recent][-2:]))
        elif kind in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):  # names may be fetched again from the memo
            memo[len(memo) if argument is None else argument] = recent[-1] if recent else "?"
        elif kind in ("BINGET", "LONG_BINGET", "GET"):
            recent.append(memo.get(argument, "?"))
        elif isinstance(argument, str):
            recent.append(argument)
    return named, protocol


def _today(module: str, name: str) -> str:
    """Map a Python 2 name to Python 3's."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[(module, name)]
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


# Conversion of the loaded objects to plain dicts and lists.


def _stand_in(name: str) -> type:
    """Create a class without code of its own: a dict that keeps its attributes."""

    def build(cls: type, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        return OrderedDict()

    return type(name.rpartition(".")[2], (), {"__new__": build, "__module__": name.rpartition(".")[0]})


class _Tree:
    """Converts loaded objects to a tree of dicts, lists, plain values and `LoadedTensor`s.

    Shared dicts and lists are counted each time, so that a small file cannot become a huge tree. Raises ValueError
    for cycles, too deep or too large trees, and for tensors larger than `largest`: a view of a few numbers can have
    any size.
    """

    def __init__(self, largest: int) -> None:
        self._nodes, self._largest = 0, largest
        self._above: set[int] = set()  # ids of the enclosing nodes

    def plain(self, node: Any) -> Any:
        """Convert a node."""
        import torch

        if isinstance(node, torch.Tensor):
            if node.numel() * node.element_size() > self._largest:
                raise ValueError(f"a tensor {tuple(node.shape)} would be larger than the file that it is in")
            return LoadedTensor(node)
        if not isinstance(node, (dict, list, tuple)):
            return node
        self._enter(node)
        tree: Any
        if isinstance(node, dict):
            items = self.module(node) if "_parameters" in vars_of(node) else node
            tree = {_text(key): self.plain(value) for key, value in items.items()}
        else:
            tree = [self.plain(value) for value in node]
        self._above.remove(id(node))
        return tree

    def module(self, stand_in: Any, prefix: str = "") -> dict[str, Any]:
        """Build the state dict of a pickled module from its stand-in's attributes."""
        attributes = vars_of(stand_in)
        transient = attributes.get("_non_persistent_buffers_set", ())
        state = {prefix + _text(name): value for name, value in _items(attributes, "_parameters")}
        buffers = {_text(name): value for name, value in _items(attributes, "_buffers") if name not in transient}
        state |= {prefix + name: value for name, value in buffers.items()}
        for name, part in _items(attributes, "_modules"):
            self._enter(part)
            state |= self.module(part, f"{prefix}{_text(name)}.")
            self._above.remove(id(part))
        return state

    def _enter(self, node: Any) -> None:
        self._nodes += 1
        if id(node) in self._above or len(self._above) > DEEPEST or self._nodes > MOST:
            raise ValueError(
                "its dicts and lists form a cycle, are nested too deep, or are too many; save a plain state_dict"
            )
        self._above.add(id(node))


def vars_of(node: Any) -> dict[str, Any]:
    """Return the attributes of a stand-in; {} for plain dicts."""
    attributes: dict[str, Any] = getattr(node, "__dict__", {})
    return attributes


def _items(attributes: Mapping[str, Any], name: str) -> Iterator[tuple[Any, Any]]:
    entries = attributes.get(name)
    items = entries.items() if isinstance(entries, dict) else ()
    return ((key, value) for key, value in items if value is not None)


def _text(key: Any) -> Any:
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else key


def _check_sums(path: Path) -> None:
    """Compare every record with its checksum. If all differ, torch.save has left the checksums out.

    Raises WeightsError if a checksum is wrong, or the file is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = [info for info in archive.infolist() if info.file_size]
            wrong = [info.filename for info in records if _sum(archive, info) != info.CRC]
    except Exception as error:  # zipfile raises errors of any type on damaged files
        raise WeightsError(f"{path} is damaged: {error}") from error
    if wrong and len(wrong) < len(records):
        raise WeightsError(f"{path} is damaged: the checksum of {wrong[0]} in it is wrong")


def _sum(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    with _record(archive, info) as stream:
        total = 0
        while block := stream.read(1 << 20):
            total = zlib.crc32(block, total)
    return total
