"""GPT-2 trained on counting, in a loop written by hand; then it goes on by itself."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
start = torch.randint(0, 50, (120, 1))
data = (start + torch.arange(16)) % 50

config = GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=49)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(3):
    model.train()
    for step, x in enumerate(DataLoader(data, batch_size=17, shuffle=True)):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print(f"{epoch} {step} loss {loss.item():.5f}")
model.eval()
prompts = data[:4, :5]
print(model.generate(prompts, max_new_tokens=6, do_sample=False, pad_token_id=49).tolist())
print(model.generate(prompts, max_new_tokens=6, do_sample=True, top_k=5, pad_token_id=49).tolist())
for x in DataLoader(data, batch_size=6):
    print(model.generate(x[:, :5], max_new_tokens=4, do_sample=False, pad_token_id=49).tolist())
    break
torch.save(model.state_dict(), "gpt2.pt")
