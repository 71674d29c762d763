"""BERT trained to classify sentences of uneven length, in a loop written by hand."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

torch.manual_seed(0)
lengths = torch.randint(5, 20, (203,))
ids = torch.randint(3, 100, (203, 20)) * (torch.arange(20) < lengths[:, None])
labels = (ids[:, 0] > 50).long()
mask = (ids > 0).long()

config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=2
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(ids[:171], mask[:171], labels[:171]), batch_size=16, shuffle=True)
held_out = DataLoader(TensorDataset(ids[171:], mask[171:], labels[171:]), batch_size=20)
schedule = get_linear_schedule_with_warmup(optimizer, 3, 2 * len(loader))

for epoch in range(2):
    model.train()
    for step, (x, m, y) in enumerate(loader):
        out = model(input_ids=x, attention_mask=m, labels=y)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print(f"{epoch} {step} loss {out.loss.item():.5f}")
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for x, m, y in held_out:
            predicted = model(input_ids=x, attention_mask=m).logits.argmax(-1)
            correct += (predicted == y).sum().item()
            total += len(y)
    print(f"{epoch} accuracy {correct}/{total}")
torch.save(model.state_dict(), "bert.pt")
