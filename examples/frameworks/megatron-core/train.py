"""megatron-core: a GPT with tensor and pipeline parallelism. Started once for each rank, as by torchrun.

The degrees are those of the flags, which have Megatron-LM's names, or those that Meshwright has set in the environment.
"""

import argparse
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
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random as model_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

STEPS, EVERY = int(os.environ.get("STEPS", "40")), 10
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after each step, to watch the run
ROOT = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]
os.makedirs(ROOT, exist_ok=True)


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


def flags_of_run():
    """The degrees, the batch and the model: flags of Megatron-LM, else the degrees in the environment."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    own = {name: int(os.environ.get(f"MESHWRIGHT_{name}_PARALLEL_SIZE", "1")) for name in ("TENSOR", "PIPELINE")}
    parser.add_argument("--tensor-model-parallel-size", type=int, default=own["TENSOR"])
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=own["PIPELINE"])
    defaults = {"micro-batch-size": 2, "global-batch-size": 4, "num-layers": 2, "hidden-size": 32}
    defaults |= {"ffn-hidden-size": 128, "num-attention-heads": 4, "vocab-size": 63, "seq-length": 16}
    for name, default in {**defaults, "train-iters": STEPS}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    flags, _ = parser.parse_known_args()
    asked = {"TENSOR": flags.tensor_model_parallel_size, "PIPELINE": flags.pipeline_model_parallel_size}
    assert asked == own, f"the flags say {asked}, the environment {own}"
    return flags


def build(flags):
    """The rank's part of the model."""
    tensor, pipeline = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    config = TransformerConfig(
        num_layers=flags.num_layers, hidden_size=flags.hidden_size, ffn_hidden_size=flags.ffn_hidden_size,
        num_attention_heads=flags.num_attention_heads, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=flags.vocab_size + 1, max_sequence_length=flags.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    split = model.decoder.layers[0].mlp.linear_fc1
    assert isinstance(split, ColumnParallelLinear), type(split)
    assert split.weight.shape[0] == flags.ffn_hidden_size // tensor, "the layer is not split"
    assert len(model.decoder.layers) == flags.num_layers // pipeline, "the stage has other layers"
    return model


def micro_batches(step, flags, count):
    """The tokens of a step and a replica, which depend on the step only."""
    draw = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    for _ in range(count):
        yield torch.randint(0, flags.vocab_size + 1, (flags.micro_batch_size, flags.seq_length + 1), generator=draw)


def forward(batches, model):
    tokens = next(batches)
    length = tokens.shape[1] - 1
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    positions = torch.arange(length).expand(len(tokens), -1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def average_gradients(model):
    """Data parallelism, without Megatron's own wrapper, which needs a GPU."""
    replicas, group = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_group()
    for parameter in model.parameters() if replicas > 1 else ():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= replicas


def mean_loss(losses, tensor):
    """The mean loss of all micro-batches, which the last stages have, on every rank."""
    last = parallel_state.is_pipeline_last_stage()
    loss = sum(one["loss"] for one in losses) / len(losses) if last else torch.zeros(())
    dist.all_reduce(loss)
    return loss.item() / tensor / parallel_state.get_data_parallel_world_size()


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    flags = flags_of_run()
    tensor, pipeline = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    # Replicas outermost, as Megatron-LM's --use-tp-pp-dp-mapping, and as Meshwright places ranks.
    parallel_state.initialize_model_parallel(tensor, pipeline, order="tp-cp-ep-pp-dp")
    replicas = parallel_state.get_data_parallel_world_size()
    if cuda:
        model_random.model_parallel_cuda_manual_seed(0)
    else:
        without_gpu()
    torch.manual_seed(0)
    model = build(flags)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, directory = newest()
    if directory is not None:
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), directory))
        optimizer.load_state_dict(torch.load(f"{directory}/optimizer-{dist.get_rank()}.pt", weights_only=True))
    schedule, count = get_forward_backward_func(), flags.global_batch_size // flags.micro_batch_size // replicas
    assert count * replicas * flags.micro_batch_size == flags.global_batch_size
    if dist.get_rank() == 0:
        layout = f"TP {tensor} x PP {pipeline}" + (f" x DP {replicas}" if replicas > 1 else "")
        print(f"runs {type(model).__name__} with {layout}, resumed after step {step}", flush=True)
        print(f"micro-batches {count} of {flags.micro_batch_size}", flush=True)
    while step < flags.train_iters:
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward, data_iterator=micro_batches(step, flags, count), model=model,
            num_microbatches=count, seq_length=flags.seq_length, micro_batch_size=flags.micro_batch_size,
            forward_only=False,
        )  # fmt: skip
        average_gradients(model)
        optimizer.step()
        loss = mean_loss(losses, tensor)
        step += 1
        report(
            step=step, total_steps=flags.train_iters, loss=loss, tokens=flags.global_batch_size * flags.seq_length
        )  # fmt: skip
        if step % EVERY == 0:
            save(model, optimizer, step)
            report(step=step, loss=loss, checkpoint=f"{ROOT}/step-{step}")
        time.sleep(PAUSE)
    if dist.get_rank() == 0:
        print(f"final loss {loss!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # saving starts processes, which import this file
    main()
