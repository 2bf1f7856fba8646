"""Hugging Face Accelerate with DDP. Started once for each rank, as by torchrun; `accelerate launch` is not needed."""

import json
import os
import shutil
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = int(os.environ.get("STEPS", "40")), 10
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after each step, to watch the run
ROOT = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]
os.makedirs(ROOT, exist_ok=True)


def report(**fields):
    """Print a line of JSON, and report it to Meshwright."""
    if os.environ["RANK"] == "0":
        line = json.dumps({**fields, "time": time.time()})
        print(line, flush=True)
        if "MESHWRIGHT_REPORT_FILE" in os.environ:
            with open(os.environ["MESHWRIGHT_REPORT_FILE"], "a") as file:
                file.write(line + "\n")


def newest():
    """The newest complete checkpoint: a step and its directory."""
    steps = sorted(int(n.removeprefix("step-")) for n in os.listdir(ROOT) if n.startswith("step-") and "." not in n)
    return (steps[-1], f"{ROOT}/step-{steps[-1]}") if steps else (0, None)


def save(accelerator, step):
    """Write a checkpoint and rename it when it is complete: what has its name can be loaded."""
    partial = f"{ROOT}/step-{step}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(partial)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(partial, f"{ROOT}/step-{step}")


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    # Without a GPU, Accelerate drops an FSDP plugin without a message: look at what really runs.
    assert isinstance(model, DistributedDataParallel), type(model)
    step, directory = newest()
    if directory is not None:
        accelerator.load_state(directory)
    accelerator.print(f"runs {type(model).__name__}, resumed after step {step}", flush=True)
    while step < STEPS:
        data = torch.Generator().manual_seed(1000 * step + accelerator.process_index)
        x = torch.randn(8, 16, generator=data).to(accelerator.device)
        loss = (model(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        mean = accelerator.reduce(loss.detach(), "mean").item()
        report(step=step, total_steps=STEPS, loss=mean, tokens=8 * accelerator.num_processes)
        if step % EVERY == 0:
            save(accelerator, step)
            report(step=step, loss=mean, checkpoint=f"{ROOT}/step-{step}")
        time.sleep(PAUSE)
    accelerator.print(f"final loss {mean!r}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
