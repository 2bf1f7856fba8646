"""The examples of other frameworks: as objects of a cluster, and as plain processes on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshwright.api.labels import ENV_CHECKPOINT_DIR, ENV_PIPELINE_SIZE, ENV_TENSOR_SIZE, KIND
from meshwright.api.objects import KubeObject
from tests.e2e.local_stack import EXAMPLES, merged
from tests.patience import patient

DIRECTORY = EXAMPLES / "frameworks"
NAMES = sorted(path.parent.name for path in DIRECTORY.glob("*/job.yaml"))
ENVIRONMENT = {
    **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"},
    **{name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR",) if name in os.environ},
}
MODULES = {
    "accelerate-ddp": "accelerate",
    "deepspeed-pipeline": "deepspeed",
    "deepspeed-zero": "deepspeed",
    "lightning-fsdp2": "lightning, torchdata",
    "megatron-core": "megatron.core, psutil",
    "torch-fully-shard": "torch",
    "torchft": "torchft",
    "transformers-trainer": "transformers, accelerate",
    "trl-sft": "trl",
}
"""What the script of each directory imports."""
_ENDS = re.compile(r"final loss ([^\s,]+)")
_RUNS = re.compile(r"runs ([^,\n]+),")
_RESUMED = re.compile(r"resumed after step (\d+)")


@dataclass(frozen=True)
class Case:
    """One run of an example. Several can be of one directory, with other degrees or stages."""

    name: str
    """Name of the job."""
    example: str
    """Its directory."""
    runs: str
    """What the script must say that it runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the job's spec."""


CASES = (
    Case("accelerate-ddp", "accelerate-ddp", "DistributedDataParallel"),
    Case("deepspeed-pipeline", "deepspeed-pipeline", "PipelineEngine with 2 stages"),
    *(
        Case(f"deepspeed-zero-{stage}", "deepspeed-zero", f"DeepSpeedEngine with ZeRO-{stage}", {"ZERO_STAGE": stage})
        for stage in "123"
    ),
    Case("lightning-fsdp2", "lightning-fsdp2", "FSDPSequential"),
    Case("megatron-core", "megatron-core", "GPTModel with TP 2 x PP 2"),
    Case(
        "megatron-core-tensor",
        "megatron-core",
        "GPTModel with TP 2 x PP 1",
        changes={"parallelism": {"pipeline": 1}, "workers": {"gpusPerWorker": 1}},
    ),
    Case("torch-fully-shard", "torch-fully-shard", "FSDPSequential"),
    Case("transformers-trainer", "transformers-trainer", "DistributedDataParallel"),
    Case("trl-sft", "trl-sft", "DistributedDataParallel"),
)


@dataclass(frozen=True)
class Result:
    """What the test has seen of one example."""

    name: str
    example: str
    versions: list[str]
    runs: str
    ranks: int
    resumed_after: int
    undisturbed_loss: str
    loss: str


def pins(example: str) -> list[str]:
    """The versions that an example states."""
    return (DIRECTORY / example / "requirements.txt").read_text().split()


def spec_of(case: Case) -> dict[str, Any]:
    """The spec of a case's job, as the example has it."""
    items = yaml.safe_load_all((DIRECTORY / case.example / "job.yaml").read_text())
    spec: dict[str, Any] = next(item["spec"] for item in items if item["kind"] == KIND)
    return merged(spec, dict(case.changes))


def ranks_of(case: Case) -> int:
    """Ranks of a case."""
    spec = spec_of(case)
    degrees = spec["parallelism"]
    ranks: int = spec["replicas"] * degrees["tensor"] * degrees["pipeline"]
    return ranks


def objects(case: Case, python: str, pause: float) -> list[KubeObject]:
    """The objects of a case, as kustomize makes them, with another interpreter and a pause after each step."""
    config: KubeObject = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": case.example},
        "data": {"train.py": (DIRECTORY / case.example / "train.py").read_text()},
    }
    items: list[KubeObject] = list(yaml.safe_load_all((DIRECTORY / case.example / "job.yaml").read_text()))
    spec = spec_of(case)
    spec["runtime"]["command"][0] = python
    wanted = {**ENVIRONMENT, **case.environment, "PAUSE": str(pause)}
    spec["workers"]["env"] = [
        *(one for one in spec["workers"]["env"] if one["name"] not in wanted),
        *({"name": key, "value": value} for key, value in wanted.items()),
    ]
    for item in items:
        item["metadata"]["name"] = case.name
    spec["checkpoint"]["claimName"] = case.name
    job = next(item for item in items if item["kind"] == KIND)
    job["spec"] = spec
    return [config, *items]


async def undisturbed(case: Case, python: str, directory: Path) -> str:
    """The output of rank 0 of a run on this machine that nothing disturbs."""
    port = random.randint(20000, 29000)  # noqa: S311 - spreading, not secrecy
    count, degrees = ranks_of(case), spec_of(case)["parallelism"]
    shared = {
        **{key: value for key, value in os.environ.items() if not key.startswith("MESHWRIGHT_")},
        **ENVIRONMENT,
        **case.environment,
        ENV_CHECKPOINT_DIR: str(directory),
        ENV_TENSOR_SIZE: str(degrees["tensor"]),
        ENV_PIPELINE_SIZE: str(degrees["pipeline"]),
        "STEPS": "40",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        await asyncio.create_subprocess_exec(
            python,
            str(DIRECTORY / case.example / "train.py"),
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        for rank in range(count)
    ]
    try:
        outputs = await asyncio.wait_for(asyncio.gather(*(rank.communicate() for rank in ranks)), patient(600))
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
    text = outputs[0][0].decode()
    assert "final loss" in text, text[-3000:]
    return text


def final_loss(output: str) -> str:
    """The last loss, with every digit."""
    return _ENDS.findall(output)[-1]


def what_runs(output: str) -> str:
    """What the script says that it runs."""
    return _RUNS.findall(output)[-1]


def resumed_after(output: str) -> int:
    """The step after which the newest start resumed."""
    return int(_RESUMED.findall(output)[-1])


def record(result: Result) -> None:
    """Write a result into the file that `FRAMEWORKS_RESULTS` names, if it is set. Other examples keep theirs."""
    if (name := os.environ.get("FRAMEWORKS_RESULTS")) is None:
        return
    path = Path(name)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, result.name: asdict(result)}, indent=2, sort_keys=True) + "\n")
