"""CTC over padded sequences, a collate function that pads, time first, then a hidden state carried over batches."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Words(Dataset):
    def __init__(self):
        self.items = []
        for _ in range(70):
            length = int(torch.randint(6, 11, ()))
            self.items.append((torch.randn(length, 5), torch.randint(1, 6, (int(torch.randint(2, 4, ())),))))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def pad(samples):
    sounds, words = zip(*samples)
    lengths = torch.tensor([len(sound) for sound in sounds]), torch.tensor([len(word) for word in words])
    return pad_sequence(sounds), pad_sequence(words, batch_first=True), *lengths


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(5, 12)
        self.out = nn.Linear(12, 6)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)


model = Listener()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CTCLoss()
for epoch in range(2):
    total = exact = 0
    for sounds, words, heard, spoken in DataLoader(Words(), 16, shuffle=True, collate_fn=pad):
        scores = model(sounds)
        loss = criterion(scores, words, heard, spoken)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        best = scores.argmax(2).t()
        for guess, word, length in zip(best, words, spoken):
            kept = torch.unique_consecutive(guess)
            exact += int(kept[kept > 0].tolist()[:length] == word[:length].tolist())
    print(epoch, f"{total:.4f}", exact, tuple(scores.shape))

text = torch.randint(0, 20, (8, 60))  # 8 streams side by side, read in pieces of 6
embed, rnn, out = nn.Embedding(20, 8), nn.LSTM(8, 16), nn.Linear(16, 20)
parameters = [*embed.parameters(), *rnn.parameters(), *out.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.5)
state = (torch.zeros(1, 8, 16), torch.zeros(1, 8, 16))
total = 0
for start in range(0, 54, 6):
    piece, following = text[:, start : start + 6].t(), text[:, start + 1 : start + 7].t()
    hidden, state = rnn(embed(piece), tuple(part.detach() for part in state))
    loss = F.cross_entropy(out(hidden).reshape(-1, 20), following.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 0.25)
    optimizer.step()
    total += loss.item()
print(f"{total:.4f}", f"{state[0].abs().mean().item():.4f}")
torch.save([model.state_dict(), embed.state_dict(), rnn.state_dict(), out.state_dict()], sys.argv[1])
