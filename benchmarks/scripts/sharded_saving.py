"""Weights of 67 million parameters in parts, saved by all ranks, beside as many bytes that each rank just writes.

Rank 0 says, for each round: seconds to save, seconds to write the bytes; at the end, MB by which the memory of the
rank that grew most has grown, and MB of the largest file.
"""

import secrets
import sys
import time
from pathlib import Path

from torch import nn

import duoka
from duoka.checkpoint import disk

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
run = duoka.start(seed=0)
net = nn.Sequential(nn.Embedding(8000, 512), *(nn.Linear(512, 512) for _ in range(240)))
run.model(net, strategy="fsdp")
size = sum(parameter.numel() * parameter.itemsize for parameter in net.parameters())
data = memoryview(bytearray(secrets.token_bytes(1 << 20)) * (size // run.world_size >> 20))


def megabytes(what: str) -> float:
    """Return a figure of this process from the kernel: VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


def save() -> None:
    duoka.save_weights(net, folder / "model.safetensors", max_shard_size=-(-size // run.world_size))


def write() -> None:
    path = folder / f"raw-{run.rank}"
    disk.write(path, [data])
    path.unlink()


def timed(work) -> float:
    run.barrier()
    start = time.perf_counter()
    work()
    run.barrier()
    return time.perf_counter() - start


with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak of resident memory begins anew
before = megabytes("VmRSS")
saved = timed(save)
grown = run.gather_objects(megabytes("VmHWM") - before)
timed(write)
for _ in range(rounds):
    seconds = timed(save), timed(write)
    if run.is_first:
        print(*seconds)
if run.is_first:
    print(max(grown), max(path.stat().st_size for path in folder.glob("model-*")) / 2**20)
run.close()
