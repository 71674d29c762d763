"""Rules for properties of tensors: those of the global batch, without a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.hardware.vendors import TYPES
from duoka.private.torch import AsPlainTensors, memory_of
from duoka.system.user_code import user_line
from duoka.view import originals
from duoka.view.memory import offset_in_batch, same_memory, whole_memory
from duoka.view.rules.gradients import after_hooks, get_grad
from duoka.view.rules.lookup import functions, getters
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule, batches_in, set_rows
from duoka.view.tensor.spec import Meta
from duoka.view.whole import compute_whole

if TYPE_CHECKING:
    from duoka.view.view import View

GLOBAL = "size dim ndimension numel nelement __len__ __hash__ element_size is_floating_point is_complex"
GLOBAL_GETTERS = (
    "shape ndim dtype layout itemsize nbytes is_meta is_sparse is_quantized "
    "names is_nested is_sparse_csr is_ipu is_maia is_mkldnn is_mtia is_vulkan is_xla"
)
DEVICE = "get_device"
DEVICE_GETTERS = "device is_cpu " + " ".join(f"is_{name}" for name in TYPES)
LOCAL = """
retain_grad is_inference is_conj is_neg is_signed is_pinned type is_shared record_stream _is_view
"""
LAYOUT = "stride is_contiguous dim_order"
NEW = "new new_zeros new_ones new_full new_empty new_empty_strided new_tensor"
ADDRESSES = "data_ptr const_data_ptr"
_NO_MEMORY = 1 << 55  # no process on x86-64 or ARM64 has memory at such addresses
LOCAL_GETTERS = "requires_grad is_leaf grad_fn retains_grad output_nr _version"


def global_property(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Query the batch tensor itself, which has the global shape."""
    with AsPlainTensors():
        return func(*args, **kwargs)


def of_device(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Query the device that the script sees: rows of an offloaded parameter are elsewhere."""
    return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)


def local_property(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Query this rank's rows, for properties that are equal on all ranks."""
    if func is Tensor.type and not (args[1:] or kwargs):  # else it is a conversion
        return of_device(func, args, kwargs)
    out: Any = func(args[0]._local, *args[1:], **kwargs)
    return BatchTensor(out, args[0]._spec) if func is Tensor.type else out


def layout(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Query a tensor without values that is laid out as the global batch."""
    return func(args[0]._meta.of_zeros(), *args[1:], **kwargs)


def storage_offset(func: Function, args: Args, kwargs: Kwargs) -> int:
    """Return the place of the first element in the memory of the global batch."""
    rows, meta, spec = args[0]._local, args[0]._meta, args[0]._spec
    if not meta.shape.numel() and max(meta.strides) <= meta.strides[spec.dim] * spec.inner:
        return int(func(rows))  # it may begin behind the last element of a sample
    return offset_in_batch(rows, spec, meta.strides)


def address(func: Function, args: Args, kwargs: Kwargs) -> int:
    """Return a number for `x.data_ptr()` by which tensors can be told apart, and at which there is no memory.

    What reads memory by its address would go past the end of this rank's rows: it ends with an error instead. While
    the script holds a gathered copy or an array of the batch, which share memory with it on one device, it is theirs.
    Copies of a sharded parameter are none that a script keeps for long: they have the parameter's numbers instead.
    """
    rows, view = args[0]._local, args[0]._spec.view
    if not args[0]._meta.shape.numel():
        return 0
    held = None if view.of_parameters else view.aliased.held(rows)
    start = _start(rows) if held is None or not held.full.numel() else held.full.data_ptr() - held.offset()
    return int(start + storage_offset(Tensor.storage_offset, args, {}) * rows.itemsize)


def make_address_in_parameter(view: View, original: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
    """Make a `data_ptr` that gives a gathered copy of a sharded parameter of `view` its place in the parameter.

    Libraries find tied parameters by the addresses of their first and last entries.
    """

    def data_ptr(tensor: Tensor) -> int:
        for aliased in [aliased for parameters in view.sharded for aliased in parameters.aliased.copies]:
            if type(tensor) is Tensor and same_memory(tensor, aliased.full):
                start = _start(aliased.rows) + aliased.offset()
                return start + original(tensor) - original(aliased.full)
        return original(tensor)

    return data_ptr


def _start(rows: Tensor) -> int:
    """Return the number that stands for the address of the memory of a batch with these rows."""
    return (rows.untyped_storage().data_ptr() or memory_of(rows)) | _NO_MEMORY


def retain_grad(func: Function, args: Args, kwargs: Kwargs) -> None:
    """Compute `x.retain_grad()`; the gradient is divided when it is read (gradients.py)."""
    rows = args[0]._local
    args[0]._spec.view.aliased.refuse_parted(rows)
    originals.retain_grad(rows)
    originals.retain_grad(after_hooks(rows))


def base(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Return the `_base` of a batch: None if it is no view, else a gathered copy of the view itself."""
    return compute_whole(Tensor.view_as, args * 2, {}) if func(args[0]._local) is not None else None


def data(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Return `x.data`, which shares memory, without autograd."""
    return BatchTensor(_data_of(args[0]._local, args[0]._spec.view), args[0]._spec, args[0]._meta.strides)


def _data_of(rows: Tensor, view: View) -> Tensor:
    """Return the data of rows, through which torch counts no write to them."""
    view.aliased.has_uncounted_writes = True
    view.saved.add(rows)
    return rows.data


def _give_data(batch: BatchTensor, value: Tensor) -> None:
    rows, view = batch._local, batch._spec.view
    if not same_memory(rows, value):
        view.aliased.part_from(rows)
    rows.data = _data_of(value, view)


def set_data(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `x.data = y` of the same shape and type: x gets y's rows, or shares its memory with a plain y."""
    batch, value = args
    if not isinstance(batch, BatchTensor) or value.shape != batch.shape:
        return NotImplemented
    if value.dtype != batch.dtype and not batch._spec.view.of_parameters:  # `model.half()` sets gradients, too
        return NotImplemented
    if isinstance(value, BatchTensor) and value._spec != batch._spec:
        return NotImplemented
    if batch._local.is_leaf:
        get_grad(func, (batch,), {})  # which stays laid out as the old data
    if isinstance(value, BatchTensor):
        _give_data(batch, value._local)
        batch._meta = value._meta  # its strides may be others
    else:

        def set_on(rows: Tensor) -> Tensor:
            _give_data(batch, rows)
            return batch._rows  # which counts writes, unlike `rows`

        strides = set_rows(set_on, value, batch._spec)
        batch._meta = Meta.of(batch._rows, batch._spec, strides)
    batch._range = None
    batch._spec.view.aliased.has_replaced_data |= not batch._spec.view.of_parameters  # which are no views
    return None


def new(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`x.new_zeros(sizes)` and similar: a replicated tensor of x's type and device."""
    if batches_in((args[1:], kwargs)):
        return NotImplemented
    return func(args[0]._local.detach(), *args[1:], **{"device": args[0]._shown_device, **kwargs})


def storage(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `x.untyped_storage()`: that of a gathered copy of the memory of which the batch is a view.

    Of a sharded parameter it is the storage of this rank's rows: scripts compare storages to detect tied parameters.
    """
    batch, spec = args[0], args[0]._spec
    if spec.view.of_parameters:
        return func(batch._local.detach())
    memory = memory_of_batch(batch)
    if memory is None and batch._local.untyped_storage().nbytes() != batch._local.numel() * batch.itemsize:
        raise Refused(f"{user_line()}: duoka does not know in which order this view's memory has the rows of a batch")
    return compute_whole(func, (batch if memory is None else memory,), kwargs)


def memory_of_batch(batch: BatchTensor) -> BatchTensor | None:
    """Return all the memory of which a batch is a view, as a batch; None if that is no sequence of whole samples."""
    memory = whole_memory(batch._local, batch._spec, batch._meta.strides)
    return None if memory is None else BatchTensor(memory[1], memory[0])


def is_same_size(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `x.is_same_size(y)` of the global batches."""
    return args[0].shape == args[1].shape


def is_tensor(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`torch.is_tensor` and similar."""
    return True


ONCE_FOR_ALL_SHARES: frozenset[Rule] = frozenset({global_property, of_device, layout, is_same_size, is_tensor})

_data: Any = Tensor.data
RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(GLOBAL), global_property),
    **dict.fromkeys(getters(GLOBAL_GETTERS), global_property),
    **dict.fromkeys(functions(DEVICE), of_device),
    **dict.fromkeys(getters(DEVICE_GETTERS), of_device),
    **dict.fromkeys(functions(LOCAL), local_property),
    **dict.fromkeys(functions(LAYOUT), layout),
    Tensor.storage_offset: storage_offset,
    **dict.fromkeys(functions(ADDRESSES), address),
    **dict.fromkeys(getters(LOCAL_GETTERS), local_property),
    **dict.fromkeys(getters("data"), data),
    **dict.fromkeys(getters("_base"), base),
    Tensor.retain_grad: retain_grad,
    _data.__set__: set_data,
    **dict.fromkeys(functions(NEW), new),
    Tensor.untyped_storage: storage,
    **dict.fromkeys(functions("is_same_size"), is_same_size),
    torch.is_tensor: is_tensor,
}
