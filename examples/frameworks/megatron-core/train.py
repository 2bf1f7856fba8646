"""megatron-core: a GPT with tensor parallelism over all ranks. Started once for each rank, as by torchrun."""

import contextlib
import json
import os
import shutil
import time

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random as model_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

STEPS, EVERY = int(os.environ.get("STEPS", "40")), 10
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after each step, to watch the run
ROOT = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]
os.makedirs(ROOT, exist_ok=True)
LENGTH = 16


class OnCPU(TorchFunctionMode):
    """Puts on the CPU what megatron-core puts on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if isinstance(kwargs.get("device"), int) or str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class NoTracker(model_random.CudaRNGStatesTracker):
    """Random numbers of a GPU have states that a CPU does not have: dropout must be 0."""

    def fork(self, name="none"):
        return contextlib.nullcontext()


def without_gpu():
    OnCPU().__enter__()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = torch.cuda.synchronize = lambda *_: None
    model_random.initialize_rng_tracker()
    model_random._CUDA_RNG_STATE_TRACKER = NoTracker()
    model_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def report(**fields):
    if os.environ["RANK"] == "0" and "MESHWRIGHT_REPORT_FILE" in os.environ:
        with open(os.environ["MESHWRIGHT_REPORT_FILE"], "a") as file:
            file.write(json.dumps(fields) + "\n")


def newest():
    """The newest complete checkpoint: a step and its directory."""
    steps = sorted(int(n.removeprefix("step-")) for n in os.listdir(ROOT) if n.startswith("step-") and "." not in n)
    return (steps[-1], f"{ROOT}/step-{steps[-1]}") if steps else (0, None)


def save(model, optimizer, step):
    """Write a checkpoint and rename it when it is complete. Each rank writes the moments of its own shards."""
    partial = f"{ROOT}/step-{step}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), partial)
    torch.save(optimizer.state_dict(), f"{partial}/optimizer-{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        os.replace(partial, f"{ROOT}/step-{step}")


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    if cuda:
        model_random.model_parallel_cuda_manual_seed(0)
    else:
        without_gpu()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=dist.get_world_size(), gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=LENGTH)
    split = model.decoder.layers[0].mlp.linear_fc1
    assert isinstance(split, ColumnParallelLinear), type(split)
    assert split.weight.shape[0] == 4 * 32 // dist.get_world_size(), "the layer is not split"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, directory = newest()
    if directory is not None:
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), directory))
        optimizer.load_state_dict(torch.load(f"{directory}/optimizer-{dist.get_rank()}.pt", weights_only=True))
    if dist.get_rank() == 0:
        print(f"runs {type(model).__name__} with TP {dist.get_world_size()}, resumed after step {step}", flush=True)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    positions = torch.arange(LENGTH).expand(2, -1)
    while step < STEPS:
        tokens = torch.randint(0, 64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        report(step=step, total_steps=STEPS, loss=loss.item(), tokens=2 * LENGTH)
        if step % EVERY == 0:
            save(model, optimizer, step)
            report(step=step, loss=loss.item(), checkpoint=f"{ROOT}/step-{step}")
        time.sleep(PAUSE)
    if dist.get_rank() == 0:
        print(f"final loss {loss.item()!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # saving starts processes, which import this file
    main()
