"""A classifier of sequences: torch's own transformer layers with dropout, AdamW and clipping."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(5000, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 5)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.encoder(x).mean(1))


model = Classifier()
data = TensorDataset(torch.randint(0, 5000, (256, 64)), torch.randint(0, 4, (256,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for tokens, y in DataLoader(data, batch_size=32):
    loss = nn.functional.cross_entropy(model(tokens), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(loss.item())
