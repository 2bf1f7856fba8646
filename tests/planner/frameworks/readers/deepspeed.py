"""Reads configurations with DeepSpeed's own parser: `python deepspeed.py < LAUNCHES`.

It takes the number of replicas from the process groups, so one without processes stands for them. It ignores keys that
it does not know at the top level, so these are checked here.
"""

import inspect
import json
import os
import sys
from types import SimpleNamespace

sys.path.pop(0)  # the directory of this file, whose name hides the package
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.comm as dist  # noqa: E402
from deepspeed.runtime import config as module  # noqa: E402
from deepspeed.runtime import constants  # noqa: E402

KNOWN = {value for name, value in vars(constants).items() if isinstance(value, str)}
KNOWN |= {"zero_optimization", "tensor_parallel"} | set(inspect.getsource(module).replace("'", '"').split('"')[1::2])


def read(launch):
    config = json.loads(launch["files"]["ds_config.json"])
    unknown = set(config) - KNOWN
    assert not unknown, f"DeepSpeed does not read {unknown}"
    tensor = config.get("tensor_parallel", {}).get("autotp_size", 1)
    stages = config.get("pipeline", {}).get("stages", 1)
    context = config.get("sequence_parallel_size", 1)
    world = launch["world_size"]
    replicas = world // (tensor * stages * context)
    parsed = module.DeepSpeedConfig(config, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: replicas))
    return {
        "tensor": parsed.tensor_parallel_config.autotp_size or 1,
        "pipeline": parsed.pipeline["stages"] if "pipeline" in config else 1,
        "context": context,
        "data": parsed.train_batch_size // (parsed.train_micro_batch_size_per_gpu * parsed.gradient_accumulation_steps),
        "zero_stage": parsed.zero_config.stage,
        "micro_batch_size": parsed.train_micro_batch_size_per_gpu,
        "micro_batches": parsed.gradient_accumulation_steps,
    }


dist.get_rank = lambda *_: 1
results = [read(json.loads(line)) for line in sys.stdin]
with open(os.environ["RESULT"], "w") as file:
    json.dump(results, file)
