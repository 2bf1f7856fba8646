"""DeepSpeed's pipeline engine: one stage for each rank. Started once for each rank, as by torchrun."""

import json
import os
import time

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

STEPS, EVERY, MICRO_BATCHES = int(os.environ.get("STEPS", "40")), 10, 4
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after each step, to watch the run
ROOT = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]
os.makedirs(ROOT, exist_ok=True)
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "zero_optimization": {"stage": 0},
    "steps_per_print": 1_000_000,
}


def report(**fields):
    """Print a line of JSON, and report it to Meshwright."""
    if os.environ["RANK"] == "0":
        line = json.dumps({**fields, "time": time.time()})
        print(line, flush=True)
        if "MESHWRIGHT_REPORT_FILE" in os.environ:
            with open(os.environ["MESHWRIGHT_REPORT_FILE"], "a") as file:
                file.write(line + "\n")


def micro_batches(step):
    """Inputs and targets of a step, which depend on the step only."""
    draw = torch.Generator().manual_seed(step)
    for _ in range(MICRO_BATCHES):
        x = torch.randn(4, 16, generator=draw)
        yield x, x.sin()


def main():
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)]
    model = PipelineModule(layers, num_stages=world, loss_fn=nn.MSELoss(), partition_method="uniform")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    assert engine.is_pipe_parallel
    assert (engine.num_stages, engine.stage_id) == (world, dist.get_rank())
    assert len(model.forward_funcs) < len(layers), "the stage has every layer"
    path, state = engine.load_checkpoint(ROOT) if os.path.exists(f"{ROOT}/latest") else (None, {})
    step = state["step"] if path else 0
    if dist.get_rank() == 0:
        print(f"runs {type(engine).__name__} with {world} stages, resumed after step {step}", flush=True)
    while step < STEPS:
        loss = engine.train_batch(micro_batches(step)).item()
        step += 1
        report(step=step, total_steps=STEPS, loss=loss, tokens=4 * MICRO_BATCHES)
        if step % EVERY == 0:
            engine.save_checkpoint(ROOT, tag=f"step-{step}", client_state={"step": step})
            report(step=step, loss=loss, checkpoint=f"{ROOT}/step-{step}")
        time.sleep(PAUSE)
    if dist.get_rank() == 0:
        print(f"final loss {loss!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
