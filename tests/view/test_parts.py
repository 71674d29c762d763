from __future__ import annotations

import pytest
import torch
from torch import nn

from duoka.view.parts import has_batch_norm, has_hooks, holds_shards, is_compiled, is_scripted, is_scripts_own


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
def test_compiled() -> None:
    assert not is_compiled(nn.Linear(2, 2))
    assert is_compiled(torch.compile(nn.Linear(2, 2)))
    in_place = nn.Linear(2, 2)
    in_place.compile()
    assert is_compiled(in_place)


def test_batch_norm_counts_while_it_takes_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    assert has_batch_norm(model)
    assert not has_batch_norm(model.eval())
    assert not has_batch_norm(nn.LayerNorm(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_parts() -> None:
    assert is_scripted(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    assert not is_scripted(nn.Sequential(nn.Linear(2, 2)))


def test_whole_parameters_are_no_shards() -> None:
    assert not holds_shards(nn.Linear(2, 2))


def test_hooks_of_the_script_s_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert not has_hooks(model)
    handle = model[0].register_forward_hook(lambda *_: None)
    assert has_hooks(model)
    handle.remove()
    model[0].register_forward_hook(torch.nn.functional.relu)  # torch's
    assert not has_hooks(model)
    assert is_scripts_own(lambda: None)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert has_hooks(nn.Linear(2, 2))
    handle.remove()
