"""T5 on sequences cut by hand, with generation; ViT on pictures from a loader."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification

torch.manual_seed(0)
config = T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randint(1, 60, (40, 7))
for epoch in range(2):
    for start in range(0, 40, 8):
        loss = model(input_ids=x[start : start + 8], labels=x.flip(1)[start : start + 8]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("T5", epoch, f"{loss.item():.6f}")
model.eval()
print(model.generate(x[:3], max_new_tokens=5).tolist())

config = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    image_size=16,
    patch_size=4,
    num_labels=5,
)
model = ViTForImageClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(44, 3, 16, 16), torch.randint(0, 5, (44,)))
for epoch in range(2):
    for pictures, labels in DataLoader(data, 10, shuffle=True):
        out = model(pixel_values=pictures, labels=labels)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    print("ViT", epoch, f"{out.loss.item():.6f} {(out.logits.argmax(-1) == labels).float().mean().item():.4f}")
