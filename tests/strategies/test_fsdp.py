"""Sharded models: one device's numbers, a part of the memory, and one clear error where they cannot be had.

What a loop does with gradients is in test_conformance.py.
"""

from __future__ import annotations

import copy
import ctypes
import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import duoka
from duoka.collectives.process import ProcessCollectives
from duoka.errors import OptionError, Refused
from duoka.origins.origin import Forked
from duoka.run import models
from duoka.sharding.block import divide
from duoka.sharding.parameter import Sharded
from duoka.system import libc
from tests.run.ranks import on_ranks
from tests.strategies.test_conformance import gradients, leaves, weights

DATA = torch.Generator().manual_seed(5)
IMAGES, LABELS = torch.randn(29, 3, 6, 6, generator=DATA), torch.randint(0, 4, (29,), generator=DATA)
TOKENS = torch.randint(0, 11, (29, 5), generator=DATA)
ROWS = torch.randn(29, 6, generator=DATA)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))


def cnn() -> nn.Module:
    body = [nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(80, 4))


class Transformer(nn.Module):
    """With tied weights, and a parameter that is nobody's module's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens) + self.positions, 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


def inputs(model: nn.Module) -> Tensor:
    first = next(part for part in model.modules() if next(part.parameters(recurse=False), None) is not None)
    return {nn.Conv2d: IMAGES, nn.Linear: ROWS}.get(type(first), TOKENS)


def trained(run: duoka.Run, make: Callable[[], nn.Module], strategy: str, dtype: torch.dtype = torch.float32) -> Any:
    """The losses of two epochs with Adam, the accuracy that comes of it, and the weights."""
    model = make()
    data = (inputs(model), LABELS)
    model = run.model(model, strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype is torch.float16)
    # eps: a bias of keys has no gradient but rounding's, which Adam makes steps of
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for _ in range(2):
        for x, y in run.loader(data, batch_size=9, shuffle=True):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                scores = model(x)
            loss = F.cross_entropy(scores.float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).sum().item() for x, y in run.loader(data, batch_size=9)]
    return losses, right, weights(model)


def test_training_is_as_on_one_device() -> None:
    def work(run: duoka.Run, strategy: str) -> Any:
        return [trained(run, make, strategy) for make in (mlp, cnn, Transformer)]

    (expected,) = on_ranks(1, lambda run: work(run, "auto"))
    for ranks in (1, 2):  # three: test_conformance.py
        for found in on_ranks(ranks, lambda run: work(run, "fsdp")):
            assert leaves(found) == pytest.approx(leaves(expected), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("how", [{"randomness": "worker"}, {"batch_norm": "local"}])
def test_options_of_the_run_hold(how: dict[str, Any]) -> None:
    ddp = on_ranks(2, lambda run: trained(run, cnn, "auto"), **how)
    fsdp = on_ranks(2, lambda run: trained(run, cnn, "fsdp"), **how)
    assert leaves(fsdp) == pytest.approx(leaves(ddp), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_near_to_one_device_s(dtype: torch.dtype) -> None:
    (expected,) = on_ranks(1, lambda run: trained(run, Transformer, "auto", dtype))
    for found in on_ranks(2, lambda run: trained(run, Transformer, "fsdp", dtype)):
        assert leaves(found[0]) == pytest.approx(leaves(expected[0]), rel=3e-2)


def test_each_rank_holds_its_part() -> None:
    def work(run: duoka.Run) -> Any:
        model = Transformer()
        sizes = [parameter.numel() for parameter in model.parameters()]
        before = list(model.parameters())
        run.model(model, strategy="fsdp")
        optimizer = torch.optim.Adam(model.parameters())
        x, y = next(iter(run.loader((TOKENS, LABELS), 9)))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        parts = [parameter.to_local().numel() for parameter in model.parameters()]
        grads = [parameter.grad.to_local().numel() for parameter in model.parameters()]
        state = [
            value.to_local().numel() for kept in optimizer.state.values() for value in kept.values() if value.dim()
        ]
        same = all(map(operator.is_, before, model.parameters()))
        return sum(sizes), sum(parts), sum(grads), sum(state), same

    for size, parts, grads, state, same in on_ranks(2, work):
        assert same
        assert parts == pytest.approx(size / 2, rel=0.1)
        assert grads == parts
        assert state == 2 * parts


# --- which parts come together


def paths(module: nn.Module) -> list[str]:
    names = {part: name for name, part in module.named_modules()}
    return [names[block] for block in divide(module)]


def test_blocks_are_the_entries_of_the_outermost_lists() -> None:
    assert paths(Transformer()) == ["blocks.0", "blocks.1"]
    assert paths(mlp()) == ["0", "3"]
    nested = nn.Sequential(nn.Sequential(mlp(), nn.ReLU()), nn.ModuleDict({"a": nn.Linear(1, 1)}))
    assert paths(nested) == ["0.0.0", "0.0.3", "1.a"]
    assert paths(nn.Linear(1, 1)) == []


def test_blocks_share_nothing() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert paths(tied) == ["2"]
    again = nn.Linear(3, 3)
    assert paths(nn.Sequential(again, nn.ReLU(), again)) == []


def test_a_layer_that_is_used_several_times() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Linear(6, 6)
            self.layers = nn.ModuleList([layer, layer, nn.Linear(6, 4)])
            self.layers[2].bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](self.layers[1](self.layers[0](x).tanh()).tanh())

    def work(run: duoka.Run, strategy: str) -> Any:
        model = run.model(Repeated(), strategy=strategy)
        for x, y in run.loader((ROWS, LABELS), 9):  # several calls before each backward pass
            (F.cross_entropy(model(x), y) + F.cross_entropy(model(-x), y)).backward()
        return gradients(model)

    (expected,) = on_ranks(1, lambda run: work(run, "auto"))
    for found in on_ranks(2, lambda run: work(run, "fsdp")):
        assert leaves(found) == pytest.approx(leaves(expected), rel=1e-4, abs=1e-6)


# --- beside other things of a run


def test_one_model_is_sharded_and_another_is_not() -> None:
    def work(run: duoka.Run, strategy: str) -> Any:
        generator = run.model(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)), strategy=strategy)
        critic = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
        of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
        of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
        norms = []
        for x, _ in run.loader((ROWS, LABELS), 9):
            fake = generator(run.batch(torch.randn(len(x), 3)))
            of_critic.zero_grad()
            (slope,) = torch.autograd.grad(critic(x.requires_grad_()).sum(), x, create_graph=True)
            loss = critic(fake.detach()).mean() - critic(x).mean() + (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            of_critic.step()
            of_generator.zero_grad()
            (-critic(fake).mean()).backward()
            both = [*generator.parameters(), *critic.parameters()]
            norms.append(
                [nn.utils.clip_grad_norm_(both, 0.5).item(), nn.utils.clip_grad_norm_(both, 0.4, torch.inf).item()]
            )
            of_generator.step()
        return norms, weights(generator, critic)

    (expected,) = on_ranks(1, lambda run: work(run, "auto"))
    for found in on_ranks(2, lambda run: work(run, "fsdp")):
        assert leaves(found) == pytest.approx(leaves(expected), rel=1e-4, abs=1e-5)


def test_pieces_of_batches() -> None:
    def work(run: duoka.Run, strategy: str) -> Any:
        model = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), strategy=strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for batch in run.loader((ROWS, LABELS), 9, accumulate=3):
            optimizer.zero_grad()
            for x, y in batch:
                F.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
        return weights(model)

    (expected,) = on_ranks(1, lambda run: work(run, "auto"))
    for found in on_ranks(2, lambda run: work(run, "fsdp")):
        assert leaves(found) == pytest.approx(leaves(expected), rel=1e-4, abs=1e-5)


def test_no_sync_communicates_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    start = ProcessCollectives.start_all_to_all
    monkeypatch.setattr(
        ProcessCollectives, "start_all_to_all", lambda self, rows: (sent.append(rows.numel()), start(self, rows))[1]
    )

    def work(run: duoka.Run, strategy: str) -> Any:
        torch.manual_seed(1)
        model = run.model(mlp(), strategy=strategy)
        first, second = model[0], model[3]
        batches = [x for x, _ in run.loader((ROWS, LABELS), 9)]
        counts, seen = [], []

        def sums(*losses: Tensor) -> None:
            for loss in losses:
                loss.backward()
            counts.append(len(sent))
            seen.append([-1.0 if p.grad is None else p.grad.norm().item() for p in model.parameters()])
            counts.append(len(sent))
            sent.clear()

        sums(*(model(x).square().mean() for x in batches[:3]))
        model.zero_grad()
        with run.no_sync(model):
            for x in batches[:2]:
                model(x).square().mean().backward()
        counts.append(len(sent))
        sums(model(batches[2]).square().mean())  # the last one takes them along
        with run.no_sync(model):
            sums(model(batches[0]).square().mean())  # who reads gradients gets them all
            model(batches[1]).square().mean().backward()
        sums(second(first(batches[0]).detach()).mean())  # a pass that does not reach all
        with run.no_sync(model):
            model(batches[0]).square().mean().backward()
            assert [p.grad for p in copy.deepcopy(model).parameters()] == [None] * 4
            first.weight.grad = None
        sums()
        return seen, counts

    ((expected, _),) = on_ranks(1, lambda run: work(run, "auto"))
    for found, counts in on_ranks(2, lambda run: work(run, "fsdp")):
        assert leaves(found) == pytest.approx(leaves(expected), rel=1e-4, abs=1e-6)
        assert counts == [6, 6, 0, 2, 2, 0, 2, 2, 2, 2, 2]


def test_what_a_pass_leaves_out_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    def work(run: duoka.Run, **how: Any) -> None:
        model = run.model(Spare(), strategy="fsdp", **how)
        for x, y in run.loader((ROWS, LABELS), 9):
            F.cross_entropy(model(x), y).backward()

    on_ranks(2, work)
    assert "for spare (Linear): weight, bias" in capfd.readouterr().err
    with pytest.raises(Refused, match="spare"):
        on_ranks(2, lambda run: work(run, find_unused_parameters=False))


# --- checkpoints and weights


def saved_run(run: duoka.Run, directory: Path, strategy: str, epochs: int) -> Any:
    model = run.model(Transformer(), strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train = run.loader((TOKENS, LABELS), 9, shuffle=True)
    saved = run.checkpoint(directory, model=model, optimizer=optimizer, loader=train)
    losses = []
    for _ in saved.epochs(epochs):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_checkpoints_go_on_whole_and_in_other_parts(tmp_path: Path) -> None:
    (expected,) = on_ranks(1, lambda run: saved_run(run, tmp_path / "whole", "auto", 4))
    found = []
    for ranks, strategy, epochs in ((2, "fsdp", 1), (3, "fsdp", 2), (1, "auto", 3), (2, "fsdp", 4)):
        found += on_ranks(ranks, lambda run: saved_run(run, tmp_path / "parts", strategy, epochs))[0]  # noqa: B023
    assert found == pytest.approx(expected, rel=1e-4)
    (newest, *_) = sorted((tmp_path / "parts").glob("step-*"), reverse=True)
    (other, *_) = sorted((tmp_path / "whole").glob("step-*"), reverse=True)
    for state in ("model", "optimizer"):
        one = {
            name: value for file in newest.glob(f"{state}-*-of-00002.*") for name, value in load_file(file).items()
        }
        two = load_file(other / f"{state}.safetensors")
        assert {name: value.shape for name, value in one.items()} == {name: v.shape for name, v in two.items()}


def test_weights_are_saved_whole_and_loaded_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"

    def save(run: duoka.Run) -> Any:
        model = run.model(Transformer(), strategy="fsdp")
        found = weights(model)
        run.close()
        duoka.save_weights(model, path)  # after the run, too
        return found

    def load(run: duoka.Run) -> Any:
        model = run.model(Transformer(), strategy="fsdp")
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.zero_()
        assert duoka.load_weights(model, path).loaded
        return weights(model)

    expected = on_ranks(2, save)[0]
    assert on_ranks(3, load) == [expected] * 3
    whole = Transformer()
    duoka.load_weights(whole, path)
    assert weights(whole) == expected
    assert set(load_file(path)) <= set(whole.state_dict())


# --- what scripts do around the call


class Loss(nn.Module):
    """Returns its loss, and has a part that is called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += len(x)
        return self.scale * F.cross_entropy(self.head(self.encoder[2](self.encoder[:2](x))), y)


def around(run: duoka.Run, strategy: str) -> Any:
    """An optimizer made before, hooks, an average, parts called by themselves, gradients of gradients."""
    model = Loss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    held = list(model.parameters())
    seen: list[Any] = []
    early: list[list[float]] = [[] for _ in held]  # what hooks get that are there before the parameters are sharded
    handles = [
        parameter.register_hook(lambda grad, own=own: (own.append(grad.norm().item()), grad.clamp(-0.1, 0.1))[1])
        for parameter, own in zip(held, early, strict=True)
    ]
    run.model(model, strategy=strategy)
    average = copy.deepcopy(model)
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.mean().item()))
    model.head.weight.register_hook(lambda grad: (seen.append(grad.norm().item()), grad * 2)[1])
    for x, y in run.loader((ROWS, LABELS), 9):
        optimizer.zero_grad()
        loss = model(x, y)
        features = model.encoder(x.requires_grad_())
        (slope,) = torch.autograd.grad(features.square().sum(), x, create_graph=True)
        (asked,) = torch.autograd.grad(loss, model.encoder[0].weight, retain_graph=True)
        (loss + 0.01 * slope.square().mean()).backward()
        seen += [loss.item(), asked.norm().item(), model.encoder[0].weight.norm().item()]
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.2)
        handles.pop().remove()
    assert all(map(operator.is_, held, model.parameters()))
    return seen, early, model.calls, weights(model), weights(average)


def test_what_stands_around_the_call_is_as_on_one_device(capfd: pytest.CaptureFixture[str]) -> None:
    (expected,) = on_ranks(1, lambda run: around(run, "auto"))
    for ranks in (2, 3):
        for found in on_ranks(ranks, lambda run: around(run, "fsdp")):
            assert leaves(found) == pytest.approx(leaves(expected), rel=1e-4, abs=1e-5)
    assert "each rank holds 1/3 of 164 parameters of Loss" in capfd.readouterr().err


def test_predictions_of_a_model_that_no_rank_holds() -> None:
    def work(run: duoka.Run, strategy: str) -> Any:
        model = run.model(mlp(), strategy=strategy)
        own: list[int] = []
        model[0].register_forward_hook(lambda module, args, out: own.append(len(getattr(out, "_rows", out))))
        found = duoka.predict(model, ROWS, batch_size=9)
        return found.stack().tolist(), own

    ((expected, whole),) = on_ranks(1, lambda run: work(run, "auto"))
    for rank, (found, own) in enumerate(on_ranks(2, lambda run: work(run, "fsdp"))):
        assert leaves(found) == pytest.approx(leaves(expected), rel=1e-5, abs=1e-6)
        assert own == [n // 2 + (rank and n % 2) for n in whole] == [4 + rank, 4 + rank, 4 + rank, 1]


def test_what_is_compiled_runs_uncompiled(capfd: pytest.CaptureFixture[str]) -> None:
    def work(run: duoka.Run, strategy: str) -> Any:
        models = [run.model(mlp(), strategy=strategy), mlp()]
        if strategy == "fsdp":
            models[0].compile()
            models[1].compile()
        run.model(models[1], strategy=strategy)
        x, _ = next(iter(run.loader((ROWS, LABELS), 9)))
        return [model.eval()(x).sum().item() for model in models]

    (expected,) = on_ranks(1, lambda run: work(run, "auto"))
    assert on_ranks(2, lambda run: work(run, "fsdp"))[0] == pytest.approx(expected, rel=1e-5)
    assert "what is compiled runs uncompiled" in capfd.readouterr().err


def test_torch_save_writes_whole_tensors(tmp_path: Path) -> None:
    def work(run: duoka.Run) -> Any:
        model = run.model(mlp(), strategy="fsdp")
        torch.save(model.state_dict(), tmp_path / f"{run.rank}.pt")
        save_file(model.state_dict(), tmp_path / f"{run.rank}.safetensors")  # imported before the run was opened
        return weights(model)

    (expected, _) = on_ranks(2, work)
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt")
        assert {type(value) for value in state.values()} == {Tensor}
        assert [value.tolist() for value in state.values()] == expected
        loaded = load_file(tmp_path / f"{rank}.safetensors")
        assert {name: value.tolist() for name, value in loaded.items()} == dict(zip(state, expected, strict=True))


def test_parts_may_be_empty() -> None:
    def work(run: duoka.Run, strategy: str) -> Any:
        model = run.model(nn.Sequential(nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 4)), strategy=strategy)
        norms = []
        for x, y in run.loader((ROWS, LABELS), 9):
            F.cross_entropy(model(x), y).backward()
            norms += [
                nn.utils.clip_grad_norm_(model.parameters(), 0.4, kind).item() for kind in (1, 2, 3.5, torch.inf)
            ]
        return norms, gradients(model)

    (expected,) = on_ranks(1, lambda run: work(run, "auto"))
    for found in on_ranks(3, lambda run: work(run, "fsdp")):
        assert leaves(found) == pytest.approx(leaves(expected), rel=1e-4, abs=1e-6)


def test_clipping_exchanges_norms_only() -> None:
    def work(run: duoka.Run, strategy: str) -> Any:
        model = run.model(nn.Sequential(mlp(), nn.Linear(4, 1)), strategy=strategy)
        collectives = run._session.view.ranks
        found, counts = [], []
        for (x, _), kind in zip(run.loader((ROWS, LABELS), 5), (2.0, 1.0, 3.5, torch.inf), strict=False):
            model(x).square().mean().backward()
            for how in ({}, {"error_if_nonfinite": True}):
                before = collectives.begun
                found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.4, kind, **how).item())
                counts.append(collectives.begun - before)
            before = collectives.begun
            found.append(sum(p.grad.norm() ** 2 for p in model.parameters()).item())
            one_by_one = sum(p.numel() > 1 for p in model.parameters())
            counts.append((collectives.begun - before) / (1 if counts[2:] else one_by_one))  # later all together
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return found, counts, gradients(model)

    ((expected, _, grads),) = on_ranks(1, lambda run: work(run, "auto"))
    for found, counts, parts in on_ranks(2, lambda run: work(run, "fsdp")):
        assert leaves([found, parts]) == pytest.approx(leaves([expected, grads]), rel=1e-4, abs=1e-6)
        assert set(counts) == {1}


def test_a_norm_is_nan_on_all_ranks_if_it_is_on_any() -> None:
    def work(run: duoka.Run) -> None:
        model = run.model(mlp(), strategy="fsdp")
        x, y = next(iter(run.loader((ROWS, LABELS), 9)))
        F.cross_entropy(model(x), y).backward()
        next(model.parameters()).grad[0, 0] = torch.nan  # of rank 0
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    on_ranks(2, work)


# --- what cannot be


def refused(work: Callable[[duoka.Run], Any], error: type[Exception], text: str, **how: Any) -> None:
    with pytest.raises(error, match=text):
        on_ranks(2, work, **how)


def test_options_that_cannot_be_had() -> None:
    def asked(run: duoka.Run, **how: Any) -> None:
        run.model(mlp(), strategy="fsdp", **how)

    refused(asked, OptionError, "compress='bf16'", compress="bf16")
    refused(lambda run: asked(run, shares=4), OptionError, "shares must be given with strategy='exact'")

    def exact(run: duoka.Run) -> None:
        run.model(mlp(), strategy="exact")
        asked(run)

    refused(exact, OptionError, "strategy='fsdp'")


@pytest.mark.parametrize("where", ["call", "backward"])
def test_a_rank_that_stays_away_is_named(where: str) -> None:
    def begin() -> None:
        with duoka.start(seed=0) as run:
            model = run.model(mlp(), strategy="fsdp")
            for number, (x, y) in enumerate(run.loader((ROWS, LABELS), 5)):
                away = run.rank == 1 and number == 4
                time.sleep(60 * (away and where == "call"))
                loss = F.cross_entropy(model(x), y)
                time.sleep(60 * (away and where == "backward"))
                loss.backward()
                model[0].weight.grad.norm().item()

    with pytest.raises(duoka.TimedOut, match=r"rank 1 .*has not joined .* at"):
        duoka.launch(begin, devices="cpu:2", timeout=2)


def test_an_error_of_the_model_is_raised_as_it_is() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 2:
                raise RuntimeError("the third call")
            return self.layer(x)

    def work(run: duoka.Run) -> None:
        model = run.model(Failing(), strategy="fsdp")
        for x, _ in run.loader((ROWS, LABELS), 5):
            model(x)

    refused(work, RuntimeError, "the third call")


# --- a copy of the model on each machine


def test_each_machine_holds_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forked, "machine", property(lambda self: str(self.rank // 2)))  # as if there were two

    def work(run: duoka.Run) -> Any:
        found = trained(run, Transformer, "hsdp"), trained(run, cnn, "fsdp")  # in one run
        model = run.model(Transformer(), strategy="hsdp")
        saved = run.checkpoint(tmp_path / str(run.world_size), model=model)
        saved.save()
        saved.wait()
        parts = [part.to_local() if hasattr(part, "to_local") else part for part in model.parameters()]
        return found, weights(model), sum(part.numel() for part in parts)

    ((expected, _, size),) = on_ranks(1, work)
    four = on_ranks(4, work)
    for found, _, part in four:
        assert leaves(found) == pytest.approx(leaves(expected), rel=1e-5, abs=1e-5)
        assert leaves(found) == leaves(four[0][0])  # the machines do not drift apart
        assert 0.45 * size < part < 0.55 * size
    other = Transformer()
    duoka.load_weights(other, tmp_path / "4")
    assert weights(other) == four[0][1]
    (step,) = (tmp_path / "4").glob("step-*")
    assert len(list(step.glob("model-*-of-00002.safetensors"))) == 2


def test_auto_shards_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Forked, "machine", property(lambda self: str(self.rank // 2)))
    whole = sum(parameter.numel() for parameter in mlp().parameters())
    bytes_of_each = {"ddp": 4 * 5 * whole, "hsdp": 4 * 4 * whole // 2, "fsdp": 4 * 4 * whole // 4}

    def work(run: duoka.Run) -> Any:
        found = []
        for needed in bytes_of_each.values():
            two = 2 * needed / models.ROOM + 4  # for the ranks of a machine; the least of all counts
            monkeypatch.setattr(models, "memory_of", lambda device, size=two: size + run.rank)
            model = run.model(mlp())
            first = next(model.parameters())
            found.append(len(first.to_local()) if isinstance(first, Sharded) else 0)
        return found

    for rows in on_ranks(4, work):
        assert rows == [0, 8, 4]
    told = [line for line in capfd.readouterr().err.splitlines() if "strategy auto: " in line]
    assert [line.split("auto: ")[1].split(" for Sequential, as its")[0] for line in told] == ["hsdp", "fsdp"]


def test_machines_of_different_sizes_hold_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forked, "machine", property(lambda self: str(self.rank // 2)))

    def work(run: duoka.Run) -> str:
        with pytest.raises(OptionError) as raised:
            run.model(mlp(), strategy="hsdp")
        return str(raised.value)

    for message in on_ranks(3, work):
        assert "fsdp on machines with different numbers of ranks" in message
        assert "they have 2, 1" in message


def test_a_loaded_optimizer_holds_its_part_before_the_first_step() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()

    def work(run: duoka.Run) -> Any:
        own = run.model(copy.deepcopy(model), strategy="fsdp")
        other = torch.optim.Adam(own.parameters())
        other.load_state_dict(saved)
        moments = [state["exp_avg_sq"] for state in other.state.values()]
        shown = repr(own[0].bias), f"{own[1].bias}"
        return [moment.to_local().numel() for moment in moments], [it.tolist() for it in moments], shown

    moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
    expected = [24, 4, 16, 2], [it.tolist() for it in moments], (repr(model[0].bias), f"{model[1].bias}")
    assert on_ranks(2, work) == [expected] * 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_the_memory_of_the_whole_model_is_returned() -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    def work(run: duoka.Run) -> float:
        libc.return_freed_memory()  # of tests before this one in the process
        before = resident()
        # Each of over 32 MiB, for which the C library never takes memory that was freed before.
        model = nn.Sequential(*(nn.Linear(3072, 3072, bias=False) for _ in range(3)))
        size = sum(parameter.nbytes for parameter in model.parameters())
        assert resident() - before > 0.9 * size
        run.model(model, strategy="fsdp")
        return (resident() - before) / size

    assert max(on_ranks(2, work)) < 0.7
