"""DeepSpeed with ZeRO. Started once for each rank, as by torchrun; the `deepspeed` launcher is not needed.

The stage is `ZERO_STAGE`, or that of a configuration: `--deepspeed_config` takes a file or its content in base64.
"""

import argparse
import json
import os
import time

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

STEPS, EVERY = int(os.environ.get("STEPS", "40")), 10
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after each step, to watch the run
ROOT = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]
os.makedirs(ROOT, exist_ok=True)
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": int(os.environ.get("ZERO_STAGE", "3"))},
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


def assert_sharded(engine, stage):
    """Look at what really runs."""
    assert engine.zero_optimization_stage() == stage
    if stage == 3:
        assert all(hasattr(parameter, "ds_id") for parameter in engine.module.parameters()), "parameters are whole"
    elif stage > 0:
        assert isinstance(engine.optimizer, DeepSpeedZeroOptimizer), type(engine.optimizer)
        assert engine.optimizer.partition_gradients == (stage == 2)
        own = sum(part.numel() for part in engine.optimizer.single_partition_of_fp32_groups)
        whole = sum(parameter.numel() for parameter in engine.module.parameters())
        assert own * dist.get_world_size() < whole + 100 * dist.get_world_size(), "states of the optimizer are whole"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config", default=CONFIG)
    config = parser.parse_args().deepspeed_config
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    # Without a GPU, DeepSpeed would compile its own optimizer.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
    )
    stage, micro, accumulated = (
        engine.zero_optimization_stage(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    )  # fmt: skip
    assert_sharded(engine, stage if config is not CONFIG else CONFIG["zero_optimization"]["stage"])
    number_format = next(engine.module.parameters()).dtype
    path, state = engine.load_checkpoint(ROOT) if os.path.exists(f"{ROOT}/latest") else (None, {})
    step = state["step"] if path else 0
    if dist.get_rank() == 0:
        print(f"runs {type(engine).__name__} with ZeRO-{stage}, resumed after step {step}", flush=True)
        print(f"batch {micro} x {accumulated} x {dist.get_world_size()}", flush=True)
    while step < STEPS:
        mean = torch.zeros((), device=engine.device)
        for part in range(accumulated):  # the samples depend on the step and the rank only
            seed = 1000 * step + dist.get_rank() + 100 * part
            x = torch.randn(micro, 16, generator=torch.Generator().manual_seed(seed)).to(engine.device, number_format)
            loss = (engine(x) - x.sin()).square().mean()
            engine.backward(loss)
            engine.step()
            mean += loss.detach().float() / accumulated
        step += 1
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        tokens = micro * accumulated * dist.get_world_size()
        report(step=step, total_steps=STEPS, loss=mean.item(), tokens=tokens)
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
