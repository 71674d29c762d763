"""Files written by training libraries, and duoka's files read by them; needs the extra `peers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import duoka
from tests.checkpoint.nets import Net, same

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries warn of is theirs


def prepared(net: nn.Module) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, _ = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
    return accelerator, model


def test_accelerate(tmp_path: Path) -> None:
    net = Net()
    accelerator, model = prepared(net)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_state(str(tmp_path / "pickled"), safe_serialization=False)
    accelerator.save_model(model, str(tmp_path / "model"))
    for name in ("state", "pickled", "model"):
        other = Net()
        duoka.load_weights(other, tmp_path / name)
        assert same(net, other), name


@pytest.mark.parametrize("most", [None, "200"])
def test_accelerate_and_hugging_face_read_what_is_written(most: str | None, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    hub = pytest.importorskip("huggingface_hub")
    net = Net()
    duoka.save_weights(net, tmp_path / "model.safetensors", max_shard_size=most)
    for load in (accelerate.load_checkpoint_in_model, hub.load_torch_model):
        other = Net()
        load(other, str(tmp_path))
        assert same(net, other)
    if most is not None:
        parts = hub.split_torch_state_dict_into_shards(net.state_dict(), max_shard_size=int(most))
        there = {entry.name for entry in tmp_path.glob("*.safetensors")}
        assert set(parts.filename_to_tensors) == there


def test_fabric(tmp_path: Path) -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net, other = Net(), Net()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    fabric.save(tmp_path / "x.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    duoka.load_weights(other, tmp_path / "x.ckpt")
    assert same(net, other)


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model.fc(self.model.features(batch[0]).mean((2, 3))).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=1, enable_checkpointing=False, default_root_dir=tmp_path, **quiet
    )
    module, other = Module(), Net()
    data = torch.utils.data.TensorDataset(torch.randn(4, 1, 5, 5))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = duoka.load_weights(other, tmp_path / "x.ckpt")
    assert same(module.model, other)
    assert "stripped 'model.' from 9 names" in loaded.notes
