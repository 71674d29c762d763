"""A GPT with tied weights, which draws its batches itself and accumulates gradients over two of them."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

torch.manual_seed(0)
WIDTH, HEADS, LENGTH, WORDS = 256, 8, 96, 8000


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = (
            part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.attend(self.norm(x)).chunk(3, -1)
        )
        found = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mix(found.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.narrow(gelu(self.widen(self.last(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


model = Gpt()
text = torch.randint(0, WORDS, (20_000,))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(6):
    for _ in range(2):
        starts = torch.randint(0, len(text) - LENGTH - 1, (16,))
        tokens = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        targets = torch.stack([text[start + 1 : start + LENGTH + 1] for start in starts.tolist()])
        loss = model(tokens, targets) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
