"""The examples of other frameworks: as objects of a cluster, and as plain processes on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from meshwright.api.labels import KIND
from meshwright.api.objects import KubeObject
from tests.e2e.local_stack import EXAMPLES
from tests.patience import patient

DIRECTORY = EXAMPLES / "frameworks"
NAMES = sorted(path.parent.name for path in DIRECTORY.glob("*/job.yaml"))
RANKS = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
MODULES = {
    "accelerate-ddp": "accelerate",
    "deepspeed-zero3": "deepspeed",
    "lightning-fsdp2": "lightning, torchdata",
    "megatron-core": "megatron.core, psutil",
    "torch-fully-shard": "torch",
    "transformers-trainer": "transformers, accelerate",
    "trl-sft": "trl",
}
"""What each script imports."""
_ENDS = re.compile(r"final loss (\S+)")
_RUNS = re.compile(r"runs ([A-Za-z]\S*(?: with [A-Z][\w-]* ?\d*)?)")
_RESUMED = re.compile(r"resumed after step (\d+)")


@dataclass(frozen=True)
class Result:
    """What the test has seen of one example."""

    name: str
    versions: list[str]
    runs: str
    resumed_after: int
    undisturbed_loss: str
    loss: str


def pins(name: str) -> list[str]:
    """The versions that an example states."""
    return (DIRECTORY / name / "requirements.txt").read_text().split()


def objects(name: str, python: str, pause: float) -> list[KubeObject]:
    """The objects of an example, as kustomize makes them, with another interpreter and a pause after each step."""
    config: KubeObject = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"train.py": (DIRECTORY / name / "train.py").read_text()},
    }
    items: list[KubeObject] = list(yaml.safe_load_all((DIRECTORY / name / "job.yaml").read_text()))
    spec = next(item["spec"] for item in items if item["kind"] == KIND)
    spec["runtime"]["command"][0] = python
    spec["workers"]["env"] += [{"name": key, "value": value} for key, value in ENVIRONMENT.items()]
    spec["workers"]["env"].append({"name": "PAUSE", "value": str(pause)})
    return [config, *items]


async def undisturbed(name: str, python: str, directory: Path) -> str:
    """The output of rank 0 of a run on this machine that nothing disturbs."""
    port = random.randint(20000, 29000)  # noqa: S311 - spreading, not secrecy
    shared = {
        **{key: value for key, value in os.environ.items() if not key.startswith("MESHWRIGHT_")},
        **ENVIRONMENT,
        "MESHWRIGHT_CHECKPOINT_DIR": str(directory),
        "STEPS": "40",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        await asyncio.create_subprocess_exec(
            python,
            str(DIRECTORY / name / "train.py"),
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        for rank in range(RANKS)
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
    return _RUNS.findall(output)[-1].rstrip(",")


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
