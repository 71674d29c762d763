"""Load weights into a model; print the peak of memory since before the model was made, and its size, in MB."""

import resource
import sys
from pathlib import Path

import torch

import duoka

duoka.load_weights  # noqa: B018  # imports what it needs
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(int(sys.argv[2]))))
duoka.load_weights(model, sys.argv[1])
status = Path("/proc/self/status").read_text()  # getrusage would count what was before exec, too
peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
size = sum(it.numel() * it.element_size() for it in model.state_dict().values())
print((peak - before) / 1e6, size / 1e6)
