"""Outputs for 10,000 items of uneven cost, or peak memory over many items.

predicting.py predict         by duoka.predict over two CPU devices; prints seconds
predicting.py apart 0|1       every other batch, by hand, when a line comes in; prints seconds
predicting.py memory ITEMS    by duoka.predict over a generator; prints the peak in MB
"""

import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import duoka

ITEMS, BATCH = 10_000, 32


class Uneven(nn.Module):
    """Convolutions, one to six times over, by what is in the batch. Its output begins with the item's number.

    Two batches that follow each other cost the same, so that every other batch is half of the work.
    """

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, numbers):
        x = numbers[:, None, None, None].expand(-1, 8, 32, 32) / ITEMS
        for _ in range(1 + int(numbers[0]) // BATCH // 2 * 7919 % 6):
            x = torch.relu(self.convolution(x))
        return torch.stack([numbers, x.mean((1, 2, 3))], dim=1)


def predict(model, numbers):
    list(duoka.predict(model, numbers[: 4 * BATCH], devices="cpu:2", batch_size=BATCH))  # warm
    begin = time.perf_counter()
    outputs = list(duoka.predict(model, numbers, devices="cpu:2", batch_size=BATCH))
    seconds = time.perf_counter() - begin
    assert [int(output[0]) for output in outputs] == list(range(ITEMS)), "not in order"
    return seconds


def apart(model, numbers, which):
    """In a thread, as memory that the main thread frees goes back to the system, and costs more than it should."""
    seconds = []
    thread = threading.Thread(target=lambda: seconds.append(by_hand(model, numbers.split(BATCH)[which::2])))
    thread.start()
    thread.join()
    return seconds[0]


def by_hand(model, batches):
    torch.set_num_threads(1)
    with torch.inference_mode():
        for batch in batches[:4]:
            model(batch)
        print("ready", flush=True)
        sys.stdin.readline()
        begin = time.perf_counter()
        outputs = [row for batch in batches for row in model(batch).unbind(0)]
    assert len(outputs) >= ITEMS // 2 - BATCH
    return time.perf_counter() - begin


def memory(items):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    source = (torch.full((1024,), float(item)) for item in range(items))
    for _ in duoka.predict(model, source, devices="cpu:2", batch_size=BATCH):
        pass
    status = Path("/proc/self/status").read_text()  # getrusage would tell of the process that forked this one
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000


torch.manual_seed(0)
if sys.argv[1] == "memory":
    print(memory(int(sys.argv[2])))
else:
    given = Uneven().eval(), torch.arange(float(ITEMS))
    print(predict(*given) if sys.argv[1] == "predict" else apart(*given, int(sys.argv[2])))
