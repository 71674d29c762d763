"""Call the function of `duoka.ray.launch` in each worker: `duoka run --kind api -m duoka.ray.call`.

The folder DUOKA_CALL holds the pickled call; rank r writes its result to `result.r`, or a traceback to `error.r`.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from importlib import import_module
from pathlib import Path

from duoka.errors import MISSING, OptionError, PeerLost
from duoka.origins.process import this_process
from duoka.system import environment


def main() -> None:
    """Call the function on this rank. Raises OptionError if the folder is not set."""
    folder, origin = environment.variable("DUOKA_CALL"), this_process().origin
    if folder is None or origin is None:
        raise OptionError("DUOKA_CALL", MISSING, "set", "call duoka.ray.launch, which sets it and starts this module")
    try:
        result = import_module("ray.cloudpickle").dumps(_call(Path(folder, "call").read_bytes()))
    except PeerLost:  # another rank's error is the cause, and in its own file
        raise
    except Exception:
        Path(folder, f"error.{origin.rank}").write_text(traceback.format_exc())
        raise
    Path(folder, f"result.{origin.rank}").write_bytes(result)


def _call(pickled: bytes) -> object:
    """Unpickle and make the call. It comes from this user's own driver, and may name modules that are found there."""
    path, call = pickle.loads(pickled)
    sys.path += [folder for folder in path if folder not in sys.path]
    function, args, kwargs = pickle.loads(call)
    return function(*args, **kwargs)


if __name__ == "__main__":
    main()
