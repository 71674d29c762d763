"""Models that were saved are loaded, on the meta device first, and trained on: one of them with a rotary part."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

torch.manual_seed(0)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50}
SMALL = {"num_attention_heads": 4, "num_hidden_layers": 2, **SIZES}
MADE = (
    BertModel(BertConfig(**SMALL)),
    GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64)),
    LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=2)),
)
tokens = torch.randint(0, 50, (16, 10))

for made in MADE:
    name = type(made).__name__
    made.save_pretrained(name)
    model = type(made).from_pretrained(name)
    print(name, *(f"{key} {value.double().sum():.4f}" for key, value in model.named_buffers()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch in DataLoader(tokens, 8):
        loss = (model(input_ids=batch).last_hidden_state - 0.5).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.5f}")
    torch.save(model.state_dict(), f"{name}.pt")
