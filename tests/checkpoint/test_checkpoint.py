from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import duoka
from duoka.checkpoint import directory as checkpoints
from duoka.checkpoint.checkpoint import AGAIN, SIGNALS, Preempted
from tests.checkpoint.nets import Net, compiled, same
from tests.checkpoint.runs import Stop, fail, fault, filled, in_child, outcome, small, things, train, value_in


def steps(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))


def test_a_run_that_was_cut_off_goes_on_to_the_very_batch(tmp_path: Path) -> None:
    whole = outcome(train(tmp_path / "whole"))
    for cut in (1, 4, 7):
        with pytest.raises(Stop):
            train(tmp_path / str(cut), stop_after=cut, every_steps=1)
        assert outcome(train(tmp_path / str(cut), every_steps=1)) == whole
    for _ in range(2):
        with pytest.raises(Stop):
            train(tmp_path / "often", stop_after=5, every_steps=2)
    assert outcome(train(tmp_path / "often")) == whole


def test_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    whole = outcome(train(tmp_path))
    assert train(tmp_path)["loader"].seen == []
    assert outcome(train(tmp_path)) == whole
    assert len(train(tmp_path, epochs=4)["loader"].seen) == 4


def test_a_checkpoint_can_be_read_without_duoka(tmp_path: Path) -> None:
    run = train(tmp_path, keep=1)
    (name,) = steps(tmp_path)
    assert name == "step-00000012"
    folder = tmp_path / name
    assert sorted(os.listdir(folder)) == [
        "average.safetensors",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "states.json",
        "states.safetensors",
    ]
    state = load_file(folder / "model.safetensors")
    assert all(torch.equal(state[key], it) for key, it in run["model"].state_dict().items())
    assert torch.equal(
        load_file(folder / "optimizer.safetensors")["state.model.0.weight.exp_avg"],
        run["optimizer"].state_dict()["state"][0]["exp_avg"],
    )
    states = json.loads((folder / "states.json").read_text())
    assert states["losses"] == run["losses"]
    told = json.loads((folder / "manifest.json").read_text())
    assert (told["step"], told["epoch"], told["format"]) == (12, 3, 1)
    assert not any(path.read_bytes()[:1] == b"\x80" for path in folder.iterdir())  # no pickle


def test_the_weights_of_a_checkpoint_load_like_any_others(tmp_path: Path) -> None:
    run = train(tmp_path)
    for path in (tmp_path, tmp_path / "step-00000012", tmp_path / "step-00000012" / "model.safetensors"):
        other = things()["model"]
        duoka.load_weights(other, path)
        assert same(run["model"], other)
    average = things()["average"]
    duoka.load_weights(average, tmp_path, key="average")
    assert same(run["average"], average)


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled])
def test_wrapped_and_bare_models_restore_each_other(wrap: Any, tmp_path: Path) -> None:
    net, other = Net(), Net()
    for saver, loader, folder in ((wrap(net), other, "a"), (net, wrap(other), "b")):
        one, two = (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (saver, loader))
        for parameter in saver.parameters():
            parameter.grad = torch.ones_like(parameter)
        one.step()
        with duoka.Checkpoint(tmp_path / folder, {"model": saver, "optimizer": one}) as saved:
            saved.save()
        with duoka.Checkpoint(tmp_path / folder, {"model": loader, "optimizer": two}) as saved:
            saved.restore()
        assert same(net, other)
        assert str(one.state_dict()) == str(two.state_dict())


def test_an_optimizer_is_restored_by_name(tmp_path: Path) -> None:
    net = Net()
    forward = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    forward.step()
    with duoka.Checkpoint(tmp_path, {"model": net, "optimizer": forward}) as saved:
        saved.save()
    backward = torch.optim.Adam(reversed(list(net.parameters())))
    with duoka.Checkpoint(tmp_path, {"model": net, "optimizer": backward}) as saved:
        saved.restore()
    for parameter in net.parameters():
        assert torch.equal(forward.state[parameter]["exp_avg"], backward.state[parameter]["exp_avg"])
    fewer = torch.optim.Adam(net.fc.parameters())
    with duoka.Checkpoint(tmp_path, {"model": net, "optimizer": fewer}) as saved:
        message = (
            r"group 0 of 'optimizer' has other parameters than were saved: now none, then model\.features\.0\.bias"
        )
        with pytest.raises(duoka.CheckpointError, match=message):
            saved.restore()


def test_values_of_every_kind(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"list": [1, (2, "x")], "dict": {1: torch.ones(2)}, "set": {3}, "tensor": torch.ones(2)}
    with duoka.Checkpoint(tmp_path, {**kept, "number": 1.5, "text": "a", "nothing": None}) as saved:
        saved.values["nothing"] = [0.1]
        saved.save()
    fresh: dict[str, Any] = {"list": [], "dict": {"old": 1}, "set": set(), "tensor": torch.zeros(2)}
    with duoka.Checkpoint(tmp_path, {**fresh, "number": 0, "text": "", "nothing": None}) as saved:
        saved.restore()
        assert saved.values == {"number": 1.5, "text": "a", "nothing": [0.1]}
    assert fresh["list"] == [1, (2, "x")]
    assert torch.equal(fresh["dict"].pop(1), torch.ones(2))
    assert fresh["dict"] == {}
    assert fresh["set"] == {3}
    assert torch.equal(fresh["tensor"], torch.ones(2))


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    saved = duoka.Checkpoint(tmp_path, {"settings": {"act": nn.functional.relu}})
    with pytest.raises(
        duoka.CheckpointError, match=r"'settings' cannot be saved: settings\.act is of type .*function"
    ):
        saved.save()
    assert steps(tmp_path) == []


def test_the_newest_are_kept_and_the_best(tmp_path: Path) -> None:
    saved = duoka.Checkpoint(tmp_path, {"model": filled(0)}, keep=2, best="max")
    for step, metric in enumerate([0.1, 0.9, 0.3, 0.2, 0.5], 1):
        saved.step_number = step
        saved.save(metric=metric)
    saved.close()
    assert steps(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert saved.best() == tmp_path / "step-00000002"


def test_all_are_kept_if_asked_for(tmp_path: Path) -> None:
    train(tmp_path, keep=None, every_steps=1)
    assert len(steps(tmp_path)) == 15  # twelve steps, and one more at the end of each epoch


def test_saving_by_seconds_and_by_nothing(tmp_path: Path) -> None:
    train(tmp_path / "often", every_seconds=1e-9, every_epochs=None, keep=None)
    assert len(steps(tmp_path / "often")) == 15
    train(tmp_path / "never", every_epochs=None)
    assert steps(tmp_path / "never") == []
    train(tmp_path / "second", every_epochs=2, keep=None)
    assert steps(tmp_path / "second") == ["step-00000008", "step-00000012"]


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 2e9
    for number in range(1, 4):
        monkeypatch.setattr(time, "gmtime", lambda seconds=None, at=now - 1e8 * number: TIME(at))
        saved = small(tmp_path, number)
        saved.restore() if number > 1 else None
        duoka.load_weights(saved._states.objects["model"], write(tmp_path.parent, number))
        saved._states.objects["note"][:] = [float(number)]
        saved.step_number += 1
        saved.save()
        saved.close()
        for entry in tmp_path.iterdir():
            os.utime(entry, (now - 1e8 * number,) * 2)
        assert value_in(tmp_path) == number


TIME = time.gmtime


def write(folder: Path, value: float) -> Path:
    duoka.save_weights(filled(value), folder / f"{value}.safetensors")
    return folder / f"{value}.safetensors"


def test_the_copy_is_of_the_moment_of_save(tmp_path: Path) -> None:
    """Training continues while the thread writes; the file has the values at the time of `save`."""
    model = nn.Linear(300, 300)
    saved = duoka.Checkpoint(tmp_path, {"model": model}, keep=None)
    for number in range(1, 6):
        nn.init.constant_(model.weight, number)
        saved.step_number = number
        saved.save()
        nn.init.constant_(model.weight, -1)
    saved.close()
    for number, name in enumerate(steps(tmp_path), 1):
        weight = load_file(tmp_path / name / "model.safetensors")["weight"]
        assert torch.equal(weight, torch.full((300, 300), float(number)))


def test_an_error_in_the_background_is_raised_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = small(tmp_path, 1)
    saved.step_number = 1
    saved.save()
    saved.wait()
    with fault(monkeypatch, 1, fail):  # the first call makes a directory
        saved.step_number = 2
        saved.save()
        saved._background.finish()
    with pytest.raises(duoka.CheckpointError, match=r"step 2 could not be written .* No space left .* are unchanged"):
        saved.step()
    saved.step()  # raised once; training may continue
    assert steps(tmp_path) == ["step-00000001"]
    saved.save()
    saved.close()
    assert steps(tmp_path) == ["step-00000001", "step-00000004"]


def test_an_error_that_nobody_asks_for_is_said_at_the_end(flow: Any) -> None:
    flow.write(
        "train.py",
        """
        import os
        import duoka, torch
        saved = duoka.Checkpoint("out", {"model": torch.nn.Linear(1, 1)})
        os.fsync = lambda fd: os.write(-1, b"")
        saved.save()
        """,
    )
    assert "duoka: error: the checkpoint of step 0 could not be written into out" in flow.python(["train.py"]).stderr


def test_damage_is_found_named_and_passed_over(tmp_path: Path) -> None:
    train(tmp_path, keep=None)
    before = {"step-00000004", "step-00000008"}
    (tmp_path / "step-00000012" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"model\.safetensors has 0 bytes, and should have \d+; using step-00000008"):
        run = train(tmp_path, keep=None)
    assert len(run["loader"].seen) == 4
    assert set(steps(tmp_path)) == before | {"step-00000012", "step-00000012.damaged"}
    assert outcome(run) == outcome(train(tmp_path.with_name("whole")))


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "states.json"])
def test_a_missing_file(name: str, tmp_path: Path) -> None:
    train(tmp_path)
    (tmp_path / "step-00000012" / name).unlink()
    with pytest.warns(UserWarning, match=rf"step-00000012.* ({name}|is missing); using step-00000008"):
        train(tmp_path)


def test_files_of_another_checkpoint_are_found_out(tmp_path: Path) -> None:
    train(tmp_path)
    os.replace(tmp_path / "step-00000008/model.safetensors", tmp_path / "step-00000012/model.safetensors")
    with pytest.raises(
        duoka.CheckpointError, match=r"all checkpoints in .* are damaged: .*SHA-256 is wrong; .* is missing"
    ):
        train(tmp_path)
    with pytest.raises(duoka.CheckpointError, match="are damaged"):  # and the next attempt does not start over
        train(tmp_path)


@pytest.mark.parametrize(
    ("name", "stride"),
    [
        ("manifest.json", 1),
        ("model.safetensors", 1),
        ("states.json", 9),
        pytest.param("states.json", 1, marks=pytest.mark.long),
        pytest.param("states.safetensors", 1, marks=pytest.mark.long),
    ],
)
def test_every_flipped_byte_is_found(name: str, stride: int, tmp_path: Path) -> None:
    with small(tmp_path, 1) as saved:
        saved.save()
    folder = tmp_path / "step-00000000"
    path = folder / name
    data = path.read_bytes()
    for number in range(0, len(data), stride):
        path.write_bytes(data[:number] + bytes([data[number] ^ (1 << number % 8)]) + data[number + 1 :])
        with pytest.raises(duoka.CheckpointDamaged):
            checkpoints.check(folder, checkpoints.read(folder), (name,))
        if number % 100 == 0:
            assert_not_loaded(tmp_path)
    path.write_bytes(data)
    assert value_in(tmp_path) == 1


def assert_not_loaded(directory: Path) -> None:
    with small(directory, 2) as fresh:
        with pytest.raises(duoka.CheckpointError, match="are damaged"):
            fresh.restore()
        assert torch.equal(fresh._states.objects["model"].bias, torch.full((2,), 2.0))


def test_a_checkpoint_of_a_newer_format_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("duoka.checkpoint.directory.FORMAT", 2)
        train(tmp_path)
    with pytest.raises(duoka.CheckpointError, match="has format 2; this version of duoka reads format 1"):
        train(tmp_path)


def test_what_was_added_to_a_script_is_named(tmp_path: Path) -> None:
    with small(tmp_path, 1) as saved:
        saved.save()
    saved = duoka.Checkpoint(tmp_path, {"model": filled(0), "note": [], "scheduler": {}})
    with pytest.raises(duoka.CheckpointError, match="has no state 'scheduler'; it has model, note, random"):
        saved.restore()
    saved.close()
    saved = duoka.Checkpoint(tmp_path, {"model": filled(0)})
    with pytest.warns(UserWarning, match="not restored from .*: note"):
        saved.restore()


def test_another_model_is_one_table(tmp_path: Path) -> None:
    with small(tmp_path, 1) as saved:
        saved.save()
    saved = duoka.Checkpoint(tmp_path, {"model": nn.Linear(3, 5), "note": []})
    with pytest.raises(duoka.WeightsMismatch, match=r"wrong shape  weight  \(5, 3\) in the model"):
        saved.restore()


def test_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    with small(tmp_path, 1) as saved:
        saved.save()
    with (
        small(tmp_path, 2) as saved,
        pytest.raises(duoka.CheckpointError, match="holds checkpoints of an earlier run"),
    ):
        saved.save()
    assert value_in(tmp_path) == 1


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    first, second = small(tmp_path, 1), small(tmp_path, 2)
    first.save()
    message = re.escape(f"is being written by another run (process {os.getpid()} on ")
    for use in (second.save, second.restore):
        with pytest.raises(duoka.CheckpointBusy, match=message):
            use()
    first.close()
    assert second.restore() is not None


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    for use in ("save", "restore"):
        with pytest.raises(duoka.CheckpointError, match="out is a file; a checkpoint needs a directory"):
            getattr(small(tmp_path / "out", 1), use)()
    with pytest.raises(duoka.CheckpointError, match="cannot be written"):
        small(tmp_path / "out" / "below", 1).save()


def test_a_directory_that_may_not_be_written() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest creates its folders for root only if run as root
        os.chmod(folder, 0o555)
        saved, save_weights = small(Path(folder) / "out", 1), duoka.save_weights  # imported while that is allowed

        def act() -> None:
            if os.geteuid() == 0:  # root may write everywhere
                os.setuid(65534)
            with pytest.raises(duoka.CheckpointError, match=r"cannot be written: .*Permission denied"):
                saved.save()
            with pytest.raises(duoka.WeightsError, match=r"the old file is unchanged: .*Permission denied"):
                save_weights(filled(1), Path(folder) / "net.safetensors")

        assert in_child(act) == 0
        os.chmod(folder, 0o755)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Return this process's signal handlers, and restore them afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.usefixtures("handlers")
def test_a_preempted_run_saves_and_says_that_it_is_to_be_started_again(number: int, tmp_path: Path) -> None:
    whole = outcome(train(tmp_path / "whole"))
    original = duoka.Checkpoint.step

    def step(self: duoka.Checkpoint) -> None:
        if self.step_number == 5:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # a second signal has no effect
        original(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(duoka.Checkpoint, "step", step)
        with pytest.raises(Preempted) as raised:
            train(tmp_path / "cut")
    assert raised.value.code == AGAIN == 75
    os.kill(os.getpid(), number)  # nor does one during exit, which would change the exit code
    assert steps(tmp_path / "cut")[-1] == "step-00000006"
    assert outcome(train(tmp_path / "cut")) == whole


@pytest.mark.usefixtures("handlers")
def test_a_signal_after_the_last_step_is_for_what_follows(tmp_path: Path) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    with small(tmp_path, 1) as saved:
        for _ in saved.epochs(1):
            pass
        assert seen == []
    with small(tmp_path, 1) as saved:
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == []
    assert seen == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM] * 2


def test_a_loader_can_call_step_by_itself(tmp_path: Path) -> None:
    class Hooked(nn.Module):
        def register_step_hook(self, hook: Any) -> None:
            self.hook = hook

    hooked = Hooked()
    saved = duoka.Checkpoint(tmp_path, {"loader": hooked}, every_steps=2)
    for _ in range(5):
        hooked.hook()
    saved.close()
    assert steps(tmp_path) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("every_steps", 0), ("every_epochs", 1.5), ("every_seconds", -1), ("keep", 0), ("best", "most")],
)
def test_wrong_options(option: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(duoka.OptionError, match=f"{option} must be"):
        duoka.Checkpoint(tmp_path, {}, **{option: value})


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "", "random", "states", "manifest"])
def test_wrong_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(duoka.OptionError, match="states must be named by letters"):
        duoka.Checkpoint(tmp_path, {name: 1})


def test_a_metric_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(duoka.OptionError, match="metric must be an int or float"):
        small(tmp_path, 1).save(metric=float("nan"))


def test_leftovers_of_a_run_that_died_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".step-00000003.abcd.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").touch()
    with small(tmp_path, 1) as saved, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert saved.restore() is None
        saved.save()
    assert not leftover.exists()
