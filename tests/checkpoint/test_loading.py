from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import duoka
from tests.checkpoint.nets import Calls, Net, Odd, Own, compiled, differs, same

STATE: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda net: net.state_dict(),
    "DataParallel": lambda net: nn.DataParallel(net).state_dict(),
    "compiled": lambda net: compiled(net).state_dict(),
    "DataParallel of compiled": lambda net: nn.DataParallel(compiled(net)).state_dict(),  # type: ignore[arg-type]
    "Lightning": lambda net: {
        "epoch": 3,
        "pytorch-lightning_version": "2.0",
        "state_dict": {f"model.{name}": tensor for name, tensor in net.state_dict().items()},
        "optimizer_states": [torch.optim.Adam(net.parameters()).state_dict()],
        "hyper_parameters": {"lr": 0.1},
    },
    "Fabric": lambda net: {"model": {f"_forward_module.{name}": it for name, it in net.state_dict().items()}},
    "FSDP": lambda net: {
        f"_fsdp_wrapped_module.{name.replace('features.', 'features._checkpoint_wrapped_module.')}": tensor
        for name, tensor in net.state_dict().items()
    },
    "timm": lambda net: {
        "arch": "net",
        "args": argparse.Namespace(lr=0.1),
        "state_dict": net.state_dict(),
        "state_dict_ema": Net().state_dict(),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []},
    },
    "ImageNet example": lambda net: {
        "epoch": 1,
        "best_acc1": torch.tensor(71.3),
        "state_dict": {name.replace("features.", "features.module."): it for name, it in net.state_dict().items()},
    },
    "two networks": lambda net: {"discriminator": nn.Linear(3, 1).state_dict(), "generator": net.state_dict()},
    "parts": lambda net: {"features": net.features.state_dict(), "fc": net.fc.state_dict()},
    "AveragedModel": lambda net: AveragedModel(net).state_dict(),
    "before torch 0.4.1": lambda net: {
        name: it for name, it in net.state_dict().items() if not name.endswith("num_batches_tracked")
    },
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", STATE)
def test_weights_are_found_however_they_were_saved(kind: str, zipped: bool, tmp_path: Path) -> None:
    net, other = Net(), Net()
    torch.save(STATE[kind](net), tmp_path / "net.pth", _use_new_zipfile_serialization=zipped)
    assert differs(net, other)
    loaded = duoka.load_weights(other, tmp_path / "net.pth")
    assert same(net, other)
    assert len(loaded.loaded) == len(net.state_dict()) - (kind == "before torch 0.4.1")
    assert not loaded.missing
    assert not loaded.unexpected


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, compiled, lambda net: nn.DataParallel(compiled(net)), AveragedModel],
)
def test_a_wrapped_model_takes_plain_weights(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    net, other = Net(), Net()
    duoka.save_weights(net, tmp_path / "net.safetensors")
    wrapped = wrap(other)
    report = duoka.load_weights(wrapped, tmp_path / "net.safetensors", skip="n_averaged")
    assert len(report.loaded) == 9
    assert same(net, wrapped.module if isinstance(wrapped, AveragedModel) else other)  # that has a copy of its own


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    net, other = Net().half(), Net()
    torch.save({"model": nn.DataParallel(net).state_dict(), "ema": net.state_dict()}, tmp_path / "net.pth")
    text = str(duoka.load_weights(other, tmp_path / "net.pth"))
    assert text.splitlines() == [
        f"loaded 9 tensors from {tmp_path / 'net.pth'} (torch.save)",
        "  found under 'model'",
        "  stripped 'module.' from 9 names",
        "  cast float16 → float32 (8)",
        "  also in the file: ema (key= chooses)",
    ]


def test_a_file_from_a_gpu_is_mapped_to_where_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, other = Net(), Net()
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")  # what a GPU's storage says
    torch.save(net.state_dict(), tmp_path / "net.pth")
    monkeypatch.undo()
    assert "mapped cuda:1 → cpu" in duoka.load_weights(other, tmp_path / "net.pth").notes
    assert same(net, other)


@pytest.mark.parametrize("name", ["odd.pth", "odd.safetensors"])
def test_odd_tensors(name: str, tmp_path: Path) -> None:
    odd, other = Odd(), Odd()
    duoka.save_weights(odd, tmp_path / name)
    duoka.load_weights(other, tmp_path / name)
    assert same(odd, other)
    assert other.one.weight is other.other.weight


def test_tied_weights_need_to_be_there_once(tmp_path: Path) -> None:
    odd, other = Odd(), Odd()
    state = {name: it.contiguous() for name, it in odd.state_dict().items() if name not in ("other.weight", "wide")}
    save_file(state, tmp_path / "odd.safetensors")
    loaded = duoka.load_weights(other, tmp_path / "odd.safetensors", skip="wide")
    assert "not in the file, and tied to what is: other.weight" in loaded.notes
    assert torch.equal(other.other.weight, odd.one.weight)


def test_a_model_on_the_meta_device_becomes_real(tmp_path: Path) -> None:
    net = Net()
    duoka.save_weights(net, tmp_path / "net.safetensors")
    with torch.device("meta"):
        other = Net()
    duoka.load_weights(other, tmp_path / "net.safetensors")
    assert same(net, other)


def test_modules_that_load_in_their_own_way(tmp_path: Path) -> None:
    class Versioned(nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            if f"{prefix}kernel" in state:
                state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
            super()._load_from_state_dict(state, prefix, *rest)

    layer, other = Versioned(2, 2), Versioned(2, 2)
    torch.save({"kernel": layer.weight.data, "bias": layer.bias.data}, tmp_path / "old.pth")
    assert not duoka.load_weights(other, tmp_path / "old.pth").unexpected
    assert same(layer, other)


def test_a_mismatch_is_one_table_and_changes_nothing(tmp_path: Path) -> None:
    net, other = Net(), Net(5)
    state = net.state_dict()
    state["features.0.wieght"] = state.pop("features.0.weight")
    torch.save(state, tmp_path / "net.pth")
    before = {name: it.clone() for name, it in other.state_dict().items()}
    with pytest.raises(duoka.WeightsMismatch) as told:
        duoka.load_weights(other, tmp_path / "net.pth")
    assert str(told.value).splitlines() == [
        f"{tmp_path / 'net.pth'} does not fit Net: of 9 tensors in the file, 6 fit",
        "  wrong shape  fc.weight          (5, 4) in the model  (10, 4) in the file",
        "  wrong shape  fc.bias            (5,) in the model    (10,) in the file",
        "  missing      features.0.weight  (4, 1, 3, 3)         nearest in the file: features.0.wieght (4, 1, 3, 3)",
        "  unexpected   features.0.wieght  (4, 1, 3, 3)",
        "strict=False loads what fits; rename={…} gives other names",
    ]
    assert all(torch.equal(it, before[name]) for name, it in other.state_dict().items())


def test_what_fits_is_loaded_if_asked_for(tmp_path: Path) -> None:
    net, other = Net(), Net(5)
    duoka.save_weights(net, tmp_path / "net.safetensors")
    head = other.fc.weight.clone()
    loaded = duoka.load_weights(other, tmp_path / "net.safetensors", strict=False)
    assert set(loaded.wrong) == {"fc.weight", "fc.bias"}
    assert "wrong shape  fc.weight" in str(loaded)
    assert torch.equal(other.fc.weight, head)
    assert same(other.features, net.features)


@pytest.mark.parametrize(
    "choice",
    [{"skip": "fc"}, {"only": "features"}, {"skip": ["fc.*"]}, {"only": ["features.0", "features.1"]}],
)
def test_another_head_is_one_argument(choice: dict[str, Any], tmp_path: Path) -> None:
    net, other = Net(), Net(5)
    torch.save(nn.DataParallel(net).state_dict(), tmp_path / "net.pth")
    loaded = duoka.load_weights(other, tmp_path / "net.pth", **choice)
    assert loaded.skipped == ("fc.weight", "fc.bias")
    assert same(other.features, net.features)


def test_rename(tmp_path: Path) -> None:
    net, other = Net(), Net()
    torch.save({f"backbone.{name}": it for name, it in net.state_dict().items()}, tmp_path / "net.pth")
    with pytest.raises(duoka.WeightsMismatch) as told:
        duoka.load_weights(other, tmp_path / "net.pth")
    hint = "it looks like rename={r'^backbone\\.': ''}"
    assert hint in str(told.value)
    duoka.load_weights(other, tmp_path / "net.pth", rename={r"^backbone\.": ""})
    assert same(net, other)
    with pytest.raises(duoka.OptionError, match="rename must be regular expressions"):
        duoka.load_weights(other, tmp_path / "net.pth", rename={"(": ""})
    with pytest.raises(duoka.WeightsError, match="two tensors the name"):
        duoka.load_weights(other, tmp_path / "net.pth", rename={"weight|bias": "same"})


def test_several_networks_that_fit_need_a_key(tmp_path: Path) -> None:
    teacher, student, other = Net(), Net(), Net()
    torch.save({"teacher": teacher.state_dict(), "student": student.state_dict()}, tmp_path / "two.pth")
    with pytest.raises(duoka.WeightsError, match=r"choose one by key=: 'teacher', 'student'"):
        duoka.load_weights(other, tmp_path / "two.pth")
    duoka.load_weights(other, tmp_path / "two.pth", key="student")
    assert same(student, other)
    with pytest.raises(duoka.WeightsError, match="no weights under 'pupil'; it has"):
        duoka.load_weights(other, tmp_path / "two.pth", key="pupil")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("objects", ["refuse", "inert"])
def test_a_pickle_that_would_run_code_is_refused(protocol: int, objects: Any, zipped: bool, tmp_path: Path) -> None:
    content = {**Net().state_dict(), "note": Calls(tmp_path / "ran")}
    path = tmp_path / "net.pth"
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        duoka.UnsafePickle, match=r"reading it would call `posix\.system`, and no code of it has been run$"
    ):
        duoka.load_weights(Net(), path, objects=objects)
    assert not (tmp_path / "ran").exists()


def test_a_whole_pickled_module_gives_its_tensors_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, other = Net(), Net()
    torch.save({"model": net, "own": Own()}, tmp_path / "whole.pth")
    monkeypatch.setattr(Net, "__setstate__", lambda self, state: pytest.fail("it ran"), raising=False)
    with pytest.raises(duoka.UnsafePickle, match=r"would call `tests\.checkpoint\.nets\.Net`.*objects=\"inert\""):
        duoka.load_weights(other, tmp_path / "whole.pth")
    loaded = duoka.load_weights(other, tmp_path / "whole.pth", objects="inert")
    assert same(net, other)
    assert "tests.checkpoint.nets.Own" in str(loaded)


def test_a_value_that_would_lose_its_meaning_does_not_fit(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    torch.save({"weight": torch.ones(2, 2, dtype=torch.complex64), "bias": torch.ones(2)}, tmp_path / "complex.pth")
    with pytest.raises(duoka.WeightsMismatch, match="weight  float32 in the model  complex64 in the file"):
        duoka.load_weights(layer, tmp_path / "complex.pth")


def test_an_unknown_value_of_objects(tmp_path: Path) -> None:
    with pytest.raises(duoka.OptionError, match="objects must be 'refuse' or 'inert', but is 'trust'"):
        duoka.load_weights(Net(), tmp_path / "net.pth", objects="trust")  # type: ignore[arg-type]


def test_no_warning_of_torch_reaches_the_user(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "net.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        duoka.load_weights(Net(), tmp_path / "net.pth")
