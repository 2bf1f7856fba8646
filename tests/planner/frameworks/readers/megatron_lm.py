"""Reads command lines of Megatron-LM with its own parser and checks: `python megatron_lm.py SOURCE < LAUNCHES`.

Its checks ask the GPU for its generation only: a fixed answer stands for one.
"""

import json
import os
import sys
import typing
from types import SimpleNamespace

import torch
import typing_extensions

typing.override = typing_extensions.override  # its main branch is for Python 3.12
sys.path.insert(0, sys.argv[1])
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=132)
os.environ["RANK"] = "1"

from megatron.training.arguments import parse_args, validate_args  # noqa: E402

_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def read(launch):
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= {**launch["environment"], "WORLD_SIZE": str(launch["world_size"])}
    sys.argv = launch["command"][1:]
    args = validate_args(parse_args())
    virtual = args.virtual_pipeline_model_parallel_size or 1
    zero = (
        _SHARDING[args.data_parallel_sharding_strategy]
        if args.use_megatron_fsdp
        else int(args.use_distributed_optimizer)
    )
    return {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "data": args.data_parallel_size,
        "expert": args.expert_model_parallel_size,
        "zero_stage": zero,
        "virtual_stages": virtual,
        "micro_batch_size": args.micro_batch_size,
        "micro_batches": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        "layers": args.num_layers,
    }


results = [read(json.loads(line)) for line in sys.stdin]
with open(os.environ["RESULT"], "w") as file:
    json.dump(results, file)
