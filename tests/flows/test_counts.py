"""What a step lets the host wait for, copies and sends, counted on simulated cards, beside `python` on one card."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.flows.flow import Flow

pytestmark = pytest.mark.cards
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
"""
LOOP = """
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(DataLoader(data, batch_size=16, pin_memory=True, drop_last=True)):
    x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    {clip}
    optimizer.step()
    if step % 10 == 0:
        print(f"{{loss.item():.4f}}")
"""
MODELS = {
    "mlp": """
data = TensorDataset(torch.randn(384, 8), torch.randint(0, 3, (384,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
""",
    "cnn": """
data = TensorDataset(torch.randn(384, 1, 6, 6), torch.randint(0, 3, (384,)))
model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
""",
}
GPT = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        parts = self.mixed(self.before(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(16, 8), nn.Embedding(6, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        y = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        return self.head(y).transpose(1, 2)

tokens = torch.randint(0, 16, (384, 7))
data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
model = GPT()
"""
MODELS["gpt"] = GPT
FROM, TO = 5, 20  # steps: the first ones agree on shapes


def counted(flow: Flow, program: str, script: str, *words: str) -> Counter[str]:
    """The counts of steps FROM to TO on the first card."""
    path = flow.folder / f"counts-{len([*flow.folder.iterdir()])}"
    run = flow.python if program == "python" else flow.run
    args = [] if program == "python" else ["run", "-q", "--devices", "0,1", *words]
    run([*args, flow.write("train.py", script)], env={"SIMULATED_COUNTS": str(path)}).ok()
    total: Counter[str] = Counter()
    for line in path.with_name(f"{path.name}.0").read_text().splitlines()[FROM:TO]:
        total.update(json.loads(line))
    return total


def waits(counts: Counter[str]) -> dict[str, int]:
    """What lets the host wait for a card."""
    return {name: count for name, count in counts.items() if name.startswith("sync.") or name.endswith(".blocking")}


def collectives(counts: Counter[str]) -> int:
    return sum(count for name, count in counts.items() if name.startswith("nccl."))


# Collectives of one rank in a step: buckets of gradients, the loss's numerator and denominator, BatchNorm.
MOST = {"mlp": 2, "cnn": 6, "gpt": 2}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("model", [*MODELS, pytest.param("mlp", marks=pytest.mark.npu, id="mlp-npu")])
def test_a_step_adds_no_wait_of_the_host(flow: Flow, model: str, clip: bool) -> None:
    clipping = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)" if clip else ""
    script = HEAD + MODELS[model] + LOOP.format(clip=clipping)
    alone, shared = (counted(flow, program, script) for program in ("python", "duoka"))
    assert waits(shared) == waits(alone)
    assert 0 < collectives(shared) <= MOST[model] * (TO - FROM)
    assert shared["copy.to_card.unpinned"] == alone["copy.to_card.unpinned"] == 0


BLOCKS = 4  # of GPT: the embeddings and the head, and each of its list


def test_a_step_with_sharded_parameters(flow: Flow) -> None:
    script = HEAD + GPT + LOOP.format(clip="").replace("lr=1e-3", "lr=1e-3, fused=True")
    alone, steps = counted(flow, "python", script), TO - FROM
    for offload in (False, True):
        words = ["--strategy", "fsdp", *["--cpu-offload"] * offload]
        shared = counted(flow, "duoka", script, *words)
        # In the forward pass each, and the first again for the head; in the backward pass those that were released.
        assert shared["nccl.all_gather"] <= (BLOCKS + 1 + BLOCKS - 2) * steps, words
        sent = (BLOCKS + 1) * steps  # gradients of the first block leave in two parts
        assert shared["nccl.reduce_scatter"] == sent, words
        assert shared["nccl.all_reduce"] == steps, words  # the loss
        if offload:  # a copy of each block that is gathered, and of its gradients, for which the host waits
            assert shared.pop("sync.event") == sent
            assert shared["copy.beside"] == shared["nccl.all_gather"] + sent
        assert waits(shared) == waits(alone), words
        assert shared["copy.to_card.unpinned"] == 0, words


BY_HAND = {
    "together": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "one by one": "nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)",
    "a sum": "n = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5;"
    "[p.grad.div_(n) for p in model.parameters()]",
    "read": "n = sum(p.grad.data.norm(2).item() ** 2 for p in model.parameters()) ** 0.5;"
    "[p.grad.data.mul_(1 / n) for p in model.parameters()]",
}


def test_norms_of_sharded_gradients_are_exchanged_together(flow: Flow) -> None:
    plain = HEAD + GPT + LOOP
    without = collectives(counted(flow, "duoka", plain.format(clip=""), "--strategy", "fsdp"))
    for how, clip in BY_HAND.items():
        alone = counted(flow, "python", plain.format(clip=clip))
        clipped = counted(flow, "duoka", plain.format(clip=clip), "--strategy", "fsdp")
        assert collectives(clipped) == without + TO - FROM, how
        assert waits(clipped) == waits(alone), how
