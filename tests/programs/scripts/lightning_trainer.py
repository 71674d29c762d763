"""Lightning's Trainer: its loop, its logs, early stopping, and the best checkpoint."""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        out = self.net(batch[0])
        self.log("loss", nn.functional.cross_entropy(out, batch[1]))
        self.log("right", (out.argmax(1) == batch[1]).float().mean())

    def on_validation_epoch_end(self):
        print({name: round(value.item(), 5) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


lightning.seed_everything(5, verbose=False)
x = torch.randn(103, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
best = ModelCheckpoint("best", monitor="loss")
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=3,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    logger=CSVLogger("logs"),
    log_every_n_steps=2,
    callbacks=[EarlyStopping("loss"), best],
)
model = Classifier()
trainer.fit(model, DataLoader(data, 16, shuffle=True), DataLoader(data, 20))
again = Classifier.load_from_checkpoint(best.best_model_path)
print(trainer.validate(again, DataLoader(data, 20), verbose=False))
