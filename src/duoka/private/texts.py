"""What torch, gloo, NCCL and CUDA say, where errors can be told apart by their words alone.

Public: the kinds of errors, which are looked at first wherever there are any.
"""

from __future__ import annotations

# gloo and NCCL: another rank went away or did not come, rather than of this rank's own fault.
NETWORK_NOISE = (
    "broken pipe",
    "connection closed by peer",
    "connection refused",
    "connection reset",
    "connection was likely closed",
    "remote process exited",
    "socket timeout",
    "timed out waiting",
    "timeout caused pair closure",
)
# The same, when a rank did not come in time.
TOO_LATE = ("timed out", "timeout")
# A smaller batch might do. torch.OutOfMemoryError is a GPU's alone.
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
# A fault that leaves a GPU of no use to this process.
CUDA_FAULT = "CUDA error"
# Before what the restricted unpickler found, and its advice.
UNPICKLER = "WeightsUnpickler error: "


def says(said: BaseException | str, *words: str) -> bool:
    """Whether an error, or a text, has any of these words in it, in whatever case."""
    text = str(said).lower()
    return any(one.lower() in text for one in words)
