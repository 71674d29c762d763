"""Hugging Face's GPT-2, small, which returns its loss."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=6000, n_positions=64, n_embd=256, n_layer=4, n_head=8))
model.train()
text = torch.randint(0, 6000, (240, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for tokens in torch.utils.data.DataLoader(text, batch_size=24):
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
