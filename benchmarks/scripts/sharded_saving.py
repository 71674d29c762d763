"""Weights of a model in parts, saved by all ranks, beside as many bytes that one process writes to one file.

    sharded_saving.py FOLDER ROUNDS FILE [large]

FILE: model.safetensors or model.pth. Rank 0 says, for each round: seconds to save, seconds to write the bytes; at the
end, MB by which the memory of the rank that grew most has grown, and MB of the largest part of a tensor.
"""

import os
import secrets
import sys
import time
from pathlib import Path

from torch import nn

import duoka
from duoka.system import disk

folder, rounds, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
words, width, layers = (24000, 2048, 36) if "large" in sys.argv else (8000, 512, 60)
run = duoka.start(seed=0)
net = nn.Sequential(nn.Embedding(words, width), *(nn.Linear(width, width) for _ in range(layers)))
run.model(net, strategy="fsdp")
sizes = [parameter.numel() * parameter.itemsize for parameter in net.parameters()]
block = memoryview(secrets.token_bytes(16 << 20))
data = [(at, block[: sum(sizes) - at]) for at in range(0, sum(sizes), len(block))]


def megabytes(what: str) -> float:
    """Return a figure of this process from the kernel: VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


def save() -> None:
    duoka.save_weights(net, folder / name)


def write() -> None:
    if run.is_first:
        disk.replace(folder / "bytes", lambda beside: disk.write(beside, data))


def timed(work) -> float:
    os.sync()  # what was written before is not measured
    run.barrier()
    start = time.perf_counter()
    work()
    run.barrier()
    return time.perf_counter() - start


with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak of resident memory begins anew
before = megabytes("VmRSS")
save()
grown = run.gather_objects(megabytes("VmHWM") - before)
write()
for _ in range(rounds):
    seconds = timed(save), timed(write)
    if run.is_first:
        print(*seconds)
if run.is_first:
    print(max(grown), max(sizes) / run.world_size / 2**20)
run.close()
