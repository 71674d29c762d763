"""Hugging Face's Trainer: its loop, evaluation with a metric, checkpoints."""

import torch
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(1)
ids = torch.randint(1, 99, (123, 8))


def collate(rows):
    ids = torch.stack([row[0] for row in rows])
    return {"input_ids": ids, "labels": ids.sum(1) % 3}


config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=3
)
arguments = TrainingArguments(
    "out",
    num_train_epochs=2,
    per_device_train_batch_size=16,
    logging_steps=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    remove_unused_columns=False,
    label_names=["labels"],
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    BertForSequenceClassification(config),
    arguments,
    data_collator=collate,
    train_dataset=TensorDataset(ids[:90]),
    eval_dataset=TensorDataset(ids[90:]),
    compute_metrics=lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())},
)


def log(logs, *_):
    print({name: f"{value:.5f}" for name, value in logs.items() if "_per_" not in name and "time" not in name})


trainer.log = log
trainer.train()
trainer.save_model("final")
