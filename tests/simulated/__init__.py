"""Simulated cards: torch's CUDA on a machine without GPUs, over the CPU's memory; and the same as another vendor's.

A process with SIMULATED_CARDS=2 and `tests/simulated/site` in PYTHONPATH has two cards. torch.cuda's own Python runs
over functions of torch._C that `cards.py` defines; an operator runs the CPU's kernel over the same memory
(`operators.hpp`); NCCL is gloo (`nccl.hpp`); the driver is the fake of `tests/hardware/driver.py`. By hand:

    .venv/bin/python -m tests.simulated duoka run --devices 0,1 train.py
    .venv/bin/python -m tests.simulated python train.py

| variable | |
|---|---|
| SIMULATED_CARDS=2 | how many cards; without it nothing is simulated |
| SIMULATED_DEVICE=npu | Ascend's cards, which torch gets from an extension, with HCCL; cuda if not set |
| SIMULATED_MEMORY=16 | GiB of each card, as one process sees it; beyond it CUDA is out of memory |
| SIMULATED_MACHINE=5eed0000 | eight digits with which the UUIDs of its cards begin: runs on two do not share locks |
| SIMULATED_FAULT=path | a file that a test writes: a card's number, and the error of all its calls from then on |
| SIMULATED_COUNTS=path | after each optimizer step, a line of JSON with counts since the last in `path.CARD` |
| SIMULATED_TRACE=1 | on standard error, the lines of Python that let the host wait, or call a collective |
| CUDA_VISIBLE_DEVICES (ASCEND_RT_), CUDA_LAUNCH_BLOCKING | as CUDA reads them |

Counts: `sync.*` and `*.blocking` let the host wait for a card; `copy.*`, `nccl.*`, `kernels`, `events`, `waits`,
`pinned` and `record_stream` do not. `copy.beside` are copies to and from the host in other streams than the default.

As on real cards: tensors of two devices do not mix; a fork after `torch.cuda.is_available()` has no CUDA; an index
out of range is an assert of the card, which a later call reports; generators are each card's own. Stricter than
real cards, which are right by chance: work that reads or writes memory without waiting for the stream that writes
or reads it is an error ("simulated race"), and a copy to pinned memory arrives when the host has waited for it, not
before.

What this cannot show: speed and overlap; real NCCL (deadlocks between communicators, time limits, its memory);
kernels' own rounding, TF32, fused attention and cuDNN (torch's other paths run instead); memory of kernels,
fragmentation; CUDA graphs, Triton, compiled code for GPUs, sparse tensors; the layouts in which Ascend keeps weights.
Random numbers are other ones than a real card's.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SITE = HERE / "site"
FLAGS = {"cuda": [], "npu": ["-DSIMULATED_NPU"]}
COMMON = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DTORCH_API_INCLUDE_EXTENSION_H")


class NoCompiler(RuntimeError):
    """The cards cannot be built here."""


def variables(cards: int = 2, kind: str = "cuda") -> dict[str, str]:
    """The variables of a process with simulated cards; builds them first.

    kind: torch's word for them, cuda or npu.

    Raises:
        NoCompiler: there is none.
    """
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    programs = [str(HERE / "ascend/bin")] if kind == "npu" else []
    return {
        "SIMULATED_CARDS": str(cards),
        "SIMULATED_DEVICE": kind,
        "SIMULATED_LIBRARY": str(library(kind)),
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
    }


def library(kind: str) -> Path:
    """The compiled cards for this Python and torch: built once, in 20 s, and kept in the user's cache.

    They find torch's libraries where this environment has them, so another environment builds its own.
    """
    sources = [*HERE.glob("*.hpp"), HERE / "cards.cpp"]
    torch = _torch()
    what = [
        (torch / "version.py").read_bytes(),
        str(torch).encode(),
        sysconfig.get_config_var("EXT_SUFFIX").encode(),
        repr([COMMON, FLAGS[kind]]).encode(),
    ]
    digest = hashlib.sha256(b"".join([*what, *(path.read_bytes() for path in sorted(sources))])).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = cache / "duoka-tests" / digest / "simulated_cards.so"
    if not built.exists():
        _build(torch, built, *COMMON, *FLAGS[kind])
    return built


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _build(torch: Path, built: Path, *flags: str) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NoCompiler("simulated cards need a C++ compiler: none of CXX, g++, c++ is here")
    headers = torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])
    libraries = torch / "lib"
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.parent / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.exists():  # built by another process meanwhile
            return
        out = Path(folder) / built.name
        words = [compiler, *flags, *(f"-I{path}" for path in headers), str(HERE / "cards.cpp"), "-o", str(out)]
        linked = (f"-l{name}" for name in ("torch_python", "torch", "torch_cpu", "c10"))
        words += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *linked]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoCompiler(f"simulated cards do not compile here: {' '.join(words)}\n{done.stderr[-4000:]}")
        os.replace(out, built)
