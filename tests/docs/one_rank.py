"""What a block of Python about a module of one's own has before it: the encoder of the examples on one rank."""

from __future__ import annotations

import atexit
import runpy
from pathlib import Path
from tempfile import mkdtemp

import torch

from meshwright.api.parallelism import ParallelismSpec
from meshwright.protocol.run_config import Run
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.rank.torchrun import task_from_environment
from tests.docs.blocks import ROOT

torch.set_num_threads(1)
example = runpy.run_path(str(ROOT / "examples" / "own_module" / "encoder.py"))
plan, loss = example["PLAN"], example["masked_loss"]
module = example["Encoder"](width=16, layers=1)
batches = [example["batch_of"](1, 2, 16)]
directory = Path(mkdtemp(dir="."))

run = Run(tensor=1, pipeline=1, data_parallel=1, micro_batches=1, parallelism=ParallelismSpec(sequence=False))
joining = join_mesh(task_from_environment(run))
mesh = joining.__enter__()
atexit.register(joining.__exit__, None, None, None)
