"""The key of a run, with which its processes authenticate each other.

On one machine the key is created before the workers are forked, and they inherit it. Between machines it comes from
DUOKA_KEY or `--key-file`; where an engine starts commands on machines that share the user's home directory, from a
file there that only the user can read, which the first command creates.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duoka.errors import OptionError, RunError
from duoka.planning.options import Machines
from duoka.system import environment

SHORTEST = 16  # bytes
LONGEST = 4096
OWNER_ONLY = 0o077  # bits that the mode of a file with a key must not have
SIGNATURE = 64  # bytes of a signature


@dataclass(frozen=True, slots=True)
class Key:
    """A secret shared by the processes of a run. An empty one means that connections are not authenticated."""

    secret: bytes = b""

    @property
    def is_given(self) -> bool:
        """Return whether there is a secret."""
        return bool(self.secret)

    def sign(self, *parts: bytes) -> str:
        """Return the HMAC-SHA256 of these parts, 64 hexadecimal digits."""
        digest = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)  # with lengths, (ab, c) and (a, bc) differ
        return digest.hexdigest()

    def signed(self, signature: object, *parts: bytes) -> bool:
        """Return whether `signature` is the signature of these parts."""
        text = signature if isinstance(signature, str) and signature.isascii() else ""
        return hmac.compare_digest(text, self.sign(*parts))

    def derived(self, purpose: str) -> Key:
        """Return a key for one purpose, from which this one cannot be computed; an empty key if this one is empty."""
        return Key(bytes.fromhex(self.sign(b"purpose", purpose.encode()))) if self.is_given else self


class SignatureError(RunError):
    """Data from another rank without the signature of the run's key. It was not unpickled."""


def sign_object(value: Any, key: Key) -> bytes:
    """Pickle a value for another rank, with its signature in front.

    Unpickling can execute code, and the connections of torch's collectives do not authenticate their ends.
    """
    data = pickle.dumps(value)
    return key.sign(b"object", data).encode() + data


def verify_object(data: bytes, key: Key) -> Any:
    """Unpickle a value that `sign_object` has pickled. Raises SignatureError if the signature is not the run's."""
    signature, data = data[:SIGNATURE].decode("ascii", "replace"), data[SIGNATURE:]
    if not key.signed(signature, b"object", data):
        raise SignatureError("data from another rank are not signed with the run's key, and were not unpickled")
    return pickle.loads(data)


def key_of(machines: Machines, file: Path | None) -> Key:
    """Return the key of the run of these machines. file: `--key-file`.

    Raises OptionError if a key was given or is needed, and cannot be read.
    """
    if file is not None:
        secret = _read(file, "--key-file")
    elif (text := environment.variable("DUOKA_KEY")) is not None:
        secret = _long_enough(text.strip().encode(), "DUOKA_KEY")
    elif machines.home:
        secret = _in_home()
    else:
        return Key()
    return Key(secret).derived(f"run {machines.job}")


def _long_enough(secret: bytes, name: str) -> bytes:
    if not SHORTEST <= len(secret) <= LONGEST:
        hint = "for example of openssl rand -hex 32; the same on all machines"
        raise OptionError(name, f"{len(secret)} characters", f"{SHORTEST} to {LONGEST} characters", hint)
    return secret


def _read(path: Path, name: str) -> bytes:
    """Read a key from a file, which only its owner may be able to read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
    except OSError as error:
        raise OptionError(name, str(path), "a file that can be read", error.strerror or "") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)  # of the open file, which cannot be exchanged for another
        if not stat.S_ISREG(status.st_mode) or status.st_mode & OWNER_ONLY or status.st_uid not in (0, os.getuid()):
            raise OptionError(name, str(path), "a file that only you can read", f"chmod 600 {path}")
        return _long_enough(file.read(LONGEST + 1).strip(), name)


def _in_home() -> bytes:
    """Return the user's own key; create it on first use, safely if several commands start at once."""
    path = Path(environment.variable("XDG_CONFIG_HOME") or Path.home() / ".config") / "duoka" / "key"
    draft = path.with_name(f"key.{secrets.token_hex(8)}")
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(secrets.token_hex(32).encode())
            with suppress(FileExistsError):
                os.link(draft, path)  # atomic, on a network file system too
    except OSError as error:
        hint = f"{error.strerror}; or set DUOKA_KEY"
        raise OptionError("the file for the key of your runs", str(path), "one that can be made", hint) from None
    finally:
        with suppress(OSError):
            draft.unlink()
    return _read(path, "the key of your runs")
