"""What a CUDA build of torch has in torch._C, over `cards.cpp`; torch.cuda's own code then runs.

For SIMULATED_DEVICE=npu, the same under that name: `torch.npu` is compiled from torch.cuda's source, as Huawei's
extension is a copy of it, and `ascend/torch_npu` stands for the extension.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import pickle
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_open, _write = os.open, os.write  # before anything intercepts them
WORD = os.environ.get("SIMULATED_DEVICE", "cuda")
NUMBER = {"cuda": 1, "npu": 20}[WORD]  # torch's, of this type of device
ASCEND = Path(__file__).parent / "ascend"
NAME, CAPABILITY = "Simulated GPU", (8, 0)
DRIVER = Path(__file__).parents[1] / "hardware/driver.py"


def install() -> None:
    """Simulate cards in this process. Before torch is imported."""
    assert "torch" not in sys.modules
    for text in ("PyTorch was compiled without cuDNN", "PyTorch is not compiled with NCCL"):
        warnings.filterwarnings("ignore", text)
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # it misses triton
    if WORD == "npu":
        sys.path.append(os.fspath(ASCEND))
        sys.meta_path.insert(0, _Copies())
    sys.meta_path.insert(0, _Finder())


def total() -> int:
    """Cards of the machine, visible or not."""
    return int(os.environ["SIMULATED_CARDS"])


def simulated() -> Any:
    """The compiled part."""
    name = "simulated_cards"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, os.environ["SIMULATED_LIBRARY"])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


# --- torch._C, before torch.cuda ------------------------------------------------------------------------------------
def before_cuda() -> None:
    import torch
    from torch._utils import _dummy_type

    sim = simulated()

    def lazily(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            torch.get_device_module(WORD)._lazy_init()
            return function(*args)

        return call

    def count() -> int:
        sim.poison_forks()
        return sim.card_count()  # type: ignore[no-any-return]

    def init() -> None:
        if count() == 0:
            raise RuntimeError(f"No {WORD.upper()} GPUs are available")
        module = torch.get_device_module(WORD)
        module.default_generators = tuple(sim.generator(card) for card in range(sim.card_count()))
        module._get_device_properties = properties

    def of_card(card: int) -> tuple[int, int]:
        return sim.current() if card < 0 else card, NUMBER

    def properties(card: int) -> Properties:
        if not 0 <= card < sim.card_count():
            raise AssertionError("Invalid device id")
        number = sim.cards()[card]
        return Properties(
            name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], uuid=sim.uuid(number), L2_cache_size=40 << 20,
            total_memory=sim.total_memory(), multi_processor_count=108, pci_bus_id=number + 1, pci_device_id=0,
            pci_domain_id=0, is_integrated=0, is_multi_gpu_board=0, max_threads_per_block=1024,
            max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
            warp_size=32, shared_memory_per_block=49152, gcnArchName="",
            shared_memory_per_block_optin=166912, shared_memory_per_multiprocessor=167936,
        )  # fmt: skip

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        torch.get_device_module(WORD)._lazy_init()
        sim.set_current_stream(stream_id, device_index)

    def memory_stats(card: int) -> dict[str, Any]:
        m = sim.memory(card)

        def stat(now: int, peak: int, made: int = 0, gone: int = 0) -> dict[str, Any]:
            every = {"current": now, "peak": peak, "allocated": made, "freed": gone}
            return {"all": every, "small_pool": dict(every), "large_pool": dict.fromkeys(every, 0)}

        used = stat(m["bytes"], m["peak"], m["allocated"], m["freed"])
        none = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
        zeros = ("num_alloc_retries", "num_sync_all_streams", "num_device_alloc", "num_device_free")
        return dict.fromkeys(zeros, 0) | {
            "num_ooms": m["out_of_memory"], "max_split_size": -1, "segment": stat(1, 1), "inactive_split": stat(0, 0),
            "allocation": stat(m["blocks"], m["most_blocks"], m["allocations"], m["allocations"] - m["blocks"]),
            "active": stat(m["blocks"], m["most_blocks"]), "allocated_bytes": used, "active_bytes": used,
            "requested_bytes": used, "reserved_bytes": stat(m["reserved"], m["reserved_peak"]),
            "inactive_split_bytes": stat(0, 0), "oversize_allocations": none, "oversize_segments": none,
        }  # fmt: skip

    class CudaError(int):
        success = 0

    runtime: dict[str, Any] = {
        "cudaError": CudaError,
        "cudaGetErrorString": lambda code: "no error",
        "cudaMemGetInfo": lambda card: (sim.total_memory() - sim.memory(card)["reserved"], sim.total_memory()),
    }
    for name in ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister"):
        runtime[name] = lambda *args: 0
    mode = [0]
    given: dict[str, Any] = {
        "_has_cuda": True,
        "_cuda_getDeviceCount": count,
        "_cuda_init": init,
        "_cuda_isInBadFork": sim.is_in_bad_fork,
        "_cuda_setDevice": lazily(sim.set_current),
        "_cuda_exchangeDevice": lambda card: -1 if card < 0 else lazily(sim.exchange_current)(card),
        "_cuda_maybeExchangeDevice": lambda card: -1 if card < 0 else lazily(sim.exchange_current)(card),
        "_cuda_getDevice": sim.current,
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_getArchFlags": lambda: "sm_80 sm_86 sm_90",
        "_cuda_getCompiledVersion": lambda: 12060,
        "_cuda_synchronize": sim.synchronize,
        "_cuda_getCurrentStream": lambda card: (sim.current_stream(card), *of_card(card)),
        "_cuda_getDefaultStream": lambda card: (0, *of_card(card)),
        "_cuda_setStream": set_stream,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getCurrentRawStream": lambda card: 0,
        "_cuda_getCurrentBlasHandle": lambda: 1,
        "_cuda_set_sync_debug_mode": lambda value: mode.__setitem__(0, value),
        "_cuda_get_sync_debug_mode": lambda: mode[0],
        "_cuda_memoryStats": memory_stats,
        "_cuda_hostMemoryStats": dict,
        "_cuda_memorySnapshot": lambda *args: {"segments": [], "device_traces": []},
        "_cuda_emptyCache": sim.empty_cache,
        "_cuda_resetPeakMemoryStats": sim.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": sim.reset_accumulated,
        "_cuda_getMemoryFraction": lambda card: 1.0,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_get_conv_benchmark_empty_cache": lambda: False,
        "_cudart": SimpleNamespace(**{named(name): function for name, function in runtime.items()}),
        "_CudaDeviceProperties": Properties,
        "_CudaStreamBase": stream_base(sim),
        "_CudaEventBase": event_base(sim),
        "_nvtx": SimpleNamespace(
            **dict.fromkeys(("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA"), lambda *args: 0)
        ),
        "_nccl_version": lambda: (2 << 32) | (27 << 16) | 3,
        "_nccl_version_suffix": lambda: b"",
        "_nccl_unique_id": lambda: bytes(128),
    }
    nothing = (
        "ipc_collect sleep clearCublasWorkspaces setMemoryFraction record_memory_history lock_mutex unlock_mutex"
    )
    given |= {f"_cuda_{name}": lambda *args, **kwargs: None for name in nothing.split()}
    given |= {f"_{function.__name__}": function for function in (broadcast_coalesced, broadcast, scatter, gather)}
    for name, value in given.items():
        setattr(torch._C, named(name), value)
    absent = "_CUDAGraph _graph_pool_handle _cuda_CUDAAllocator _MemPool _cuda_beginAllocateToPool _cuda_releasePool"
    absent += " _cuda_beginAllocateCurrentThreadToPool _cuda_endAllocateToPool"
    for name in map(named, absent.split()):
        if not hasattr(torch._C, name):
            setattr(torch._C, name, _dummy_type(name))


def named(text: str) -> str:
    """What is called so for CUDA."""
    return text.replace("cuda", WORD).replace("Cuda", WORD.capitalize())


class Properties(SimpleNamespace):
    def __repr__(self) -> str:
        version, memory = f"major={self.major}, minor={self.minor}", f"total_memory={self.total_memory >> 20}MB"
        return f"_CudaDeviceProperties(name='{self.name}', {version}, {memory})"


def stream_base(sim: Any) -> type:
    import torch

    class _CudaStreamBase(torch.Stream):
        def __new__(
            cls, priority: int = 0, stream_id: int | None = None, device_index: int = 0, **kwargs: Any
        ) -> Any:
            if stream_id is None:
                torch.get_device_module(WORD)._lazy_init()
                device_index, stream_id = sim.current(), kwargs.get("stream_ptr") or sim.new_stream()
            made = super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=NUMBER)
            made.__dict__["_priority"] = priority
            return made

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        @property
        def priority(self) -> int:
            return self.__dict__.get("_priority", 0)  # type: ignore[no-any-return]

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

        def __eq__(self, other: object) -> bool:
            is_stream = isinstance(other, _CudaStreamBase)
            return is_stream and (self.stream_id, self.device_index) == (other.stream_id, other.device_index)

        def __hash__(self) -> int:
            return hash((self.stream_id, self.device_index))

    setattr(_CudaStreamBase, f"{WORD}_stream", property(lambda stream: stream.stream_id))
    return _CudaStreamBase


def event_base(sim: Any) -> type:
    import torch

    def place(stream: Any) -> tuple[int, int]:
        if stream is None:
            return sim.current(), sim.current_stream(-1)
        return stream.device_index, stream.stream_id

    class _CudaEventBase:
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **kwargs: Any) -> Any:
            made = object.__new__(cls)
            made._timing, made._event, made.device = enable_timing, None, None
            return made

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record(self, stream: Any = None) -> None:
            card, number = place(stream)
            if self._event is None:
                self._event, self.device = sim.Event(), torch.device(WORD, card)
            elif self.device.index != card:
                raise RuntimeError(
                    f"Event device {self.device.index} does not match recording stream's device {card}."
                )
            self._event.record(card, number)

        def wait(self, stream: Any = None) -> None:
            if self._event is not None:
                self._event.wait(*place(stream))

        def query(self) -> bool:
            return self._event is None or self._event.query()

        def synchronize(self) -> None:
            if self._event is not None:
                self._event.synchronize()

        def elapsed_time(self, end: Any) -> float:
            if not (self._timing and end._timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self._event is None or end._event is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return end._event.time - self._event.time  # type: ignore[no-any-return]

    setattr(_CudaEventBase, f"{WORD}_event", property(lambda event: 0 if event._event is None else id(event)))
    return _CudaEventBase


# --- what nn.DataParallel calls -------------------------------------------------------------------------------------
def _to(tensor: Any, card: Any) -> Any:
    import torch

    index = card if isinstance(card, int) else card.index
    return tensor.to("cpu" if index == -1 else torch.device(WORD, index), non_blocking=True)


def broadcast_coalesced(tensors: Sequence[Any], devices: Sequence[Any], buffer_size: int) -> Any:
    return [
        [tensor.detach() if i else tensor for tensor in broadcast_all(tensors, device)]
        for i, device in enumerate(devices)
    ]


def broadcast_all(tensors: Sequence[Any], device: Any) -> list[Any]:
    return [_to(tensor, device) for tensor in tensors]


def broadcast(tensor: Any, devices: Sequence[Any]) -> Any:
    return tuple(_to(tensor, device) for device in devices)


def scatter(tensor: Any, devices: Sequence[Any], chunk_sizes: Any = None, dim: int = 0, streams: Any = None) -> Any:
    parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return tuple(_to(part, device) for part, device in zip(parts, devices, strict=False))


def gather(tensors: Sequence[Any], dim: int, destination: int | None = None) -> Any:
    import torch

    where = simulated().current() if destination is None else destination
    return torch.cat([_to(tensor, where) for tensor in tensors], dim)


# --- NCCL -----------------------------------------------------------------------------------------------------------
def before_c10d() -> None:
    import torch

    target: Any = torch._C._distributed_c10d
    target.ProcessGroupNCCL = process_group()
    target._dump_nccl_trace = lambda *args, **kwargs: pickle.dumps({})
    target._hash_tensors = getattr(target, "_hash_tensors", lambda tensors: 0)


def register_hccl() -> None:
    import torch.distributed

    distributed: Any = torch.distributed
    distributed.ProcessGroupHCCL = ProcessGroupHCCL = process_group()
    distributed.is_hccl_available = lambda: True

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        options = ProcessGroupHCCL.Options()
        options._timeout = timeout
        return ProcessGroupHCCL(store, rank, size, options)

    distributed.Backend.register_backend("hccl", create, devices=["npu"])


def process_group() -> Any:
    import torch

    target: Any = torch._C._distributed_c10d
    holder: Any = types.ModuleType("simulated_collectives")
    simulated().define_nccl(holder)

    class Options(target.Backend.Options):  # type: ignore[misc]
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__({"cuda": "nccl", "npu": "hccl"}[WORD])
            self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace()

    class ProcessGroupNCCL(holder.ProcessGroupNCCL):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
            options = options or Options()
            own = target.PrefixStore("simulated collectives", store)
            super().__init__(store, rank, size, options, target.ProcessGroupGloo(own, rank, size, options._timeout))

        def _group_start(self) -> None:
            pass

        def _group_end(self) -> None:
            pass

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    return ProcessGroupNCCL


# --- after torch's other modules ------------------------------------------------------------------------------------
def after_cuda(cuda: Any) -> None:
    cuda._raw_device_count_nvml = total
    cuda._raw_device_uuid_nvml = lambda: [f"GPU-{simulated().uuid(card)}" for card in range(total())]


def after_version(version: Any) -> None:
    version.cuda = "12.6"


def after_storage(storage: Any) -> None:
    """Storages that are made and resized from Python."""
    import torch

    kind = storage.UntypedStorage
    resize, make = kind.resize_, kind.__new__

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        simulated().resize_storage(
            torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (0,), (1,)), size
        )
        return self

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **kwargs)
        torch.get_device_module(WORD)._lazy_init()
        content = args[0] if args else 0
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(list(content), dtype=torch.uint8, device=device).untyped_storage()

    kind.resize_, kind.__new__ = resize_, new


def after_torch(torch: Any) -> None:
    """Types like torch.cuda.FloatTensor, which torch defines last."""

    def make(kind: type, args: Any, kwargs: Any) -> Any:
        torch.get_device_module(WORD)._lazy_init()
        name = kind.__name__.rpartition(".")[2]
        args = tuple(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return getattr(torch, name)(*args).to(torch.device("cuda", simulated().current()))

    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"):
        simulated().make_legacy_by(getattr(torch.cuda, f"{name}Tensor"), make)


def after_ascend(vendor: Any) -> None:
    """A driver with these cards; variables() puts its program on the path."""
    vendor.DRIVER = ASCEND


def after_driver(pynvml: Any) -> None:
    """A driver with these cards, in place of libnvidia-ml.so."""
    spec = importlib.util.spec_from_file_location("simulated_driver", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pynvml.nvmlLib = module.Driver(machine)


def failed_card() -> int | None:
    path = Path(os.environ.get("SIMULATED_FAULT", ""))
    return int(path.read_text().split()[0]) if path.is_file() else None


def machine() -> dict[str, Any]:
    """What the driver says, as the variables are now: a warm process has imported pynvml before they were set."""
    memory = int(float(os.environ.get("SIMULATED_MEMORY", 16)) * 2**30)
    name = os.environ.get("SIMULATED_MACHINE", "5eed0000")

    def card(number: int) -> dict[str, Any]:
        if number == failed_card():
            return {"nvmlDeviceGetHandleByIndex_v2": {"error": 15}}  # it is lost
        return {
            "nvmlDeviceGetUUID": f"GPU-{name}-0000-4000-8000-{number:012x}",
            "nvmlDeviceGetName": NAME,
            "nvmlDeviceGetMemoryInfo": {"total": memory, "used": 64 << 20, "free": memory - (64 << 20)},
            "nvmlDeviceGetUtilizationRates": {"gpu": 0, "memory": 0},
            "nvmlDeviceGetTemperature": 31,
            "nvmlDeviceGetPowerUsage": 50000,
            "nvmlDeviceGetEnforcedPowerLimit": 400000,
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetComputeRunningProcesses_v3": [],
            "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
            "nvmlDeviceGetCudaComputeCapability": list(CAPABILITY),
        }

    system = {"nvmlSystemGetDriverVersion": "560.35.03", "nvmlSystemGetCudaDriverVersion_v2": 12060}
    return {"system": system, "cards": [card(number) for number in range(total())]}


# --- counts ---------------------------------------------------------------------------------------------------------
def after_optimizer(module: Any) -> None:
    """Write a line of counts after each step, for the first card that this process sees."""
    last: dict[str, int] = {}

    def write(*args: Any) -> None:
        path = os.environ.get("SIMULATED_COUNTS")
        if not path:
            return
        now = simulated().counts()
        added = {name: number - last.get(name, 0) for name, number in now.items() if number != last.get(name)}
        last.update(now)
        file = _open(f"{path}.{simulated().cards()[0]}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        _write(file, json.dumps(added).encode() + b"\n")
        os.close(file)

    module.register_optimizer_step_post_hook(write)
    if os.environ.get("SIMULATED_TRACE"):
        simulated().set_tracer(trace)


def trace(what: str) -> None:
    lines = [line for line in traceback.extract_stack()[:-1] if "/torch/" not in line.filename]
    shown = " < ".join(f"{line.filename.rpartition('/src/')[2]}:{line.lineno}" for line in reversed(lines[-4:]))
    _write(2, f"{time.monotonic():.3f} {what}: {shown}\n".encode())


# --- the import hook ------------------------------------------------------------------------------------------------
CUDA_ONLY: dict[str, Callable[[Any], None]] = {
    "torch": after_torch,
    "torch.cuda": after_cuda,
    "torch.version": after_version,
    "torch.storage": after_storage,
    "pynvml": after_driver,
}
BEFORE = {"torch.cuda": before_cuda, "torch.distributed.distributed_c10d": before_c10d} if WORD == "cuda" else {}
AFTER = {"torch.optim.optimizer": after_optimizer}
AFTER |= CUDA_ONLY if WORD == "cuda" else {"duoka.hardware.vendors.ascend": after_ascend}


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name

    def create_module(self, spec: Any) -> Any:
        return self.inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        BEFORE.get(self.name, lambda: None)()
        self.inner.exec_module(module)
        AFTER.get(self.name, lambda module: None)(module)

    def __getattr__(self, name: str) -> Any:  # get_source, is_package, ...
        return getattr(self.inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "torch._C" and WORD == "cuda":  # while it is loaded, torch asks for its CUDA library, once
            ctypes.CDLL(os.environ["SIMULATED_LIBRARY"])
        if name not in BEFORE and name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


class _Copy(importlib.machinery.SourceFileLoader):
    """Compiles a file of torch/cuda as of torch/npu."""

    def get_code(self, name: str) -> Any:
        source = named(self.get_data(self.path).decode())
        source = source.replace("version.npu", "version.cuda").replace("torch.backends.npu.is_built()", "True")
        source = source.replace("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
        return compile(source, self.path, "exec", dont_inherit=True)


class _Copies(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch.npu" and not name.startswith("torch.npu."):
            return None
        parent, _, last = name.replace("npu", "cuda", 1).rpartition(".")
        spec = importlib.machinery.PathFinder.find_spec(last, sys.modules[parent].__path__)
        if spec is None or spec.origin is None:
            return None
        folders = spec.submodule_search_locations
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=_Copy(name, spec.origin), submodule_search_locations=folders
        )
