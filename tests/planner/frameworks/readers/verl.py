"""Composes a configuration of verl as its trainer does: `python verl.py DIRECTORY OVERRIDE...`.

DIRECTORY is that of its package. Only the files of its configuration are read, so it needs no GPU, and hydra alone.
"""

import json
import os
import sys

from hydra import compose, initialize_config_dir

with initialize_config_dir(os.path.join(sys.argv[1], "trainer", "config"), version_base=None):
    config = compose("sft_trainer_engine", overrides=sys.argv[2:])
with open(os.environ["RESULT"], "w") as file:
    json.dump(
        {
            "strategy": config.engine.strategy,
            "ranks": config.trainer.nnodes * config.trainer.n_gpus_per_node,
            "directory": config.trainer.default_local_dir,
            "micro_batch_size": config.data.micro_batch_size_per_gpu,
        },
        file,
    )
