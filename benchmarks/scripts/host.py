"""Training and evaluation of models of many small functions: `host.py MODEL [ddp|fully_shard|api]`.

A plain script; with ddp and fully_shard it is distributed by hand, on its rows of every batch, with api by duoka's
API. Rank 0 prints medians: microseconds of processor time that its thread takes for a forward pass in training and in
evaluation (clock: thread_time), milliseconds for a step and for a batch of evaluation, and milliseconds for the first
step.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ROUNDS = int(os.environ.get("ROUNDS", "12"))
STEPS = 5  # of each round, so that the clock of the script is read seldom
WIDTH, LENGTH, HEADS, TOKENS = 16, 16, 2, 64


class Block(nn.Module):
    """A block of a GPT, as people write it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.gelu, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.drop1, self.drop2 = (nn.Dropout(dropout) if dropout else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.size()
        q, k, v = self.attention(self.ln1(x)).split(width, dim=2)
        k = k.view(n, length, HEADS, width // HEADS).transpose(1, 2)
        q = q.view(n, length, HEADS, width // HEADS).transpose(1, 2)
        v = v.view(n, length, HEADS, width // HEADS).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(n, length, width)
        x = x + self.drop1(self.out(y))
        return x + self.drop2(self.down(self.gelu(self.up(self.ln2(x)))))


class GPT(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(12))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.size(1))))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride > 1:
            self.down = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.down is None else self.down(x)
        return self.relu(out)


def resnet() -> nn.Module:
    """A ResNet-18, of an eighth of its width."""
    widths = [(8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    blocks = [Residual(*width) for width in widths]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, TOKENS))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.size(0), WIDTH)
        for step in range(x.size(1)):
            h, c = self.cell(x[:, step], (h, c))
        return self.head(h)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.tokens, self.encoder = nn.Embedding(TOKENS, WIDTH), nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(ids)).mean(1))


class Bert(nn.Module):
    """Hugging Face's BERT, of four layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"vocab_size": TOKENS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 4}
        config = BertConfig(**sizes, intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH, num_labels=TOKENS)
        self.model = BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, attention_mask=torch.ones_like(ids)).logits


MODELS = {
    "gpt": (lambda: GPT(0.0), "sequence"),
    "gpt-dropout": (lambda: GPT(0.1), "sequence"),
    "resnet": (resnet, "image"),
    "lstm": (Recurrent, "series"),
    "encoder": (Encoder, "ids"),
    "bert": (Bert, "ids"),
}

way = sys.argv[2] if len(sys.argv) > 2 else "plain"
by_hand = way in ("ddp", "fully_shard")
rank, world_size = 0, 1
if by_hand:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

torch.manual_seed(0)
make, kind = MODELS[sys.argv[1]]
model, N = make(), 8
shapes = {"image": (N, 3, 8, 8), "series": (N, 50, WIDTH)}
batches = []
for _ in range(4):
    x = torch.randn(shapes[kind]) if kind in shapes else torch.randint(0, TOKENS, (N, LENGTH))
    y = torch.randint(0, TOKENS, (N, LENGTH) if kind == "sequence" else (N,))
    batches.append((x, y))
if by_hand:  # its rows of every batch
    batches = [tuple(part.chunk(world_size)[rank] for part in batch) for batch in batches]
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        for part in (*model.blocks, model):
            fully_shard(part)
else:
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    data = torch.utils.data.TensorDataset(x, y)
    if way == "api":
        import duoka

        run = duoka.start()
        run.model(model)
        rank, batches = run.rank, list(run.loader(data, batch_size=N))
    else:
        batches = list(torch.utils.data.DataLoader(data, batch_size=N))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(steps: int) -> float:
    """Processor time of a forward pass, in seconds."""
    spent = 0.0
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        start = time.thread_time()
        scores = model(inputs)
        spent += time.thread_time() - start
        loss = F.cross_entropy(scores.view(-1, TOKENS), targets.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return spent / steps


@torch.no_grad()
def evaluate(steps: int) -> float:
    """The same in evaluation."""
    spent, right = 0.0, torch.zeros((), dtype=torch.long)
    network = model.module if way == "ddp" else model
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        start = time.thread_time()
        scores = network(inputs)
        spent += time.thread_time() - start
        right += (scores.argmax(-1) == targets).sum()
    return spent / steps


def timed(work) -> tuple[float, float]:
    start = time.perf_counter()
    spent = work(STEPS)
    return spent * 1e6, (time.perf_counter() - start) / STEPS * 1e3


start = time.perf_counter()
train(1)
first = (time.perf_counter() - start) * 1e3
train(7), model.eval(), evaluate(8)
trained, evaluated = [], []
for _ in range(ROUNDS):
    model.train()
    trained.append(timed(train))
    model.eval()
    evaluated.append(timed(evaluate))
if rank == 0:
    each = [*zip(*trained, strict=True), *zip(*evaluated, strict=True)]
    print(*(f"{statistics.median(values):.6g}" for values in each), f"{first:.6g}")
if by_hand:
    del model
    dist.destroy_process_group()
