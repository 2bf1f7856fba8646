"""Reads configurations with nanotron's own parser: `python nanotron.py SOURCE < LAUNCHES`.

Its configuration module imports GPU kernels that need a GPU to build: empty modules stand for them.
"""

import importlib.machinery
import json
import os
import sys
import tempfile
import types

sys.path.pop(0)  # the directory of this file, whose name hides the package
sys.path.insert(0, os.path.join(sys.argv[1], "src"))


class Kernel(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for name in (
    *("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.layers", "flash_attn.layers.rotary"),
    *("flash_attn.ops", "flash_attn.ops.triton", "flash_attn.ops.triton.layer_norm"),
    *("flash_attn.modules", "flash_attn.modules.mha", "flash_attn.bert_padding"),
):
    sys.modules[name] = kernel = Kernel(name)
    kernel.__spec__, kernel.__path__, kernel.__version__ = importlib.machinery.ModuleSpec(name, None), [], "2.8.3"

from nanotron.config import get_config_from_file  # noqa: E402


def read(launch):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(launch["files"]["nanotron.yaml"])
        file.flush()
        config = get_config_from_file(file.name)
    asked, tokens = config.parallelism, config.tokens
    return {
        "tensor": asked.tp,
        "pipeline": asked.pp,
        "context": asked.context_parallel_size,
        "expert": asked.expert_parallel_size,
        "data": config.global_batch_size // (tokens.micro_batch_size * tokens.batch_accumulation_per_replica),
        "zero_stage": config.optimizer.zero_stage,
        "micro_batch_size": tokens.micro_batch_size,
        "micro_batches": tokens.batch_accumulation_per_replica,
        "layers": config.model.model_config.num_hidden_layers,
    }


results = [read(json.loads(line)) for line in sys.stdin]
with open(os.environ["RESULT"], "w") as file:
    json.dump(results, file)
