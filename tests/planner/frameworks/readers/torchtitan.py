"""Reads command lines of torchtitan with its own parser and mesh arithmetic: `python torchtitan.py < LAUNCHES`."""

import json
import os
import sys

sys.path.pop(0)  # the directory of this file, whose name hides the package

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: E402


def read(launch):
    config = ConfigManager().parse_args(launch["command"][3:])
    asked, training = config.parallelism, config.training
    dims = ParallelDims(
        dp_replicate=asked.data_parallel_replicate_degree,
        dp_shard=asked.data_parallel_shard_degree,
        cp=asked.context_parallel_degree,
        tp=asked.tensor_parallel_degree,
        pp=asked.pipeline_parallel_degree,
        ep=asked.expert_parallel_degree,
        world_size=launch["world_size"],
    )
    data = dims.dp_replicate * dims.dp_shard
    sharded = asked.fsdp_reshard_after_forward
    size = asked.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    return {
        "tensor": dims.tp,
        "pipeline": dims.pp,
        "context": dims.cp,
        "data": data,
        "expert": dims.ep,
        "zero_stage": {"default": 0, "never": 2, "always": 3}[sharded],
        "micro_batch_size": size,
        "micro_batches": training.global_batch_size // (size * data),
    }


results = [read(json.loads(line)) for line in sys.stdin]
with open(os.environ["RESULT"], "w") as file:
    json.dump(results, file)
