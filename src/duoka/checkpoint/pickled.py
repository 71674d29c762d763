"""Files of `torch.save` of which no rank holds the whole: first written without tensors' data, then filled.

torch writes the pickle and leaves room for every tensor (`torch.serialization.skip_data`). All ranks then write their
rows of sharded tensors to their place, as into safetensors (`drafts.py`), or rank 0 gathers and writes one tensor
after the other. At the end the parts' checksums are combined and put where `torch.save` would have written them.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from duoka.checkpoint import disk
from duoka.checkpoint.drafts import all_see, own_pieces, own_runs
from duoka.checkpoint.gathering import gathered
from duoka.checkpoint.parts import are_first, holders
from duoka.checkpoint.ranks import Ranks, together
from duoka.checkpoint.rows import Run, is_sharded
from duoka.checkpoint.stored import bytes_of
from duoka.errors import WeightsError
from duoka.private.torch import save_through
from duoka.view.sharded import Sharded
from duoka.view.tensor.batch import BatchTensor

_CENTRAL = struct.Struct("<4s24xHHH12x")  # of a zip file's directory: magic, lengths of name, extra field and comment
_LOCAL = struct.Struct("<4s2xH18xHH")  # before the data of a record: magic, flags, lengths of name and extra field
_SUM_AFTER = 8  # flag: the checksum is after the data


class NotSharded(Exception):
    """A batch would have to be gathered while it is pickled."""


class Record(NamedTuple):
    """A tensor's data in a file. start: their offset. size: in bytes. sums: the offsets of their checksum."""

    start: int
    size: int
    sums: tuple[int, ...]


def sharded_in(obj: Any) -> list[BatchTensor]:
    """Return the sharded tensors in an object, in the order in which they are pickled; without communication.

    Raises:
        NotSharded: there is a batch in it that is not sharded as parameters are.
        Exception: any that pickling the object raises.
    """
    found: list[BatchTensor] = []

    def reduce(value: Any) -> Any:
        if not isinstance(value, BatchTensor):
            return NotImplemented
        if not is_sharded(value):
            raise NotSharded
        found.append(value)
        return int, ()

    class Lister(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return reduce(value)

        def persistent_id(self, value: Any) -> Any:
            return "storage" if isinstance(value, torch.TypedStorage) or torch.is_storage(value) else None

    Lister(_Nowhere(), protocol=2).dump(obj)
    return found


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def outline(obj: Any, path: Path) -> list[Record]:
    """Write `obj` as `torch.save` does, without the data of sharded tensors; return their records, as `sharded_in`.

    Raises:
        Exception: any that `torch.save` raises.
    """
    stand_ins: list[Tensor] = []
    known: dict[Any, Tensor] = {}  # tied tensors share one
    storages: dict[str, Any] = {}

    def reduce(value: Any) -> Any:
        if not (isinstance(value, BatchTensor) and is_sharded(value)):
            return NotImplemented
        rows = value.to_local()
        key = value._spec, rows.data_ptr(), rows.shape, rows.stride(), rows.dtype
        if key not in known:
            known[key] = torch.empty(value.shape, dtype=value.dtype, device="cpu")  # its memory is never touched
        stand_ins.append(known[key])
        made = known[key].detach()  # another tensor with this memory
        return (nn.Parameter(made, value.requires_grad) if isinstance(value, Sharded) else made).__reduce_ex__(2)

    save_through(obj, path, reduce, storages)
    records = _records(path)
    named = {storage.data_ptr(): name for name, storage in storages.items() if storage.nbytes()}
    names = [named.get(tensor.untyped_storage().data_ptr(), "") for tensor in stand_ins]
    rest = [name for name in sorted(storages, key=int) if name not in names and storages[name].nbytes()]
    _fill(path, [records[name] for name in rest], (_bytes_in(storages[name]) for name in rest))
    return [records[name] if name else Record(0, 0, ()) for name in names]


def _bytes_in(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _records(path: Path) -> dict[str, Record]:
    """Return the records of tensors in a file, by torch's names for them."""
    found: dict[str, Record] = {}
    with io.FileIO(path) as file, zipfile.ZipFile(file) as archive:  # in plain scripts `open` is intercepted
        at = archive.start_dir
        for info in archive.infolist():
            file.seek(at)
            _, *lengths = _CENTRAL.unpack(file.read(_CENTRAL.size))
            file.seek(info.header_offset)
            _, flags, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
            start = info.header_offset + _LOCAL.size + name + extra
            near = start + info.file_size + 4 if flags & _SUM_AFTER else info.header_offset + 14
            if info.filename.rpartition("/")[0].endswith("/data"):
                found[info.filename.rpartition("/")[2]] = Record(start, info.file_size, (near, at + 16))
            at += _CENTRAL.size + sum(lengths)
    return found


def _fill(path: Path, records: Sequence[Record], tensors: Iterable[Tensor]) -> None:
    """Write whole tensors, one at a time, to their records, with their checksums."""
    sums: dict[Record, int] = {}

    def parts() -> Iterator[tuple[int, disk.Data]]:
        for record, tensor in zip(records, tensors, strict=True):
            if record.size:
                data = bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
                sums[record] = zlib.crc32(data)
                yield record.start, data
                del data
            del tensor  # before the next one comes

    disk.write_at(path, parts())
    _put_sums(path, sums)


def _put_sums(path: Path, sums: Mapping[Record, int]) -> None:
    disk.write_at(
        path, sorted((at, struct.pack("<I", found)) for record, found in sums.items() for at in record.sums)
    )


# The ranks together.


def write_together(obj: Any, path: Path, ranks: Ranks, first: Callable[[Callable[[], Any]], Any]) -> None:
    """Write `obj` as `torch.save` does, its sharded tensors by the ranks that hold them. All ranks must call this.

    first: calls a function on rank 0, and returns its result, or raises its error, on every rank.

    Raises:
        NotSharded: there is a batch in it that is not sharded as parameters are; nothing is written.
        Exception: any that `torch.save` raises, or CheckpointError and WeightsError of other ranks.
    """
    tensors = sharded_in(obj)
    records = first(lambda: outline(obj, path))
    among = holders(tensors)
    if among is None:
        return
    writes = are_first(among)
    if not all_see(ranks, path, writes):
        named = {str(number): tensor for number, tensor in enumerate(tensors)}
        stream = gathered(named, [list(named), *[[]] * (among.world_size - 1)], among.rank)
        try:
            if ranks.rank == 0:
                _fill(path, records, (tensor for _, tensor in stream))
        finally:
            deque(stream, maxlen=0)
        return
    runs = [own_runs(tensor, False) for tensor in tensors]
    write = partial(_write_runs, path, records, tensors, runs, writes)
    found = ranks.all_gather(together(ranks, write, f"saving {path}", WeightsError))
    first(lambda: _put_sums(path, _combined(records, tensors, found[list(among.members)])))


def _write_runs(
    path: Path, records: Sequence[Record], tensors: Sequence[Tensor], runs: Sequence[Sequence[Run]], writes: bool
) -> Tensor:
    """Write this rank's rows, and return the checksum of each run; 0 on a machine that does not write."""
    sums: dict[int, list[int]] = {}

    def parts() -> Iterator[tuple[int, disk.Data]]:
        order = sorted(range(len(tensors)), key=lambda number: records[number].start)
        for number in order if writes else ():
            sums[number] = []
            for run, pieces in own_pieces(tensors[number], runs[number]):
                found = 0
                for at, piece in pieces:
                    found = zlib.crc32(piece, found)
                    yield records[number].start + run.at + at, piece
                sums[number].append(found)

    if writes:
        disk.write_at(path, parts())
    every = [sums.get(number, [0] * len(own)) for number, own in enumerate(runs)]
    return torch.tensor([found for own in every for found in own], dtype=torch.int64, device="cpu")


def _combined(records: Sequence[Record], tensors: Sequence[BatchTensor], found: Tensor) -> dict[Record, int]:
    """Combine the checksums of all ranks' runs. found: (ranks, runs of all tensors)."""
    sums: dict[Record, int] = {}
    columns = iter(found.t().tolist())
    for record, tensor in zip(records, tensors, strict=True):
        if record.size == 0:
            continue
        spec = tensor._spec
        row = math.prod(tensor.shape[spec.dim + 1 :]) * tensor.itemsize
        total = 0
        for _ in range(math.prod(tensor.shape[: spec.dim])):
            for size, own in zip(spec.partition.sizes, next(columns), strict=True):
                total = combine_sums(total, own, size * row)
        sums[record] = total
    return sums


def combine_sums(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two parts together. size: bytes of the second part."""
    power, exponent = 1 << 23, 1 << 31  # x^8 and 1, modulo the polynomial, whose lowest power is the highest bit
    while size:
        if size & 1:
            exponent = _multiply(power, exponent)
        power = _multiply(power, power)
        size >>= 1
    return _multiply(exponent, first) ^ second


def _multiply(one: int, other: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (0xEDB88320 if other & 1 else 0)
    return product
