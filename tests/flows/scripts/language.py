"""A small GPT that returns its loss, with tied weights, a mask kept as a buffer, generate(), and a hook on it."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
SIZE, VOCABULARY = 12, 17


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(SIZE, SIZE)).view(1, 1, SIZE, SIZE))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.qkv(x).split(c, dim=2)
        )
        attention = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
        attention = attention.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        self.entropy = -(F.softmax(attention, -1) * F.log_softmax(attention, -1).clamp(min=-20)).sum(-1).mean()
        out = self.drop(F.softmax(attention, dim=-1)) @ v
        return self.out(out.transpose(1, 2).contiguous().view(b, t, c))


class GPT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(SIZE, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, 2)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width), nn.Dropout(0.1))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, ids, targets=None):
        x = self.words(ids) + self.places(torch.arange(ids.size(1), device=ids.device))
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        logits = self.head(self.norms[2](x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, ids, count):
        for _ in range(count):
            logits, _ = self(ids[:, -SIZE:])
            logits = logits[:, -1, :] / 0.8
            least = torch.topk(logits, 5)[0][:, [-1]]
            logits[logits < least] = -float("Inf")
            ids = torch.cat((ids, torch.multinomial(F.softmax(logits, dim=-1), 1)), dim=1)
        return ids


text = torch.randint(0, VOCABULARY, (90, SIZE + 1))
targets = text[:, 1:].clone()
targets[:, :3] = -1
model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
seen = []
model.mlp.register_forward_hook(lambda module, args, out: seen.append(out.detach().norm().item()))
for epoch in range(2):
    model.train()
    total = entropy = 0
    for ids, wanted in DataLoader(TensorDataset(text[:, :-1], targets), batch_size=18, shuffle=True, drop_last=True):
        logits, loss = model(ids, wanted)
        (loss + 0.01 * model.attention.entropy).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.item()
        entropy += model.attention.entropy.item()
    model.eval()
    print(epoch, f"{total:.4f} {entropy:.4f} {sum(seen):.2f}", scheduler.get_last_lr())
print(model.generate(text[:6, :4], 8).tolist())
print(model.generate(torch.zeros(1, 1, dtype=torch.long), 5).tolist())
torch.save(model.state_dict(), sys.argv[1])
