"""The tensors of a checkpoint's files, each read once, and ahead of use while their digests are still computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from duoka.checkpoint import manifest
from duoka.checkpoint.formats import safetensors
from duoka.checkpoint.manifest import Manifest
from duoka.errors import WeightsError


class Reading:
    """One checkpoint that is restored."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._read: dict[str, dict[str, Tensor]] = {}

    def check(self, about: Manifest) -> None:
        """Compare all files with the manifest; what goes into new memory is read meanwhile.

        Raises:
            CheckpointDamaged: it names the files that are not as they were written.
        """
        ahead = {file for state in about.states.values() if state.kind != "model" for file in state.files}
        with ThreadPoolExecutor(1, "duoka-check") as pool:
            sound = pool.submit(manifest.check, self.directory, about)
            with suppress(OSError, WeightsError):  # of a damaged file, of which the check will tell
                for file in ahead:
                    self.tensors(file)
            sound.result()

    def tensors(self, file: str) -> dict[str, Tensor]:
        """A file's tensors by name; none of one that is not safetensors."""
        if file not in self._read:
            stored = safetensors.read(self.directory / file).tree if file.endswith(".safetensors") else {}
            self._read[file] = {name: tensor.read() for name, tensor in stored.items()}
        return self._read[file]
