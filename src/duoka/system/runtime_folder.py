"""The folder in which processes of one user on one machine find each other's files."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def runtime_folder() -> Path:
    """Return the path of the folder `duoka` in the user's runtime directory, or of one in /tmp; it may not exist.

    XDG_RUNTIME_DIR is not read: a cron job has none, but must find the files of the user's sessions.
    """
    uid = os.getuid()
    session = Path(f"/run/user/{uid}")
    with suppress(OSError):
        if stat.S_ISDIR(session.lstat().st_mode) and os.access(session, os.W_OK):
            return session / "duoka"
    return Path(f"/tmp/duoka-{uid}")
