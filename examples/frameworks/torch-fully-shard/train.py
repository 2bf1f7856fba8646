"""PyTorch's fully_shard (FSDP2) with distributed checkpoints. Started once for each rank, as by torchrun."""

import json
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

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
    """The newest complete checkpoint: a step and its directory. DCP writes .metadata last."""
    names = [n for n in os.listdir(ROOT) if n.startswith("step-") and os.path.exists(f"{ROOT}/{n}/.metadata")]
    steps = sorted(int(name.removeprefix("step-")) for name in names)
    return (steps[-1], f"{ROOT}/step-{steps[-1]}") if steps else (0, None)


def main():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).to(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    assert isinstance(model, FSDPModule), "the model is not sharded"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, directory = newest()
    if directory is not None:
        state, optimizer_state = get_state_dict(model, optimizer)
        loaded = {"model": state, "optimizer": optimizer_state}
        dcp.load(loaded, checkpoint_id=directory)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    if dist.get_rank() == 0:
        print(f"runs {type(model).__name__}, resumed after step {step}", flush=True)
    while step < STEPS:
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())  # the samples depend on the step only
        x = torch.randn(8, 16, generator=data).to(device)
        loss = (model(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        mean /= dist.get_world_size()
        report(step=step, total_steps=STEPS, loss=mean.item(), tokens=8 * dist.get_world_size())
        if step % EVERY == 0:
            state, optimizer_state = get_state_dict(model, optimizer)
            dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{ROOT}/step-{step}")
            report(step=step, loss=mean.item(), checkpoint=f"{ROOT}/step-{step}")
        time.sleep(PAUSE)
    if dist.get_rank() == 0:
        print(f"final loss {mean.item()!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
