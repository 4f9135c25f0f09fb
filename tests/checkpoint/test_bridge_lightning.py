"""Lightning's own Trainer, which saves and resumes through our `CheckpointIO`."""

import logging
import warnings

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader, TensorDataset

from composer_checkpoint import CorruptCheckpointError, UnsafeCheckpointError, verify

lightning = pytest.importorskip("lightning.pytorch")
from composer_checkpoint.bridges.lightning import VerifiedCheckpointIO  # noqa: E402  # needs lightning

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of few workers, no logger, and its own imports


class Line(lightning.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(folder, max_epochs, resume=None, io=None):
    lightning.seed_everything(0, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = Line()
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=max_epochs,
        plugins=[io or VerifiedCheckpointIO()],
        callbacks=[lightning.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.arange(32.0).view(8, 4) / 32), batch_size=2)
    trainer.fit(model, data, ckpt_path=resume)
    return trainer, model


def test_a_run_resumed_from_a_verified_checkpoint_ends_like_one_that_was_not_interrupted(tmp_path):
    _, straight = fit(tmp_path / "straight", 4)
    fit(tmp_path / "first", 2)
    checkpoint = tmp_path / "first" / "epoch=1.ckpt"
    assert verify(checkpoint).info["global_step"] == 8
    trainer, resumed = fit(tmp_path / "second", 4, resume=checkpoint)
    assert trainer.global_step == 16
    for found, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_damaged_checkpoint_is_refused_by_the_trainer(tmp_path):
    fit(tmp_path, 1)
    checkpoint = tmp_path / "epoch=0.ckpt"
    content = bytearray(checkpoint.read_bytes())
    content[content.index(torch.load(checkpoint)["state_dict"]["layer.weight"].numpy().tobytes())] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"state_dict/layer\.weight"):
        fit(tmp_path, 2, resume=checkpoint)


def test_lightnings_own_files_are_read_and_hostile_ones_are_not(tmp_path):
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    fit(tmp_path, 1, io=TorchCheckpointIO())
    trainer, _ = fit(tmp_path / "next", 2, resume=tmp_path / "epoch=0.ckpt")
    assert trainer.global_step == 8
    with warnings.catch_warnings(action="ignore"):
        torch.save({"state_dict": {}, "run": breakpoint}, tmp_path / "hostile.ckpt")
    with pytest.raises(UnsafeCheckpointError, match="breakpoint"):
        VerifiedCheckpointIO().load_checkpoint(tmp_path / "hostile.ckpt")


def test_remote_checkpoints_are_saved_loaded_and_removed():
    io = VerifiedCheckpointIO()
    uri = "memory://lightning/epoch=0.ckpt"
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, "epoch": 0}, uri)
    assert io.load_checkpoint(uri)["state_dict"]["w"].tolist() == [1, 1]
    io.remove_checkpoint(uri)
    io.remove_checkpoint(uri)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        io.load_checkpoint(uri)


def test_a_store_that_drops_bytes_or_connections_gets_the_checkpoint_again(monkeypatch):
    real, faults = MemoryFileSystem.put_file, ["reset", "drop"]

    def put_file(self, local, remote, *args, **kwargs):
        fault = faults.pop(0) if faults else None
        if fault == "reset":
            raise ConnectionResetError("reset by peer")
        real(self, local, remote, *args, **kwargs)
        if fault == "drop":
            self.pipe_file(remote, self.cat_file(remote)[:-10])

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    io = VerifiedCheckpointIO()
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, "epoch": 0}, "memory://dropping/epoch=0.ckpt")
    assert io.load_checkpoint("memory://dropping/epoch=0.ckpt")["state_dict"]["w"].tolist() == [1, 1]
    assert faults == []


def test_a_removed_checkpoint_is_gone(tmp_path):
    io = VerifiedCheckpointIO()
    io.save_checkpoint({"state_dict": {}}, tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []
