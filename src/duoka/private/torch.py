"""Private and undocumented parts of torch: their purpose, and the public alternative, if any.

All are looked up when this file is imported; attributes of objects are tried once, in `_try`.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, partial
from types import CodeType, SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import rnn
from torch.utils import checkpoint as _checkpoint
from torch.utils.data import DataLoader

from duoka.private import numbers, requiring
from duoka.system.libc import muted

with requiring("torch", torch.__version__):
    from torch import _utils, _weights_only_unpickler
    from torch._functorch import pyfunctorch as _pyfunctorch
    from torch.autograd import forward_ad as _forward_ad
    from torch.distributed import distributed_c10d as _c10d
    from torch.nn.utils import rnn
    from torch.utils import _device, _foreach_utils, _python_dispatch, _pytree
    from torch.utils.data._utils import pin_memory as _pin_memory
    from torch.utils.data._utils import signal_handling as _loader_deaths

    # Tensors in nested tuples, lists and dicts. Public: none in torch.
    TreeSpec = _pytree.TreeSpec
    keystr = _pytree.keystr
    tree_flatten = _pytree.tree_flatten
    tree_flatten_with_path = _pytree.tree_flatten_with_path
    _tree_leaves = _pytree.tree_leaves
    _tree_map_only = _pytree.tree_map_only
    tree_unflatten = _pytree.tree_unflatten
    # An exception that a loader worker sends in place of a batch. Public: none.
    ExceptionWrapper = _utils.ExceptionWrapper
    # Copies batches of all types to pinned memory. Public: Tensor.pin_memory, for tensors.
    pin_memory: Callable[[Any], Any] = _pin_memory.pin_memory
    # Creates a tensor subclass with a shape and no memory. Public: none for subclasses.
    make_wrapper = Tensor._make_wrapper_subclass
    # Softmax of attention, with 0 for a row without any weight. Public: within scaled_dot_product_attention.
    safe_softmax = torch._safe_softmax
    # Parses the arguments of Tensor.to: device, dtype, non_blocking, memory_format. Public: none.
    parse_to: Callable[..., tuple[Any, ...]] = torch._C._nn._parse_to
    # Whether the running backward pass will call a node. Public: none.
    will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
    # Disables __torch_function__ of subclasses. Public: none; notes/extending names it.
    AsPlainTensors = torch._C.DisableTorchFunctionSubclass
    # Disables __torch_function__ of subclasses and modes. Public: none; notes/extending names the one above.
    WithoutTorchFunctions = torch._C.DisableTorchFunction
    # Context in which writes to a tensor are not counted, and what sets their number. Public: none.
    _preserve_version: Callable[[Tensor], Any] = torch.autograd.grad_mode._unsafe_preserve_version_counter
    _set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = (
        torch._C._autograd._unsafe_set_version_counter
    )
    # Attributes of modules that hold none of the script's tensors. Public: none.
    INTERNAL_OF_MODULES = vars(nn.Module()).keys() - {"_buffers"}
    # Number of active TorchDispatchModes. Public: none.
    count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    # Depth of torch.func's transforms, or None. Public: none.
    transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
    # Whether a tensor belongs to these transforms, or to older ones, without memory of its own. Public: none.
    is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
    is_mapped_over: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
    # Suspends these transforms. Public: none.
    without_transforms: Callable[[], AbstractContextManager[Any]] = _pyfunctorch.temporarily_clear_interpreter_stack
    # Whether any TorchFunctionMode is active, and whether __torch_function__ of subclasses is called. Public: none.
    function_modes_are_active: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
    functions_are_enabled: Callable[[], bool] = torch._C._is_torch_function_enabled
    # Hooks on the calls of all modules, by id. Public: none.
    GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
        nn.modules.module._global_backward_hooks,
        nn.modules.module._global_backward_pre_hooks,
        nn.modules.module._global_forward_hooks,
        nn.modules.module._global_forward_pre_hooks,
    )
    # Attributes of a module that hold its hooks on calls. Public: none.
    HOOKS_OF_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    # Whether a mask of padded positions leaves only the last ones out, as TransformerEncoder asks. Public: none.
    padding_comes_last: Callable[[Tensor, Tensor], bool] = torch._nested_tensor_from_mask_left_aligned
    # Holds `_current_level`, that of forward-mode differentiation, -1 outside. Public: none.
    FORWARD_MODE: dict[str, Any] = vars(_forward_ad)
    # Suspends TorchDispatchModes. Public: none.
    without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
    # The active ones. Public: none.
    dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
    # Operations on many tensors in one call. Public: one by one.
    _COPY_ALL = torch._foreach_copy_
    _ADD_ALL = torch._foreach_add_
    # The norms of many tensors. Public: torch.nn.utils.get_total_norm, of all together.
    NORM_OF_ALL = torch._foreach_norm
    # Types of tensors for which torch.nn.utils clips and norms gradients in one call. Public: foreach=True.
    TYPES_IN_ONE_CALL: Any = _foreach_utils._foreach_supported_types
    # Called by optimizers with fused=True for all parameters. Public: none.
    FUSED_STEPS = [getattr(torch, name) for name in dir(torch) if name.startswith(("_fused_ad", "_fused_sgd"))]
    # Called by others, with lists of parameters, gradients and states. Public: none.
    SINGLE_STEPS = [
        (sys.modules[f"torch.optim.{name}"], f"_single_tensor_{name}")
        for name in ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
    ]
    # Called by all of them with lists of parameters, gradients, states and counts of steps. Public: none.
    GROUP_ALIKE = (torch.optim.Optimizer, "_group_tensors_by_device_and_dtype")
    # Called by GradScaler.unscale_ for all gradients. Public: none.
    UNSCALE_ALL = torch._amp_foreach_non_finite_check_and_unscale_
    # Called by torch.distributions to check values; of truth values alone. Public: torch.all, torch.any.
    TRUTHS: dict[Any, Callable[[Tensor], Tensor]] = {
        torch._is_all_true: torch.all,
        torch._is_any_true: torch.any,
    }
    # Whether `p.data = x` is possible, as `model.to` checks. Public: none.
    TYPES_AGREE = torch._has_compatible_shallow_copy_type
    # The engine with which scripts queue callbacks as `Variable._execution_engine`. Public: none.
    backward_engine: Any = torch.autograd.Variable._execution_engine

    # Before a script's calls of it are intercepted. Public: torch.save.
    _save: Callable[..., None] = torch.save

    _LEAVES = frozenset({Tensor, nn.Parameter, int, float, bool, str, torch.Size, type(None)})
    _GLOO_TELLS = numbers(torch.__version__) < (2, 11)

    # (owner, name): functions that duoka replaces.
    # Called at the begin of each loop over a loader. Public: DataLoader.__iter__, which keeps workers.
    GET_ITERATOR = (DataLoader, "_get_iterator")
    # Called by pad_packed_sequence; its total length is of the whole batch. Public: none.
    PAD_PACKED = (torch._VF, "_pad_packed_sequence")
    # Called by torch.nn.utils.rnn.pack_padded_sequence, the public one.
    PACK = "_pack_padded_sequence"
    # Ends a recomputation when the last saved tensor is there; every rank raises it alike. Public: none.
    StopRecomputation: type[Exception] = _checkpoint._StopRecomputationError
    # Called by all public forms of `checkpoint` (torch 2.15 has several). Public: `checkpoint` itself.
    CHECKPOINT = (_checkpoint, "_checkpoint_impl" if hasattr(_checkpoint, "_checkpoint_impl") else "checkpoint")
    # The SIGCHLD handler that raises an error about a dead loader worker. Public: none.
    LOADER_DEATHS = (_loader_deaths, "_error_if_any_worker_fails")
    # Used by `init_process_group`. Public: register_rendezvous_handler, which refuses known schemes.
    rendezvous_handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    # Functions that create tensors, as known to `with torch.device(...)`, computed at the first call. Public: none.
    note_constructors: Callable[[], object] = _device._device_constructors
    # Entered by `with torch.device(...)` and `torch.set_default_device`. Public: none.
    DEVICE_CONTEXT = _device.DeviceContext
    # The methods of tensors that lazy modules' parameters take before they have a shape. Public: none.
    LAZY_METHODS: list[Any] = sys.modules["torch.nn.parameter"].UninitializedTensorMixin._allowed_methods
    # Classes of TorchScript's functions and methods. Public: torch.jit.ScriptFunction, for functions.
    SCRIPTED = (torch.jit.ScriptFunction, torch._C.ScriptMethod)
    # Unregisters operators at exit. Public: none.
    TAKE_DOWN = (torch.library, "_del_library")


def constructors() -> list[tuple[Any, str]]:
    """Return the modules and names of functions that create tensors. Public: none."""
    spaces: tuple[Any, ...] = torch, torch.fft, torch.nested
    names = {function.__name__.removeprefix("fft_") for function in _device._device_constructors()}
    return [(space, name) for space in spaces for name in sorted(names) if name in vars(space)]


class TorchDispatchMode(_python_dispatch.TorchDispatchMode):
    """Intercepts operators. Public: torch's notes name the base class by its private path."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else torch wraps each call, which takes longer than most operators
        return False


# --- tensors


def tree_leaves(tree: Any) -> list[Any]:
    """Return the values in nested containers, in order, in less time than torch's function. Public: none."""
    leaves: list[Any] = []
    _add_leaves(tree, leaves)
    return leaves


def _add_leaves(tree: Any, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for item in tree:
            _add_leaves(item, leaves)
    elif kind is dict:
        for item in tree.values():
            _add_leaves(item, leaves)
    elif kind in _LEAVES or issubclass(kind, Tensor):
        leaves.append(tree)
    else:
        leaves += _tree_leaves(tree)


def tree_map_only(kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to the leaves of a kind. Public: torch's, which is slow, as it describes the tree."""
    this = type(tree)
    if this is tuple or this is list:
        return this([tree_map_only(kind, function, item) for item in tree])
    if this is dict:
        return {key: tree_map_only(kind, function, value) for key, value in tree.items()}
    if this is OrderedDict:
        mapped = OrderedDict((key, tree_map_only(kind, function, value)) for key, value in tree.items())
        vars(mapped).update(vars(tree))  # `_metadata` of a state dict
        return mapped
    if this in _LEAVES or issubclass(this, Tensor):
        return function(tree) if isinstance(tree, kind) else tree
    return _tree_map_only(kind, function, tree)


NO_PASS = -1


def backward_number() -> int:
    """Return the number of the backward pass that this thread computes; `NO_PASS` outside of one. Public: none."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Return True if this thread computes a backward pass. Public: none."""
    return backward_number() != NO_PASS


def negative_of(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that is to be read as its negative. Public: `imag` of a conjugate, of a new type."""
    negative: Tensor = torch._neg_view(tensor)
    return negative


def copy_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target in one call. Public: one by one."""
    _write_all(_COPY_ALL, Tensor.copy_, targets, sources)


def add_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add each source to its target in one call. Public: one by one."""
    _write_all(_ADD_ALL, Tensor.add_, targets, sources)


def _write_all(in_one_call: Any, one_by_one: Any, targets: list[Tensor], sources: list[Tensor]) -> None:
    if any(target.is_conj() or target.is_neg() for target in targets):  # which torch refuses in one call
        for target, source in zip(targets, sources, strict=True):
            one_by_one(target, source)
    else:
        in_one_call(targets, sources)


def is_immutable_zero(tensor: Tensor) -> bool:
    """Return True for zeros without memory, as second gradients have them. Public: to write to it, and catch."""
    return tensor._is_zerotensor()


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory was written to. Public: none."""
    return tensor._version


def uncounted(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which writes to a tensor's memory are not counted. Public: none."""
    return nullcontext() if tensor.is_inference() else _preserve_version(tensor)


def set_version(tensor: Tensor, number: int) -> None:
    """Set the number of writes to a tensor's memory that torch has counted. Public: none."""
    if not tensor.is_inference():
        _set_versions((tensor,), (number,))


def memory_of(tensor: Tensor) -> int:
    """Return a number equal for tensors that share memory. Public: data_ptr(), which is 0 for all without any."""
    number: int = tensor.untyped_storage()._cdata
    return number


class WeakMemory:
    """A weak reference to a tensor's memory, whose number no other memory gets meanwhile. Public: none."""

    def __init__(self, tensor: Tensor) -> None:
        self.number = memory_of(tensor)
        self._reference = StorageWeakRef(tensor.untyped_storage())

    def storage(self) -> torch.UntypedStorage | None:
        """Return the memory, or None if no tensor has it any longer."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage


def count_references(tensor: Tensor) -> int:
    """Return how many tensors and arrays share this tensor's memory. Public: none."""
    storage = tensor.untyped_storage()  # counts itself, or is the object that somebody else has, too
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1 + (sys.getrefcount(storage) > _OF_OWN_STORAGE)


def _references_to_own_storage(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_OF_OWN_STORAGE = _references_to_own_storage(torch.empty(0))


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which a tensor is a view for autograd; of any other itself. Public: none."""
    return tensor if tensor._base is None else tensor._base


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another, for autograd. Public: none."""
    return tensor._is_view()


def schema_of(operator: Any) -> Any:
    """Return an operator's schema: its arguments, and which of them it writes to. Public: none."""
    return operator._schema


def parts_of(operator: Any) -> Callable[..., Any] | None:
    """Call the operators that a composite one is made of. Public: `decompose`, whose Python parts draw otherwise."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), composite):
        return None
    return partial(operator._op_dk, composite)


def functions_of_lists(without: str) -> list[Callable[..., Any]]:
    """Return torch's functions of lists of tensors, without some: each computes by element. Public: none."""
    prefix = "_foreach_"
    left_out = [prefix + name for name in without.split()]
    return [getattr(torch, name) for name in dir(torch) if name.startswith(prefix) and name not in left_out]


def count_users(tensor: Tensor) -> int:
    """Return how many nodes of a graph and other C++ objects refer to a tensor. Public: none."""
    return int(tensor._use_count()) - 1  # type: ignore[attr-defined]


def count_hooks(tensor: Tensor) -> int:
    """Return how many hooks receive the gradient of a tensor. Public: none."""
    return len(tensor._backward_hooks or ())


def is_dropped(tensor: ReferenceType[Tensor]) -> bool:
    """Return True if nothing but torch's C++ code, as a graph, refers to a tensor any more. Public: none."""
    return _references(tensor) <= _OF_A_GRAPH


def _references(tensor: ReferenceType[Tensor]) -> int:
    known = tensor()
    return 0 if known is None else sys.getrefcount(known)


def _references_of_a_graph() -> int:
    leaf = torch.ones(1, requires_grad=True)
    reference, graph = ref(leaf), leaf.view_as(leaf).grad_fn
    del leaf
    count = _references(reference)
    del graph
    return count


_OF_A_GRAPH = _references_of_a_graph()  # Python's versions count apart


def has_hooks(leaf: Tensor, others: int) -> bool:
    """Return whether a leaf has hooks, but for a number of others before accumulation. Public: none."""
    return count_hooks(leaf) > others or bool(leaf._post_accumulate_grad_hooks)


def run_first(node: Any, place: int) -> None:
    """Let autograd run a node of a graph before all others but those that accumulate. Public: none.

    place: among such nodes; of nodes with one number, autograd's heap runs first any, whatever else it holds.
    """
    node._set_sequence_nr(2**64 - 2 - place)


def hooks_of(tensor: Tensor) -> dict[int, Callable[[Tensor], Any]] | None:
    """Return the hooks that receive the gradient of a tensor, by id. Public: none."""
    return tensor._backward_hooks


def set_hooks(tensor: Tensor, hooks: dict[int, Callable[[Tensor], Any]] | None) -> None:
    """Set the hooks that receive the gradient of a leaf. Public: none."""
    tensor._backward_hooks = hooks


def move_hook_first(tensor: Tensor, key: int) -> None:
    """Let one of the hooks that receive the gradient of a tensor be called before the others. Public: none."""
    hooks: dict[int, Any] = tensor._backward_hooks  # type: ignore[assignment]
    others = {name: hooks.pop(name) for name in list(hooks) if name != key}
    hooks.update(others)  # torch reads the plain dict: `OrderedDict.move_to_end` would change nothing for it


def accumulates_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor that requires a gradient is a leaf that gets one. Public: none.

    A view of a tensor that requires one, made without recording, says that it is a leaf, too.
    """
    if not tensor.is_leaf or tensor._base is None:
        return tensor.is_leaf
    with WithoutTorchFunctions(), torch.enable_grad():
        node: Any = tensor.view_as(tensor).grad_fn
        return node.next_functions[0][0] is not None


def gradient_is_accumulated(leaf: Tensor) -> bool:
    """Return whether the backward pass that is running adds the gradient of a leaf to its `.grad`. Public: none."""
    try:
        return bool(will_execute(get_gradient_edge(leaf).node))
    except RuntimeError:  # it returns the gradient (torch.autograd.grad)
        return False


# In safetensors.torch: describes tensors to be written, also for functions that were imported before. Public: none.
SAFETENSORS_FLATTEN = ("_flatten", "_flatten_as_ptr")


def swap_contents(tensor: Tensor, other: Tensor) -> None:
    """Swap the contents of two tensors. Public: torch.utils.swap_tensors, which refuses tensors with weak references.

    Here weak references go on referring to the objects.
    """
    for name in ("__class__", "__dict__"):
        mine, theirs = getattr(tensor, name), getattr(other, name)
        setattr(tensor, name, theirs)
        setattr(other, name, mine)
    torch._C._swap_tensor_impl(tensor, other)


def outer_saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the active hooks of torch.autograd.graph.saved_tensors_hooks, or None. Public: none."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else (hooks[0], hooks[1])


# --- modules


def parameters_in(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters, to be replaced without checks. Public: setattr, which checks types."""
    return module._parameters


def before_calls(module: nn.Module, function: Callable[[], None]) -> None:
    """Let a module call a function first. Public: register_forward_pre_hook, which modules of TorchScript refuse."""
    module._forward_pre_hooks[-1] = lambda *_: function()


def children_in(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own children without running its class's code; none before __init__. Public: children()."""
    children: dict[str, nn.Module | None] = module.__dict__.get("_modules", {})
    return children


# Attributes in which a module keeps its tensors and children.
TENSORS_AND_CHILDREN = ("_parameters", "_buffers", "_modules")
# The attribute for a compiled module call. Public: none.
COMPILED_CALL = "_compiled_call_impl"


def is_compiled_call(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called. Public: none."""
    return getattr(module, COMPILED_CALL) is not None


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor. Public: isinstance(…, DTensor), which has to import it."""
    return hasattr(tensor, "device_mesh")


def has_own_loading(module: nn.Module) -> bool:
    """Return whether `load_state_dict` does more for this module than copy. Public: none."""
    method = type(module)._load_from_state_dict
    changed = method is not nn.Module._load_from_state_dict and not method.__module__.startswith(
        "torch.nn.modules.batchnorm"
    )
    hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or module._state_dict_hooks
    return bool(changed or hooks)


def has_node_hooks(module: nn.Module) -> bool:
    """Return whether hooks of `register_backward_hook`, on nodes of the graph, apply to this module. Public: none."""
    everywhere = nn.modules.module
    on_all = everywhere._global_backward_hooks and not everywhere._global_is_full_backward_hook
    return bool(on_all or (module._backward_hooks and not module._is_full_backward_hook))


# --- autograd and optimizers


def backward_of(function: type[torch.autograd.Function]) -> type:
    """Return the class of a Function's nodes in the graph. Public: their name."""
    kind: type = function._backward_cls
    return kind


def around_checkpoints(run: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for CHECKPOINT that calls `run(checkpoint, function, args, kwargs)`. Public: none."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], **how: Any) -> Any:
            def unchanged(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                return original(function, args, kwargs, **how)

            return run(unchanged, function, args, kwargs)

        def plain_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return run(original, function, args, kwargs)

        return plain_checkpoint if CHECKPOINT[1] == "checkpoint" else checkpoint

    return make


def set_stepped(optimizer: torch.optim.Optimizer, stepped: bool) -> None:
    """Set whether an optimizer has made a step; schedulers warn if they step before it. Public: none."""
    optimizer._opt_called = stepped  # type: ignore[attr-defined]


# --- loaders


def new_iterator(loader: DataLoader[Any]) -> Any:
    """Return a new iterator of a loader, as `iter(loader)` does without persistent workers. Public: iter(loader)."""
    return loader._get_iterator()


def reset_iterator(iterator: Any, loader: DataLoader[Any]) -> None:
    """Begin another epoch of an iterator with persistent workers. Public: iter(loader)."""
    iterator._reset(loader)


# The attribute in which a loader keeps its iterator. Public: none.
KEPT_ITERATOR = "_iterator"


def loaders_have_workers() -> bool:
    """Return whether any loader has had workers in this process. Public: none."""
    return bool(_loader_deaths._SIGCHLD_handler_set)


# --- process groups


def without_gloo_messages() -> AbstractContextManager[None]:
    """Suppress the messages of torch 2.10's gloo on standard output when it connects. Public: none."""
    return muted() if _GLOO_TELLS else nullcontext()


def make_backend(device_type: str, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return torch's backend of collectives for a type of devices. Public: init_process_group, for its own groups."""
    name = _c10d.get_default_backend_for_device(device_type)
    plugin = _c10d.Backend._plugins.get(name.upper())
    if plugin is None:
        backend = next(vars(_c10d)[key] for key in vars(_c10d) if key.lower() == f"processgroup{name}")
        if device_type == "cpu":
            with without_gloo_messages():
                return backend(store, rank, world_size, timeout)
        options = backend.Options()
        options._timeout = timeout
        return backend(store, rank, world_size, options)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, world_size, timeout)
    options = torch._C._distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, world_size, timeout
    options.group_id, options.global_ranks_in_group = f"duoka {device_type}", list(range(world_size))
    return plugin.creator_fn(options, None)


def start_all_gather(group: Any, out: Tensor, tensor: Tensor) -> Any:
    """Start an all-gather in a group that init_process_group did not make. Public: all_gather_into_tensor."""
    return group._allgather_base(out, tensor)


def start_reduce_scatter(group: Any, out: Tensor, tensor: Tensor) -> Any:
    """Start a reduce-scatter (sum) in such a group. Public: reduce_scatter_tensor."""
    return group._reduce_scatter_base(out, tensor)


def all_groups() -> list[Any]:
    """Return all process groups of this process. Public: none."""
    return list(_c10d._world.pg_map)


def store_of_default_group() -> Any:
    """Return the store of init_process_group. Public: none, unless the script passed one."""
    return _c10d._get_default_store()


def flight_recorders() -> list[Callable[..., bytes]]:
    """Return functions that dump the backends' recorders, if this build has them. Public: files, at a timeout."""
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    recorders = [getattr(torch._C._distributed_c10d, name, None) for name in names]
    return [recorder for recorder in recorders if recorder is not None]


# --- the rest


def save_through(obj: Any, path: Any, reduce: Callable[[Any], Any], storages: dict[str, Any]) -> None:
    """Call `torch.save` without writing tensors' data. Public: none that names storages in the file.

    reduce: as `pickle.Pickler.reducer_override`. storages: filled with the storages by their names in the file.
    `torch.save` derives a class from the Pickler that it is given; its `persistent_id` names storages.
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return reduce(value)

        def __init_subclass__(cls) -> None:
            original: Any = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                known = original(self, value)
                if known is not None:
                    storages[known[2]] = getattr(value, "_untyped_storage", value)
                return known

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    with torch.serialization.skip_data():
        _save(obj, path, pickle_module=SimpleNamespace(Pickler=Pickler, __name__="pickle"))


def allowed_in_pickles() -> Mapping[str, Any]:
    """Return the globals that `torch.load(weights_only=True)` allows. Public: get_safe_globals, only added ones."""
    allowed: Mapping[str, Any] = _weights_only_unpickler._get_allowed_globals()
    return allowed


def built_architectures() -> list[str]:
    """Return the GPU architectures of a CUDA build. Public: torch.cuda.get_arch_list, empty without a GPU."""
    flags: str | None = getattr(torch._C, "_cuda_getArchFlags", str)()
    return (flags or "").split()


def is_in_bad_fork(module: Any) -> bool:
    """Return whether this process was forked from one that had started an accelerator's runtime. Public: none.

    module: torch's, of the accelerator.
    """
    return bool(module._is_in_bad_fork())


def device_index_functions(module: Any) -> list[tuple[Any, str]]:
    """Return what maps a device, an integer or None to a number in all functions of an accelerator. Public: none."""
    spaces = (module, getattr(module, "memory", None), getattr(module, "utils", None))
    name = "_get_device_index"
    return [(space, name) for space in (*spaces, torch.accelerator, torch.accelerator.memory) if hasattr(space, name)]


@cache
def has_kernel(operator: Any, device_type: str) -> bool:
    """Return whether an operator has a kernel for a type of devices. Public: none."""
    has: bool = operator.has_kernel_for_dispatch_key(
        torch._C._parse_dispatch_key(torch._C._dispatch_key_for_device(device_type))
    )
    return has


# The argument of torch.jit.script for the frame in which it looks up names. Public: none.
FRAMES_UP = "_frames_up"


def import_compiler() -> None:
    """Import the compiler, which the first optimizer of a process imports. Public: `import torch.compiler`, lazy."""
    import torch._dynamo  # noqa: F401


def is_compiler_imported() -> bool:
    """Return whether the compiler is imported, so that code may have been compiled. Public: none."""
    return "torch._dynamo" in sys.modules


def count_compilations() -> int:
    """Return how many graphs were compiled in this process. Public: none."""
    if not is_compiler_imported():
        return 0
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def count_graph_breaks() -> int:
    """Return how many graph breaks there were in this process. Public: torch._dynamo.explain, which runs the code."""
    if not is_compiler_imported():
        return 0
    import torch._dynamo.utils

    return sum(torch._dynamo.utils.counters["graph_break"].values())


def in_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active. Public: none."""
    return _forward_ad._current_level >= 0


def implementation_of(tensor: Tensor) -> int:
    """Return the address of a tensor's implementation. Public: none."""
    address: int = tensor._cdata
    return address


_EXPORTED = ("get_dim", "get_sizes", "get_strides", "get_dtype", "get_layout", "get_device_type", "get_device_index")


def exported_functions() -> dict[str, int] | None:
    """Return the addresses of functions that torch exports to C (`shim.h`); None without. Public: none."""
    try:
        library = ctypes.CDLL(torch._C.__file__, os.RTLD_NOW | os.RTLD_NOLOAD)  # and the libraries that it needs
        addresses = {name: ctypes.cast(library[f"aoti_torch_{name}"], ctypes.c_void_p).value for name in _EXPORTED}
    except (OSError, AttributeError):
        return None
    return {name: address for name, address in addresses.items() if address}


def _names_in(code: CodeType) -> set[str]:
    inner = (nested for nested in code.co_consts if isinstance(nested, CodeType))
    return {*code.co_names, *(name for nested in inner for name in _names_in(nested))}


def _try() -> None:
    """Access every private attribute of an object once."""
    module, tensor = nn.PReLU(), torch.zeros(1)  # whose parameter is not drawn: the script may have seeded torch
    (
        negative_of(tensor),
        is_immutable_zero(tensor),
        version_of(tensor),
        memory_of(tensor),
        count_references(tensor),
        is_view(tensor),
        count_users(tensor),
        count_hooks(tensor),
        has_hooks(tensor, 0),
        outer_saved_tensors_hooks(),
        schema_of(torch.ops.aten.add.Tensor),
        parts_of(torch.ops.aten.dropout.default),
    )
    (
        parameters_in(module),
        has_node_hooks(module),
        is_compiled_call(module),
        in_forward_mode(),
    )
    swap_contents(tensor, torch.zeros(1))
    has_own_loading(module), loaders_have_workers(), all_groups(), getattr(*TAKE_DOWN), getattr(*GROUP_ALIKE)
    [getattr(*single) for single in SINGLE_STEPS]
    for caller, called in (
        (DataLoader.__iter__, GET_ITERATOR),
        (rnn.pad_packed_sequence, PAD_PACKED),
        (rnn.pack_padded_sequence, (torch, PACK)),
        (_checkpoint.checkpoint, CHECKPOINT),
        (_loader_deaths._set_SIGCHLD_handler, LOADER_DEATHS),
    ):
        getattr(*called)
        name = called[1]
        if name != caller.__name__ and name not in _names_in(inspect.unwrap(caller).__code__):
            raise AttributeError(f"{caller.__qualname__} does not call {name}")
    for name in TENSORS_AND_CHILDREN:
        module.__dict__[name]
    inspect.signature(torch.jit.script).parameters[FRAMES_UP]


with requiring("torch", torch.__version__):
    _try()
