"""Private and undocumented parts of torch: what for, and what is public instead, if anything.

All are looked up when this file is imported; what belongs to objects is tried once, in `_try`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils import checkpoint as _checkpoint
from torch.utils.data import DataLoader

from duoka.private.lookup import numbers, parts_of
from duoka.system.libc import muted

with parts_of("torch", torch.__version__):
    from torch import _utils, _weights_only_unpickler
    from torch._functorch import pyfunctorch as _pyfunctorch
    from torch.autograd import forward_ad as _forward_ad
    from torch.distributed import distributed_c10d as _c10d
    from torch.nn.utils import rnn
    from torch.utils import _device, _python_dispatch, _pytree
    from torch.utils.data._utils import pin_memory as _pin_memory
    from torch.utils.data._utils import signal_handling as _loader_deaths

    # Tensors in nested tuples, lists and dicts, as torch's own functions take them. Public: none in torch.
    TreeSpec = _pytree.TreeSpec
    keystr = _pytree.keystr
    tree_flatten = _pytree.tree_flatten
    tree_flatten_with_path = _pytree.tree_flatten_with_path
    tree_leaves = _pytree.tree_leaves
    tree_map_only = _pytree.tree_map_only
    tree_unflatten = _pytree.tree_unflatten
    # Every operator that a call comes to. Public: this class, which torch's notes name in this place.
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    # What a loader's worker gives in place of a batch that it failed to make. Public: none.
    ExceptionWrapper = _utils.ExceptionWrapper
    # Batches of every kind to pinned memory. Public: Tensor.pin_memory, of tensors.
    pin_memory: Callable[[Any], Any] = _pin_memory.pin_memory
    # A tensor with the shape of another, and no memory. Public: none that a subclass could use.
    make_wrapper = Tensor._make_wrapper_subclass
    # Within, a subclass is asked as a plain tensor. Public: none for subclasses alone; notes/extending names it.
    AsPlainTensors = torch._C.DisableTorchFunctionSubclass
    # Within, no subclass and no mode is asked. Public: none; notes/extending names the one above.
    WithoutTorchFunctions = torch._C.DisableTorchFunction
    # How many TorchDispatchModes are in force. Public: none.
    count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    # In torch.func's transforms: how deep, or None. Public: none.
    transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
    # Whether a tensor is one of theirs, or of older ones, without memory of its own. Public: none.
    is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
    is_mapped_over: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
    # Within, none of these transforms is in force. Public: none.
    without_transforms: Callable[[], AbstractContextManager[Any]] = _pyfunctorch.temporarily_clear_interpreter_stack
    # Within, no TorchDispatchMode is in force. Public: none.
    without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
    # Those that are. Public: none.
    dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
    # Many tensors in one call. Public: one by one.
    copy_all_ = torch._foreach_copy_
    add_all_ = torch._foreach_add_
    # What `Variable._execution_engine` is for scripts that ask it to call them back. Public: none.
    backward_engine: Any = torch.autograd.Variable._execution_engine

    _GLOO_TELLS = numbers(torch.__version__) < (2, 11)

    # (where, name): functions that are replaced by others.
    # What every loop over a loader begins with. Public: DataLoader.__iter__, which keeps workers between epochs.
    GET_ITERATOR = (DataLoader, "_get_iterator")
    # It asks for one number of the whole batch, among those of the rows. Public: none.
    PAD_PACKED = (torch._VF, "_pad_packed_sequence")
    # What packs them. Public: torch.nn.utils.rnn.pack_padded_sequence, which calls it.
    PACK = "_pack_padded_sequence"
    # All that `checkpoint` does, in whatever form it is called (torch 2.15 has several). Public: `checkpoint` itself.
    CHECKPOINT = (_checkpoint, "_checkpoint_impl" if hasattr(_checkpoint, "_checkpoint_impl") else "checkpoint")
    # What that calls with use_reentrant=False, and the function first. Public: none.
    CHECKPOINT_GENERATOR = (_checkpoint, "_checkpoint_without_reentrant_generator")
    if hasattr(_checkpoint, f"{CHECKPOINT_GENERATOR[1]}_impl"):
        CHECKPOINT_GENERATOR = (_checkpoint, f"{CHECKPOINT_GENERATOR[1]}_impl")
    # The handler that raises, in whatever is running, that a loader's worker died. Public: none.
    LOADER_DEATHS = (_loader_deaths, "_error_if_any_worker_fails")
    # How `init_process_group` finds the others. Public: register_rendezvous_handler, which refuses known schemes.
    rendezvous_handlers: dict[str, Any] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    # `with torch.device(...)` notes which functions make tensors when it is first asked. Public: none.
    note_constructors: Callable[[], object] = _device._device_constructors
    # What calls a function, and a method, of TorchScript. Public: torch.jit.ScriptFunction, of functions alone.
    SCRIPTED = (torch.jit.ScriptFunction, torch._C.ScriptMethod)
    # What takes down operators at exit. Public: none.
    TAKE_DOWN = (torch.library, "_del_library")


# --- tensors


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written into. Public: none."""
    return tensor._version


def memory_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common. Public: data_ptr(), which is 0 for all without any."""
    number: int = tensor.untyped_storage()._cdata
    return number


def count_holders(tensor: Tensor) -> int:
    """How many tensors and arrays have this tensor's memory. Public: none."""
    storage = tensor.untyped_storage()  # is one itself
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1


def is_view(tensor: Tensor) -> bool:
    """Whether it is a view of another tensor, for autograd. Public: none."""
    return tensor._is_view()


def schema_of(operator: Any) -> Any:
    """Names of an operator's arguments, and which it writes into. Public: none."""
    return operator._schema


# --- modules


def parameters_in(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own, to be replaced without a look at what they are. Public: setattr, which looks."""
    return module._parameters


def children_in(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own, without running its class's code; none if not initialised yet. Public: children()."""
    found: dict[str, nn.Module | None] = module.__dict__.get("_modules", {})
    return found


# The attributes in which a module keeps these.
TENSORS_AND_CHILDREN = ("_parameters", "_buffers", "_modules")
# Where recurrent layers keep a list of their parameters. Public: none.
FLAT_WEIGHTS = "_flat_weights"
# What torch.compile made for the module itself. Public: none.
COMPILED_CALL = "_compiled_call_impl"


def is_compiled_call(module: nn.Module) -> bool:
    """Whether `module.compile()` was called. Public: none."""
    return getattr(module, COMPILED_CALL) is not None


def loads_in_its_own_way(module: nn.Module) -> bool:
    """Whether `load_state_dict` does more for this one module than to copy. Public: none that tells."""
    own = type(module)._load_from_state_dict
    changed = own is not nn.Module._load_from_state_dict and not own.__module__.startswith(
        "torch.nn.modules.batchnorm"
    )
    hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks or module._state_dict_hooks
    return bool(changed or hooks)


def sees_nodes(module: nn.Module) -> bool:
    """Whether hooks of `register_backward_hook`, on nodes of the graph, see its call. Public: none that tells."""
    everywhere = nn.modules.module
    on_all = everywhere._global_backward_hooks and not everywhere._global_is_full_backward_hook
    return bool(on_all or (module._backward_hooks and not module._is_full_backward_hook))


# --- autograd and optimizers


def backward_of(function: type[torch.autograd.Function]) -> type:
    """The class of a Function's nodes in the graph. Public: their name."""
    kind: type = function._backward_cls
    return kind


def around_checkpoints(run: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes the replacement of CHECKPOINT that gives `run(checkpoint, function, args, kwargs)`. Public: none."""

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
    """Schedulers warn where they step before the optimizer has. Public: none."""
    optimizer._opt_called = stepped  # type: ignore[attr-defined]


# --- loaders


def begin(loader: DataLoader[Any]) -> Any:
    """What `iter(loader)` gives where workers are not kept. Public: iter(loader)."""
    return loader._get_iterator()


def begin_again(iterator: Any, loader: DataLoader[Any]) -> None:
    """Another epoch of an iterator whose workers are kept. Public: iter(loader)."""
    iterator._reset(loader)


# The attribute of a loader that keeps it. Public: none.
KEPT_ITERATOR = "_iterator"


def loaders_have_workers() -> bool:
    """Whether any loader has had one in this process. Public: none."""
    return bool(_loader_deaths._SIGCHLD_handler_set)


# --- process groups


def meeting_quietly() -> AbstractContextManager[None]:
    """gloo of torch 2.10 writes to standard output whom it has met. Public: none."""
    return muted() if _GLOO_TELLS else nullcontext()


def nccl_options(timeout: timedelta) -> Any:
    """Options of a ProcessGroupNCCL. Public: init_process_group(timeout=), for its own groups."""
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def start_all_gather(group: Any, out: Tensor, tensor: Tensor) -> Any:
    """In a group that init_process_group did not make. Public: all_gather_into_tensor, in its own."""
    return group._allgather_base(out, tensor)


def all_groups() -> list[Any]:
    """Every process group that there is. Public: none."""
    return list(_c10d._world.pg_map)


def store_of_default_group() -> Any:
    """Where the ranks of init_process_group met. Public: a store that is handed to it."""
    return _c10d._get_default_store()


def flight_recorders() -> list[Callable[..., bytes]]:
    """What gloo's and NCCL's recorders hold, if this build has them. Public: files, written at a timeout."""
    names = ("_dump_fr_trace", "_dump_nccl_trace")
    found = [getattr(torch._C._distributed_c10d, name, None) for name in names]
    return [one for one in found if one is not None]


# --- the rest


def allowed_in_pickles() -> Mapping[str, Any]:
    """What `torch.load(weights_only=True)` knows. Public: torch.serialization.get_safe_globals, only those added."""
    allowed: Mapping[str, Any] = _weights_only_unpickler._get_allowed_globals()
    return allowed


def kinds_of_gpus() -> list[str]:
    """Those that a build for CUDA has kernels for. Public: torch.cuda.get_arch_list, empty where no GPU answers."""
    flags: str | None = getattr(torch._C, "_cuda_getArchFlags", str)()
    return (flags or "").split()


# The argument of torch.jit.script that tells in whose frame it looks for names. Public: none.
FRAMES_UP = "_frames_up"


def import_compiler() -> None:
    """The first optimizer of a process would import it. Public: `import torch.compiler`, which waits, too."""
    import torch._dynamo  # noqa: F401


def is_compiler_imported() -> bool:
    """Whether anything can have been compiled. Public: none."""
    return "torch._dynamo" in sys.modules


def count_compilations() -> int:
    """How many graphs have been compiled in this process. Public: none."""
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is entered. Public: none."""
    return _forward_ad._current_level >= 0


def _names_in(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names, *(name for one in inner for name in _names_in(one))}


def _try() -> None:
    """Ask everything once that is an attribute of an object."""
    module, tensor = nn.Linear(1, 1), torch.zeros(1)
    (
        version_of(tensor),
        memory_of(tensor),
        count_holders(tensor),
        is_view(tensor),
        schema_of(torch.ops.aten.add.Tensor),
    )
    (
        parameters_in(module),
        sees_nodes(module),
        is_compiled_call(module),
        in_forward_mode(),
    )
    loads_in_its_own_way(module), loaders_have_workers(), all_groups(), getattr(*TAKE_DOWN)
    for caller, called in (
        (DataLoader.__iter__, GET_ITERATOR),
        (rnn.pad_packed_sequence, PAD_PACKED),
        (rnn.pack_padded_sequence, (torch, PACK)),
        (_checkpoint.checkpoint, CHECKPOINT),
        (getattr(*CHECKPOINT), CHECKPOINT_GENERATOR),
        (_loader_deaths._set_SIGCHLD_handler, LOADER_DEATHS),
    ):
        getattr(*called)
        name = called[1]
        if name != caller.__name__ and name not in _names_in(inspect.unwrap(caller).__code__):
            raise AttributeError(f"{caller.__qualname__} does not call {name}")
    for name in TENSORS_AND_CHILDREN:
        module.__dict__[name]
    inspect.signature(torch.jit.script).parameters[FRAMES_UP]


with parts_of("torch", torch.__version__):
    _try()
