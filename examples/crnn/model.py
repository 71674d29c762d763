"""CRNN (Shi, Bai and Yao 2016): convolutions see, a bidirectional LSTM reads from left to right and back."""

import torch
from torch import nn


class CRNN(nn.Module):
    """channels: of the convolutions. height: of the images in pixels. classes: characters and blank."""

    def __init__(self, channels: list[int], hidden: int, dropout: float, height: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 1
        for i, outside in enumerate(channels):
            pool = nn.MaxPool2d(2) if i == 0 else nn.MaxPool2d((2, 1))  # a column for every 2 pixels is left
            layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(), pool]
            inside = outside
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.reader = nn.LSTM(inside * (height >> len(channels)), hidden, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(2 * hidden, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, 1, height, width] to the logarithms of probabilities, [batch, columns, classes]."""
        columns = self.features(images).flatten(1, 2).transpose(1, 2)  # [batch, columns, channels * rows]
        read, _ = self.reader(self.dropout(columns))
        return self.scores(read).log_softmax(dim=-1)
