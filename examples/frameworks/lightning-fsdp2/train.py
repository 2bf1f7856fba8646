"""Lightning with ModelParallelStrategy (FSDP2). Started once for each rank, as by torchrun."""

import json
import os
import time

import lightning
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

STEPS, EVERY = int(os.environ.get("STEPS", "40")), 10
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after each step, to watch the run
ROOT = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]
os.makedirs(ROOT, exist_ok=True)
WORLD = int(os.environ["WORLD_SIZE"])


class Points(Dataset):
    """Samples that depend only on their index."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Model(lightning.LightningModule):
    def configure_model(self):
        if not hasattr(self, "layers"):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
            for layer in (self.layers[0], self.layers[2], self.layers):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, x, index):
        loss = (self.layers(x) - x.sin()).square().mean()
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.layers.parameters(), lr=1e-2)


def report(**fields):
    """Print a line of JSON, and report it to Meshwright."""
    if os.environ["RANK"] == "0":
        line = json.dumps({**fields, "time": time.time()})
        print(line, flush=True)
        if "MESHWRIGHT_REPORT_FILE" in os.environ:
            with open(os.environ["MESHWRIGHT_REPORT_FILE"], "a") as file:
                file.write(line + "\n")


class Reporter(Callback):
    """Reports steps and checkpoints to Meshwright."""

    mean = float("nan")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.mean = trainer.strategy.reduce(module.loss, reduce_op="mean").item()
        report(step=trainer.global_step, total_steps=STEPS, loss=self.mean, tokens=8 * WORLD)
        time.sleep(PAUSE)


class Checkpoints(ModelCheckpoint):
    def _save_checkpoint(self, trainer, filepath):
        super()._save_checkpoint(trainer, filepath)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            with open(f"{ROOT}/latest.tmp", "w") as file:  # names only a checkpoint that is complete
                file.write(f"{trainer.global_step} {filepath}")
            os.replace(f"{ROOT}/latest.tmp", f"{ROOT}/latest")
            report(step=trainer.global_step, checkpoint=filepath)


reporter = Reporter()


def newest():
    try:
        with open(f"{ROOT}/latest") as file:
            step, path = file.read().split(" ", 1)
            return int(step), path
    except FileNotFoundError:
        return 0, None


def main():
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="auto", devices=local, num_nodes=WORLD // local, max_steps=STEPS, logger=False,
        strategy=ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1),
        # Without it, Lightning derives the rank from NODE_RANK and LOCAL_RANK.
        plugins=[TorchElasticEnvironment()], enable_progress_bar=False, enable_model_summary=False,
        callbacks=[reporter, Checkpoints(ROOT, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1)],
    )  # fmt: skip
    step, path = newest()
    if os.environ["RANK"] == "0":
        print(f"resumed after step {step}", flush=True)
    model = Model()
    # A plain DataLoader would start from its first sample: this one continues where the checkpoint was.
    trainer.fit(model, StatefulDataLoader(Points(), batch_size=8), ckpt_path=path)
    assert isinstance(model.layers, FSDPModule), "the model is not sharded"
    if trainer.is_global_zero:
        print(f"runs {type(model.layers).__name__}, final loss {reporter.mean!r}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
