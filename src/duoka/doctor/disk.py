"""Free disk space where a run writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

from duoka.doctor.finding import Finding, advice, fault, ok

GIB = 1 << 30
NONE, LITTLE = GIB // 10, 10 * GIB  # bytes


def examine() -> Iterator[Finding]:
    """Check the working directory, and the directory for temporary files if it is on another disk."""
    seen: set[int] = set()
    for subject, folder in (("disk here", os.getcwd()), ("disk for temporary files", tempfile.gettempdir())):
        device = os.stat(folder).st_dev
        if device not in seen:
            seen.add(device)
            usage = os.statvfs(folder)
            no_files = usage.f_files > 0 and usage.f_favail == 0  # some file systems report 0 inodes in total
            yield check_folder(subject, folder, usage.f_frsize * usage.f_bavail, os.access(folder, os.W_OK), no_files)


def check_folder(subject: str, folder: str, free: int, writable: bool, no_files: bool = False) -> Finding:
    """Check that checkpoints and logs fit. free: bytes. no_files: the file system has no free inodes."""
    what = f"{folder}: {free / GIB:.1f} GiB are free"
    if not writable:
        return fault(subject, f"{folder} cannot be written to", "nothing can be saved", "run elsewhere")
    if no_files:
        what = f"{folder}: {free / GIB:.1f} GiB are free, but no inodes are free, so no file can be created"
        return fault(subject, what, "checkpoints and logs are files", "remove small files; see df -i")
    if free < NONE:
        return fault(subject, what, "checkpoints and logs will not fit", "make room")
    if free < LITTLE:
        return advice(subject, what, "checkpoints of a large model will not fit", "make room")
    return ok(subject, what)
