"""Read the files of a checkpoint once each, while their digests are computed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from duoka.checkpoint import manifest
from duoka.checkpoint.formats import safetensors
from duoka.checkpoint.manifest import Manifest, StateEntry
from duoka.checkpoint.states import OWN_FILE
from duoka.checkpoint.stored import Stored
from duoka.errors import CheckpointError, WeightsError


class CheckpointReader:
    """Reads one checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._read: dict[str, dict[str, Tensor]] = {}

    def check(self, about: Manifest) -> None:
        """Compare all files with the manifest, and meanwhile read those whose tensors are not copied in place.

        Raises:
            CheckpointDamaged: names the files that were changed.
        """
        ahead = {file for state in about.states.values() if not waits(state) for file in state.files}
        with ThreadPoolExecutor(1, "duoka-check") as pool:
            sound = pool.submit(manifest.check, self.directory, about)
            with suppress(OSError, WeightsError):  # the check reports damaged files
                for file in ahead:
                    self.tensors(file)
            sound.result()

    def trees(self) -> dict[str, Any]:
        """Return the JSON of each state that is more than tensors, by name."""
        path = self.directory / manifest.TREES
        try:
            trees = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from error
        if not isinstance(trees, dict):
            raise CheckpointError(f"{path} is not a JSON object")
        return trees

    def stored(self, file: str) -> dict[str, Stored]:
        """Return a file's tensors, unread, by name; {} if it is not safetensors."""
        return safetensors.read(self.directory / file).tree if file.endswith(".safetensors") else {}

    def tensors(self, file: str) -> dict[str, Tensor]:
        """Return a file's tensors by name; {} if it is not safetensors."""
        if file not in self._read:
            self._read[file] = {name: tensor.read() for name, tensor in self.stored(file).items()}
        return self._read[file]


def waits(state: StateEntry) -> bool:
    """Return True for a state whose tensors are read one by one when they are restored."""
    return state.kind in OWN_FILE
