"""DeepSpeed with ZeRO-3. Started once for each rank, as by torchrun; the `deepspeed` launcher is not needed."""

import json
import os
import time

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

STEPS, EVERY = int(os.environ.get("STEPS", "40")), 10
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after each step, to watch the run
ROOT = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]
os.makedirs(ROOT, exist_ok=True)
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": 1_000_000,
}


def report(**fields):
    if os.environ["RANK"] == "0" and "MESHWRIGHT_REPORT_FILE" in os.environ:
        with open(os.environ["MESHWRIGHT_REPORT_FILE"], "a") as file:
            file.write(json.dumps(fields) + "\n")


def main():
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    assert engine.zero_optimization_stage() == 3
    assert all(hasattr(parameter, "ds_id") for parameter in engine.module.parameters()), "parameters are not sharded"
    path, state = engine.load_checkpoint(ROOT) if os.path.exists(f"{ROOT}/latest") else (None, {})
    step = state["step"] if path else 0
    if dist.get_rank() == 0:
        print(f"runs {type(engine).__name__} with ZeRO-3, resumed after step {step}", flush=True)
    while step < STEPS:
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())  # the samples depend on the step only
        x = torch.randn(8, 16, generator=data).to(engine.device)
        loss = (engine(x) - x.sin()).square().mean()
        engine.backward(loss)
        engine.step()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        report(step=step, total_steps=STEPS, loss=mean.item(), tokens=8 * dist.get_world_size())
        if step % EVERY == 0:
            engine.save_checkpoint(ROOT, tag=f"step-{step}", client_state={"step": step})
            report(step=step, loss=mean.item(), checkpoint=f"{ROOT}/step-{step}")
        time.sleep(PAUSE)
    if dist.get_rank() == 0:
        print(f"final loss {mean.item()!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
