"""torchft: a replica group, which trains with the other groups as long as they are there.

Each group is a world of its own, started as by torchrun: RANK and WORLD_SIZE count the ranks of the group.
"""

import json
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft.checkpointing import HTTPTransport
from torchft.ddp import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "40"))
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after each step, to watch the run
GROUP = int(os.environ["REPLICA_GROUP_ID"])
LEAST = int(os.environ.get("TORCHFT_MIN_REPLICAS", "1"))


class Transport(HTTPTransport):
    """Serves the state of this group to others by the pod's address: its host name is unknown in other pods."""

    def address(self):
        address = os.environ.get("MESHWRIGHT_POD_IP", os.environ["MASTER_ADDR"])
        host = f"[{address}]" if ":" in address else address
        return super().address().replace(socket.gethostname(), host)


def report(**fields):
    """Print a line of JSON, and report it to Meshwright."""
    if os.environ["RANK"] == "0":
        line = json.dumps({**fields, "time": time.time()})
        print(line, flush=True)
        if "MESHWRIGHT_REPORT_FILE" in os.environ:
            with open(os.environ["MESHWRIGHT_REPORT_FILE"], "a") as file:
                file.write(line + "\n")


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")  # the group's own; it also starts the store
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state():
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load(found):
        model.load_state_dict(found["model"])
        adam.load_state_dict(found["optimizer"])

    minute = timedelta(seconds=float(os.environ.get("TORCHFT_PATIENCE", "60")))
    manager = Manager(
        pg=(ProcessGroupNCCL if cuda else ProcessGroupGloo)(timeout=minute), min_replica_size=LEAST,
        load_state_dict=load, state_dict=state, replica_id=f"group-{GROUP}", timeout=minute,
        checkpoint_transport=Transport(minute, 0), quorum_timeout=minute, connect_timeout=minute,
        hostname=os.environ["MASTER_ADDR"], use_async_quorum=False,
    )  # fmt: skip
    wrapped = DistributedDataParallel(manager, model)
    announced = False
    while manager.current_step() < STEPS:
        manager.start_quorum()  # a group that comes back copies the state of another one here
        step = manager.current_step()
        if not announced and dist.get_rank() == 0:
            print(f"runs {type(wrapped).__name__} of torchft, resumed after step {step}", flush=True)
        announced = True
        adam.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + GROUP)).to(device)
        loss = (wrapped(x) - x.sin()).square().mean()
        loss.backward()  # averages the gradients over the groups
        mean = loss.detach().clone()
        manager.allreduce(mean).wait()
        groups = manager.num_participants()
        if not manager.should_commit():  # a group has failed during this step: it is done again without it
            continue
        assert groups >= LEAST
        adam.step()
        report(step=step + 1, total_steps=STEPS, loss=mean.item(), tokens=8 * groups, groups=groups)
        time.sleep(PAUSE)
    if dist.get_rank() == 0:
        digest = sum(parameter.double().sum().item() for parameter in model.parameters())
        print(f"final loss {mean.item()!r}, sum of the parameters {digest!r}", flush=True)
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
