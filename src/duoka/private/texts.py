"""Error messages of torch, gloo and GPUs, for errors that differ in nothing else.

Public: the classes of errors, which are checked first if there are any.
"""

from __future__ import annotations

# Collectives: another rank ended or did not join.
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
# The same, when a rank did not join in time.
TOO_LATE = ("timed out", "timeout")
# No memory. torch.OutOfMemoryError is only raised for GPUs.
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
# An error of the GPU itself, not of what a program did with it.
LOST_GPU = (
    "uncorrectable ecc error",
    "gpu is lost",
    "fallen off the bus",
    "-capable device is detected",
    "hardware error",
    "hardware stack error",
    "busy or unavailable",
    "nvlink uncorrectable",
)
# The prefix of errors of the restricted unpickler, with its advice.
UNPICKLER = "WeightsUnpickler error: "


def says(said: BaseException | str, *words: str) -> bool:
    """Return whether an error or a text contains any of these words, ignoring case."""
    text = str(said).lower()
    return any(word.lower() in text for word in words)
