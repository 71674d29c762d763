"""Files of `torch.save` of which no rank holds the whole: first written without tensors' data, then filled.

torch writes the pickle and leaves room for every tensor (`torch.serialization.skip_data`). All ranks then write their
rows (`sharded.py`). At the end the checksums of all spans are combined, and written where `torch.save` would have.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from duoka.checkpoint.formats import Span, bytes_of, is_sharded
from duoka.checkpoint.ranks import Ranks, together
from duoka.checkpoint.sharded import Part, are_first, holders, share_files, spans_of, write_rows
from duoka.errors import WeightsError
from duoka.private.torch import save_through
from duoka.sharding.parameter import Sharded
from duoka.system import disk
from duoka.view.shares.strides import Strides, contiguous_strides, is_dense, memory_order
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


def write_together(obj: Any, path: Path, ranks: Ranks, first: Callable[[Callable[[], Any]], Any]) -> None:
    """Write `obj` as `torch.save` does, its sharded tensors by the ranks that hold them. All ranks must call this.

    first: calls a function on rank 0, and returns its result, or raises its error, on every rank. Raises NotSharded,
    and writes nothing, if there is a batch in `obj` that is not sharded as parameters are; what `torch.save` raises;
    and errors of other ranks.
    """
    listed = sharded_in(obj)
    records = first(lambda: outline(obj, path))
    among = holders(listed)
    if among is None:
        return
    in_order = map(_in_memory_order, listed)
    tensors: dict[Record, Tensor] = dict(zip(records, in_order, strict=True))  # tied tensors have one record
    offsets = {record: record.start for record in sorted(tensors) if record.size}
    if not offsets:  # nothing but tensors without elements
        return
    spans = sorted(span for rank in range(among.world_size) for span in spans_of(offsets, tensors, rank))
    begins, sums = [span.at for span in spans], torch.zeros(len(spans), dtype=torch.int64, device="cpu")
    shares = share_files(ranks, Path(path).parent, are_first(among))

    def write() -> Tensor:
        write_rows([offsets], tensors, among, shares, lambda _, parts: disk.write(path, _summed(parts, begins, sums)))
        return sums

    total = ranks.all_gather(together(ranks, write, f"saving {path}", WeightsError)).sum(0)  # one rank has each
    first(lambda: _write_sums(path, _combined(spans, total.tolist())))


def sharded_in(obj: Any) -> list[BatchTensor]:
    """Return the sharded tensors in an object, in the order in which they are pickled; without communication.

    Raises NotSharded if there is a batch in it that is not sharded as parameters are, and what pickling it raises.
    """
    tensors: list[BatchTensor] = []

    class Lister(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, BatchTensor):
                return NotImplemented
            if not is_sharded(value):
                raise NotSharded
            tensors.append(value)
            return int, ()  # anything: the pickle is thrown away

        def persistent_id(self, value: Any) -> Any:
            return "storage" if isinstance(value, torch.TypedStorage) or torch.is_storage(value) else None

    class Nowhere:
        def write(self, data: Any) -> int:
            return len(data)

    Lister(Nowhere(), protocol=2).dump(obj)
    return tensors


def outline(obj: Any, path: Path) -> list[Record]:
    """Write `obj` as `torch.save` does, without data of sharded tensors; return their records, as `sharded_in`."""
    stand_ins: list[Tensor] = []
    known: dict[Any, Tensor] = {}  # tied tensors share one
    storages: dict[str, Any] = {}

    def reduce(value: Any) -> Any:
        if not (isinstance(value, BatchTensor) and is_sharded(value)):
            return NotImplemented
        rows = value.to_local()
        key = value._spec, rows.data_ptr(), rows.shape, rows.stride(), rows.dtype
        if key not in known:
            # Its memory is never touched.
            known[key] = torch.empty_strided(value.shape, _strides(value), dtype=value.dtype, device="cpu")
        stand_ins.append(known[key])
        made = known[key].detach()  # another tensor with this memory
        return (nn.Parameter(made, value.requires_grad) if isinstance(value, Sharded) else made).__reduce_ex__(2)

    save_through(obj, path, reduce, storages)
    records = _records(path)
    names = {storage.data_ptr(): name for name, storage in storages.items() if storage.nbytes()}
    skipped = [names.get(tensor.untyped_storage().data_ptr(), "") for tensor in stand_ins]
    unsharded = [(records[name], storage) for name, storage in storages.items() if name not in skipped]
    sums: dict[Record, int] = {}

    def parts() -> Iterator[Part]:
        for record, storage in sorted(unsharded, key=itemgetter(0)):
            if record.size:
                data = bytes_of(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu())
                sums[record] = zlib.crc32(data)
                yield record.start, data
                del data  # before the next one comes

    disk.write(path, parts())
    _write_sums(path, sums)
    return [records[name] if name else Record(0, 0, ()) for name in skipped]


def _strides(value: BatchTensor) -> Strides:
    """Return the strides of a tensor in the file: its own, but for gaps and repetitions."""
    shape, strides = value._meta.shape, value._meta.strides
    return strides if is_dense(shape, strides) else contiguous_strides(shape)


def _in_memory_order(value: BatchTensor) -> BatchTensor:
    """Return the tensor with the order of dimensions in which its elements follow each other in the file."""
    order = memory_order(_strides(value))
    spec = replace(value._spec, dim=order.index(value._spec.dim))
    return BatchTensor(value.to_local().detach().permute(order), spec)


def _records(path: Path) -> dict[str, Record]:
    """Return the records of tensors in a file, by torch's names for them."""
    records: dict[str, Record] = {}
    with io.FileIO(path) as file, zipfile.ZipFile(file) as archive:  # in plain scripts `open` is intercepted
        at = archive.start_dir
        for info in archive.infolist():
            file.seek(at)
            _, *lengths = _CENTRAL.unpack(file.read(_CENTRAL.size))
            file.seek(info.header_offset)
            _, flags, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
            start = info.header_offset + _LOCAL.size + name + extra
            # A checksum stands beside the data (4 bytes after them, or at 14 of their header) and in the directory.
            near = start + info.file_size + 4 if flags & _SUM_AFTER else info.header_offset + 14
            if info.filename.rpartition("/")[0].endswith("/data"):
                records[info.filename.rpartition("/")[2]] = Record(start, info.file_size, (near, at + 16))
            at += _CENTRAL.size + sum(lengths)
    return records


# Checksums.


def _summed(parts: Iterable[Part], begins: Sequence[int], sums: Tensor) -> Iterator[Part]:
    """Yield the parts, and add each to the checksum of its span. begins: of all spans, ascending."""
    for at, data in parts:
        number = bisect_right(begins, at) - 1
        sums[number] = zlib.crc32(data, int(sums[number]))
        yield at, data


def _combined(spans: Iterable[Span], sums: Iterable[int]) -> dict[Record, int]:
    totals: dict[Record, int] = {}
    for span, value in zip(spans, sums, strict=True):
        totals[span.name] = combine_sums(totals.get(span.name, 0), value, span.size)
    return totals


def _write_sums(path: Path, sums: Mapping[Record, int]) -> None:
    disk.write(path, sorted((at, struct.pack("<I", value)) for record, value in sums.items() for at in record.sums))


def combine_sums(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two parts together. size: bytes of the second part."""
    # As zlib's crc32_combine, which no Python up to 3.14 has: `first` times x to the power of the second's bits.
    power, exponent = 1 << 23, 1 << 31  # x^8 and 1, modulo the polynomial, whose lowest power is the highest bit
    while size:
        if size & 1:
            exponent = _multiply(power, exponent)
        power = _multiply(power, power)
        size >>= 1
    return _multiply(exponent, first) ^ second


def _multiply(left: int, right: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (0xEDB88320 if right & 1 else 0)
    return product
