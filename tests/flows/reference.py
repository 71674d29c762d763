"""What `python script.py` prints and saves, and what is the same but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.flows.flow import Flow, Result
from tests.rounding import assert_same

NUDGED = "from duoka.proving.recorder import Nudge\nNudge({seed}).install()"


@dataclass(frozen=True)
class Reference:
    """A script under `python`. flow: where it runs. saved: the name of the file that it leaves in its folder."""

    flow: Flow
    args: Sequence[str | Path]
    saved: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    _done: dict[str, Result] = field(default_factory=dict)

    @property
    def stdout(self) -> str:
        """What it prints."""
        return self._run("alone", "").stdout

    @property
    def weights(self) -> Any:
        """What it saves."""
        return self._saved("alone", "")

    def assert_same(
        self, stdout: str | None = None, saved: Path | None = None, part: Callable[[str], str] = lambda text: text
    ) -> None:
        """See that another run printed and saved the same but for rounding; what is not given is not compared.

        part: takes what the script prints, and returns what the other run is to have printed of it.
        """

        def result(name: str, prepare: str) -> tuple[str, Any]:
            printed = "" if stdout is None else part(self._run(name, prepare).stdout)
            return printed, None if saved is None else self._saved(name, prepare)

        found = stdout or "", None if saved is None else torch.load(saved, map_location="cpu")
        assert_same(result("alone", ""), found, lambda seed: result(f"moved{seed}", NUDGED.format(seed=seed)))

    def _run(self, name: str, prepare: str) -> Result:
        if name not in self._done:
            flow = replace(self.flow, folder=self.flow.folder / name)
            flow.folder.mkdir()
            self._done[name] = flow.python(self.args, env=self.env, prepare=prepare).ok()
        return self._done[name]

    def _saved(self, name: str, prepare: str) -> Any:
        self._run(name, prepare)
        assert self.saved is not None
        return torch.load(self.flow.folder / name / self.saved, map_location="cpu")
