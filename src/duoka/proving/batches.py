"""Record the training batches of a script as digests of rows. Each rank writes its own rows.

So no communication is needed, and the rows of all ranks together are those of one device. Recorded are the batches of
loaders, as the script takes them, and for scripts without a loader the arguments of its models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from duoka.private.torch import keystr, tree_flatten_with_path
from duoka.proving.recording import ROW_DIGEST, batches_file
from duoka.trials.observer import opened, replace_function, watch_loaders
from duoka.view.support.user_code import user_line
from duoka.view.tensor.batch import BatchTensor

_VALUES = (str, bytes, int, float, complex, bool, type(None))


class BatchRecorder:
    """Writes digests of the batches of one rank to a file, one line for each batch.

    own_rows: True if a plain tensor holds only this rank's rows; False if it holds the same rows on all ranks.
    """

    def __init__(self, folder: Path, rank: int, own_rows: bool) -> None:
        self._file = opened(folder / batches_file(rank))
        self._own_rows = own_rows
        self._inside = self._has_loader = False
        self.step = 1

    def install(self) -> None:
        """Observe the batches of loaders and the arguments of models."""
        watch_loaders(lambda loader, batch, is_local: self._write("loader", batch, self._own_rows or is_local))
        replace_function(nn.Module, "__call__", self._make_call)

    def close(self) -> None:
        self._file.close()

    def _make_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or self._has_loader or torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            self._inside = True
            try:
                self._write("model", (args, kwargs), self._own_rows)
                return original(module, *args, **kwargs)
            finally:
                self._inside = False

        return __call__

    def _write(self, source: str, batch: Any, own: bool) -> None:
        self._has_loader = self._has_loader or source == "loader"
        leaves, values = [], hashlib.blake2b(digest_size=8)
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, np.ndarray) and leaf.dtype != object:
                leaf = torch.from_numpy(np.ascontiguousarray(leaf)) if leaf.dtype.kind in "biufc" else leaf.tobytes()
            if isinstance(leaf, Tensor):
                if source == "loader" or not leaf.requires_grad:  # a tensor computed by the model is not data
                    leaves.append({"at": keystr(path), **_rows(leaf, own)})
            else:
                known = leaf if isinstance(leaf, _VALUES) else type(leaf).__name__
                values.update(f"{keystr(path)} {known!r}\n".encode())
        line = {"step": self.step, "source": source, "line": user_line(), "leaves": leaves}
        self._file.write(json.dumps(line | {"values": values.hexdigest()}) + "\n")
        self._file.flush()


@torch.no_grad()
def _rows(tensor: Tensor, own: bool) -> dict[str, Any]:
    """Describe a tensor of a batch: type, shape of a row, ranks that hold its rows, digests of the local rows."""
    shared = isinstance(tensor, BatchTensor) and tensor._spec.dim == 0 and tensor._spec.outer == 1
    local = tensor.to_local() if isinstance(tensor, BatchTensor) else tensor
    kind = "cut" if shared else "own" if own or isinstance(tensor, BatchTensor) else "whole"
    local = local.detach()
    if local.layout != torch.strided or local.is_quantized:
        local = local.to_dense() if local.layout != torch.strided else local.dequantize()
    flat = local.cpu().resolve_conj().resolve_neg().contiguous()
    flat = flat.reshape(flat.shape[0] if flat.dim() else 1, -1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros((flat.shape[0], 0), np.uint8)
    digests = "".join(hashlib.blake2b(row.data, digest_size=ROW_DIGEST // 2).hexdigest() for row in data)
    return {"dtype": str(local.dtype), "shape": list(local.shape[1:]), "kind": kind, "rows": digests}
