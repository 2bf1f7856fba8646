"""Mistakes of a first hour: each is answered by admission or by a condition that names the field and the fix.

A job whose ranks have to find the mistake is Stalled with the cause after its first start, and has used no restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.api import conditions
from meshwright.api.objects import KubeObject
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.data.files import open_directory
from meshwright.data.tokenize import TextSource, tokenize
from meshwright.data.tokenizers import ByteTokenizer
from meshwright_cli import manifest
from meshwright_local.kube.resources import CLAIMS, JOBS
from meshwright_local.nodeagent.volumes import claim_directory
from tests.e2e.local_stack import NAMESPACE, Stage, command, eventually, tiny
from tests.tiers import mostly_long

SECONDS = 60
TEXTS = {"source": "Files", "claimName": "texts"}
ONE = {"replicas": 1, "parallelism": {"tensor": 1}, "checkpoint": None}
"""One rank, without checkpoints, in a pod of one GPU."""


def small(name: str, workers: dict[str, Any] | None = None, **changes: Any) -> KubeObject:
    """The job that the mistakes are made in."""
    return tiny(name, **{**ONE, "workers": {"gpusPerWorker": 1, **(workers or {})}, **changes})[1]


def volume(**source: str) -> dict[str, Any]:
    return {"volumes": [{"name": "extra", "mountPath": "/extra", **source}]}


def selecting(name: str, selector: dict[str, str]) -> KubeObject:
    return small(name, {"nodeSelector": selector})


ADMISSION: list[tuple[KubeObject, str]] = [
    (small("text-for-a-number", replicas="2"), "spec.replicas"),
    (small("x" * 70), "metadata.name"),
    (small("my_job"), "metadata.name"),
    (small("a-typo", model={"layres": 2}), "layres"),
    (small("no-such-schedule", parallelism={"schedule": "1FOneB"}), "spec.parallelism.schedule"),
    (small("no-steps", training={"steps": None}), "spec.training.steps"),
    (small("vocabulary", model={"vocabSize": 200}), "spec.model.vocabSize"),
    (small("odd-heads", model={"heads": 3}), "spec.model.hiddenSize"),
    ({**small("old-version"), "apiVersion": "meshwright.dev/v1"}, "the cluster has no `meshwright.dev/v1`"),
]

WIDE = small("too-wide", {"gpusPerWorker": 16}, replicas=16, training={"globalBatchSize": 32})

# The reason, and what the message must contain: field and fix.
OPERATOR: list[tuple[KubeObject, str, tuple[str, ...]]] = [
    (small("preset"), "InvalidSpec", ("`model.preset`", "did you mean `llama-3-8b`")),
    (
        small("no-claim", data={**TEXTS, "claimName": "text"}),
        "ClaimNotFound",
        ("spec.data.claimName", "`texts`"),
    ),
    (selecting("no-label", {"pool": "a100"}), "Placing", ("no label pool",)),
    (small("resource", {"gpuResource": "nvidia.com/gpus"}), "Placing", ("no nvidia.com/gpus, but nvidia.com/gpu",)),
    (WIDE, "Placing", ("workers.gpusPerWorker",)),
    (
        small("no-secret", volume(secretName="wandb")),
        "FailedMount",
        ("Create Secret wandb", "`spec.workers.volumes[0].secretName`"),
    ),
    (
        small("no-map", volume(configMapName="settings")),
        "FailedMount",
        ("Create ConfigMap settings", "`spec.workers.volumes[0].configMapName`"),
    ),
]
OPERATOR[0][0]["spec"]["model"] = {"preset": "llama-3-8"}

RANKS: list[tuple[KubeObject, str, tuple[str, ...]]] = [
    (small("empty", data={**TEXTS, "claimName": "nothing"}), "InvalidInput", ("`data.pattern", "no file with content")),
    (small("pattern", data={**TEXTS, "pattern": "*.md"}), "InvalidInput", ("`data.pattern: *.md`", "files there: ")),
    (
        small("tokenizer", data={**TEXTS, "tokenizer": "BPE", "tokenizerFile": "tok.json"}),
        "InvalidInput",
        ("`data.tokenizerFile`", "tok.json cannot be read"),
    ),
    (
        small("subdirectory", data={**TEXTS, "format": "Tokens"}),
        "InvalidInput",
        ("there are tokens in tokens: set `data.mixture: [{path: tokens, weight: 1}]`",),
    ),
    (
        small("resume", checkpoint={"claimName": "texts", "resumeFrom": "base-0a1b2c3d"}),
        "InvalidInput",
        (
            "`checkpoint.resumeFrom: base-0a1b2c3d`: there is no complete checkpoint in ",
            "name the directory or the URI",
        ),
    ),
    (
        small("weights", training={"initialWeights": "/no/such/model"}),
        "InvalidInput",
        ("`training.initialWeights: /no/such/model` cannot be read",),
    ),
]


@pytest.mark.parametrize(("job", "field"), ADMISSION, ids=[job["metadata"]["name"][:20] for job, _ in ADMISSION])
async def test_admission_names_the_field(stage: Stage, job: KubeObject, field: str) -> None:
    with pytest.raises(manifest.ManifestError) as caught:
        await stage.apply([job])
    assert field in str(caught.value)


@pytest.fixture(scope="module")
def claims() -> dict[str, dict[str, str]]:
    """Claims and the files on them."""
    return {"texts": {"book.txt": "once upon a time\n" * 200}, "nothing": {}}


async def prepared(stage: Stage, claims: dict[str, dict[str, str]]) -> Path:
    """Create the claims and their files; the directory of the first one."""
    for name, files in claims.items():
        await stage.apply([{**tiny(name)[0], "metadata": {"name": name}}])

        async def bound(name: str = name) -> bool:
            claim = await stage.client.get(CLAIMS, name, NAMESPACE)
            return bool((claim.get("status") or {}).get("phase") == "Bound")

        await eventually(f"claim {name} is bound", bound)
        directory = await claim_directory(stage.client, NAMESPACE, name)
        for file, text in files.items():
            (directory / file).write_text(text)
    first = await claim_directory(stage.client, NAMESPACE, "texts")
    if not (first / "tokens").exists():
        tokenize(TextSource(open_directory(str(first)), "*.txt"), ByteTokenizer(), first / "tokens")
    return first


async def answered(stage: Stage, job: KubeObject, reason: str, parts: tuple[str, ...]) -> ParallelTrainingJobStatus:
    """Apply the job and wait for the condition; its status then."""
    name = job["metadata"]["name"]
    await stage.apply([job])

    def names_it(status: ParallelTrainingJobStatus) -> bool:
        ready = conditions.find(status.conditions, conditions.READY)
        return ready is not None and ready.reason == reason and all(part in ready.message for part in parts)

    return await stage.until(name, names_it, f"{reason} with {parts}", SECONDS)


@pytest.mark.parametrize(
    ("job", "reason", "parts"),
    mostly_long(OPERATOR, lambda case: case[0]["metadata"]["name"] != "no-map"),  # which differs little from no-secret
    ids=[job["metadata"]["name"] for job, _, _ in OPERATOR],
)
async def test_the_operator_names_field_and_fix(
    stage: Stage, claims: dict[str, dict[str, str]], job: KubeObject, reason: str, parts: tuple[str, ...]
) -> None:
    await prepared(stage, claims)
    status = await answered(stage, job, reason, parts)
    assert status.restart_count == 0


@pytest.mark.long  # `tests/worker/trainer/test_run_inputs.py` has all of them without a cluster
@pytest.mark.parametrize(("job", "reason", "parts"), RANKS, ids=[job["metadata"]["name"] for job, _, _ in RANKS])
async def test_what_ranks_find_stalls_the_job_at_once(
    stage: Stage, claims: dict[str, dict[str, str]], job: KubeObject, reason: str, parts: tuple[str, ...]
) -> None:
    await prepared(stage, claims)
    status = await answered(stage, job, reason, parts)
    assert conditions.is_true(status.conditions, conditions.STALLED)
    assert (status.restart_count, status.restarts_toward_limit) == (0, 0)


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_a_job_that_is_deleted_and_applied_again_starts_with_the_documented_names(
    stage: Stage, times: int
) -> None:
    """The object is gone before its pods are. The new job waits for them, and its first pod is `NAME-w0-0`."""
    items = command("again", "sleep", "600")
    await stage.apply(items)
    for _ in range(times):
        await stage.until("again", lambda status: status.ready_ranks == "4/4", "4/4 ranks")
        uid = (await stage.client.get(JOBS, "again", NAMESPACE))["metadata"]["uid"]
        await stage.client.delete(JOBS, "again", NAMESPACE)

        async def gone(uid: str = uid) -> bool:
            found = await stage.client.find(JOBS, "again", NAMESPACE)
            return found is None or found["metadata"]["uid"] != uid

        await eventually("the object is gone", gone)
        await stage.apply(items)
    status = await stage.until("again", lambda status: status.ready_ranks == "4/4", "4/4 ranks")
    assert status.placement is not None
    assert sorted(entry.pod for entry in status.placement.workers) == ["again-w0-0", "again-w1-0"]
    assert status.restart_count == 0
