"""A language model: embedding, an LSTM of two layers with dropout between, carried states, tied weights, bfloat16."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 24)
        self.lstm = nn.LSTM(24, 24, 2, dropout=0.2)
        self.last = nn.Linear(24, 30)
        self.last.weight = self.embedding.weight

    def forward(self, tokens, state):
        out, state = self.lstm(self.embedding(tokens), state)
        return self.last(out), state


torch.manual_seed(0)
text = torch.randint(0, 30, (61, 20))  # (time, batch)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for epoch in range(3):
    state = torch.zeros(2, 20, 24), torch.zeros(2, 20, 24)
    for start in range(0, 60, 15):
        state = tuple(one.detach() for one in state)
        tokens, target = text[start : start + 15], text[start + 1 : start + 16]
        with torch.autocast("cpu", torch.bfloat16, enabled=epoch == 2):
            out, state = model(tokens, state)
            loss = F.cross_entropy(out.float().view(-1, 30), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    print(loss.item())

digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.cpu().numpy().tobytes())
print(digest.hexdigest())
