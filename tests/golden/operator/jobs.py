"""Small jobs of every kind, drawn by a seed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random
from typing import Any

from meshwright.api.objects import KubeObject
from tests.operator.support import job

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
EXIT_RULES = [
    {"values": [64, 78], "action": "FailJob"},
    {"values": [75, 137], "action": "Ignore"},
    {"values": [2], "action": "Count"},
]


class Jobs:
    """Draws jobs of certain kinds."""

    def __init__(self, chance: Random, kinds: Sequence[str], steps: Sequence[int], *, steady: bool) -> None:
        self._chance = chance
        self._kinds = kinds
        self._steps = steps
        self._steady = steady
        self.drawn: dict[str, KubeObject] = {}
        """The jobs drawn so far, by name."""

    def draw(self) -> KubeObject:
        """Draws a job."""
        name = NAMES[len(self.drawn) % len(NAMES)]
        body: KubeObject = getattr(self, f"_{self._chance.choice(self._kinds)}")(name)
        if self._steady:
            body["spec"]["training"]["steps"] = 10**6
            body["spec"] |= {"checkpoint": {"claimName": "claim"}, "recovery": {"maxRestarts": 100}}
        else:
            body["spec"] |= self._options(body["spec"])
        self.drawn[name] = copy.deepcopy(body)
        return body

    def _small(self, name: str) -> KubeObject:
        """One pod of two GPUs a replica."""
        return job(
            name,
            replicas=self._chance.choice((1, 2, 2, 3)),
            parallelism={"tensor": 2, "pipeline": 1, "microBatches": 1},
            training=self._training(),
        )

    def _piped(self, name: str) -> KubeObject:
        """Two pipeline stages a replica, one pod each."""
        return job(name, training=self._training(), replicas=self._chance.choice((1, 2)))

    def _narrow(self, name: str) -> KubeObject:
        """Pods of one GPU."""
        workers = {"image": "one", "gpusPerWorker": 1}
        parallelism = {"tensor": 1, "pipeline": 2, "microBatches": 2}
        return job(name, workers=workers, parallelism=parallelism, training=self._training())

    def _chosen(self, name: str) -> KubeObject:
        """Degrees that the planner chooses."""
        workers = {"image": "one", "gpusPerWorker": self._chance.choice((1, 2))}
        return job(name, workers=workers, parallelism={}, training=self._training())

    def _large(self, name: str) -> KubeObject:
        """A preset with a cost model, and degrees that the planner chooses."""
        training = {
            **self._training(),
            "globalBatchSize": 48,
            "sequenceLength": 2048,
            "precision": "bf16",
        }
        preset = self._chance.choice(("llama-3.2-1b", "gpt3-1.3b", "qwen2.5-0.5b", "llama-3-70b"))
        workers = {"image": "one", "gpusPerWorker": self._chance.choice((1, 2))}
        parallelism: dict[str, Any] = {"zeroStage": self._chance.choice((0, 2, 3))}
        return job(name, model={"preset": preset}, training=training, workers=workers, parallelism=parallelism)

    def _theirs(self, name: str) -> KubeObject:
        """Pods of an external scheduler."""
        body = self._piped(name) if self._chance.random() < 0.5 else self._narrow(name)
        body["spec"]["workers"] |= {"schedulerName": "volcano", "labels": {"queue": "research"}}
        return body

    def _command(self, name: str) -> KubeObject:
        """A user's command."""
        body = job(name, replicas=self._chance.choice((2, 4)))
        for part in ("model", "data", "training", "parallelism"):
            del body["spec"][part]
        body["spec"]["runtime"] = {"command": ["python", "train.py"]}
        if self._chance.random() < 0.5:
            body["spec"]["successPolicy"] = "FirstWorker"
        return body

    def _training(self) -> KubeObject:
        return {"steps": self._chance.choice(self._steps), "globalBatchSize": 24, "sequenceLength": 64}

    def _options(self, spec: KubeObject) -> KubeObject:
        """Options that any job may set."""
        chance, native = self._chance, "training" in spec
        found: KubeObject = {}
        if chance.random() < 0.6:
            found["checkpoint"] = {"claimName": "claim", **({"everySteps": chance.choice((5, 10))} if native else {})}
        if native and chance.random() < 0.2:
            found["data"] = {**spec["data"], "heldOut": 0.1}
            found["training"] = {**spec["training"], "evaluation": {"everySteps": chance.choice((5, 15))}}
        recovery: KubeObject = {"maxRestarts": chance.choice((0, 3, 10, 100, 100))}
        if chance.random() < 0.3:
            recovery["exitCodes"] = EXIT_RULES
        if chance.random() < 0.2:
            recovery["restartWindowSeconds"] = 60
        if chance.random() < 0.3:
            recovery["hangTimeoutSeconds"] = chance.choice((30, 120))
        if chance.random() < 0.2:
            recovery["cordonedNodes"] = "Stay"
        if chance.random() < 0.15 and "schedulerName" not in spec["workers"]:
            recovery["spareNodes"] = 1
        found["recovery"] = recovery
        if chance.random() < 0.3:
            found["priority"] = chance.choice((-1, 3, 7))
        if chance.random() < 0.1:
            found["activeDeadlineSeconds"] = chance.choice((300, 900))
        if chance.random() < 0.2:
            found["ttlSecondsAfterFinished"] = chance.choice((0, 20, 100))
        if chance.random() < 0.1:
            found["suspend"] = True
        return found
