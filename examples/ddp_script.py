"""A plain PyTorch DDP script, as you would write it for torchrun. It does not import Meshwright.

It reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from its environment. When it is restarted, it loads
its own checkpoint from MESHWRIGHT_CHECKPOINT_DIR. On SIGTERM it saves a checkpoint and exits with code 143 on every
rank, which means that it has stopped and can be resumed.
"""

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXIT_STOPPED = 143  # 128 + SIGTERM
BATCH = 32  # samples per rank and step


def samples(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of a noisy sine. They depend only on step and rank, so a resumed run continues with the same samples."""
    generator = torch.Generator().manual_seed(step * world_size + rank)
    x = torch.rand(BATCH, 1, generator=generator) * 6 - 3
    return x, torch.sin(x) + 0.05 * torch.randn(BATCH, 1, generator=generator)


def save(path: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint atomically: after a crash the previous one is intact."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, path)


def train(steps: int, save_every: int, path: str) -> int:
    """Train to `steps`; returns the exit code."""
    stop = torch.zeros(1)
    signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        if rank == 0:
            print(f"resumed after step {step}", flush=True)
    while step < steps:
        x, y = samples(step, rank, world_size)
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        # Any rank may have got SIGTERM; all of them must stop after the same step.
        anyone = stop.clone().to(device)
        dist.all_reduce(anyone, op=dist.ReduceOp.MAX)
        stopping = bool(anyone.item())
        if rank == 0 and (step % save_every == 0 or step == steps or stopping):
            save(path, step, model.module, optimizer)
            print(f"step {step}/{steps} loss {loss.item():.4f}, saved", flush=True)
        if stopping and step < steps:
            dist.barrier()
            return EXIT_STOPPED
    dist.barrier()
    return 0


def main() -> None:
    """Parse the command line, train, and exit with a code that says whether the run has finished."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=50)
    arguments = parser.parse_args()
    path = os.path.join(os.environ["MESHWRIGHT_CHECKPOINT_DIR"], "ddp.pt")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    code = train(arguments.steps, arguments.save_every, path)
    dist.destroy_process_group()
    sys.stdout.flush()
    # torch's threads sometimes abort the interpreter during shutdown, which would change the exit code.
    os._exit(code)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start this with torchrun, or as `runtime.command` of a ParallelTrainingJob")
    main()
