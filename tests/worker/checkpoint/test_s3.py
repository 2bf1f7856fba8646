"""Checkpoints in S3: a server of its API (moto), with faults between it and the ranks. Needs s3fs and moto."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from meshwright.api.checkpoint import CheckpointSpec, Retention, StoreSpec
from meshwright_worker.checkpoint import object_store, store
from meshwright_worker.checkpoint.full_tensors import FullTensorReader
from meshwright_worker.checkpoint.manifest import FileRecord, check_files, read_manifest
from meshwright_worker.checkpoint.object_store import ObjectDirectory
from meshwright_worker.checkpoint.other_run import checkpoint_of_other_run
from meshwright_worker.checkpoint.retry import RetryPolicy
from meshwright_worker.checkpoint.store import open_store
from meshwright_worker.checkpoint_errors import CheckpointStoreError, CheckpointVolumeError, ResumeSourceError
from meshwright_worker.distributed.mesh import Mesh
from tests.s3_server import server
from tests.worker.checkpoint.dying_writer import count_connections, save_and_die
from tests.worker.checkpoint.fault_proxy import KINDS, FaultProxy
from tests.worker.checkpoint.saving import save_alone
from tests.worker.checkpoint.test_checkpoint_files import manifest_at
from tests.worker.checkpoint.test_killed_saves import mesh

__all__ = ["mesh", "server"]

pytest.importorskip("s3fs", reason="pip install s3fs 'moto[server]'")
pytest.importorskip("moto.server", reason="pip install s3fs 'moto[server]'")
pytestmark = pytest.mark.long

URI = "s3://checkpoints/team/run"
TENSORS = {"weight": torch.arange(4_000_000.0).reshape(2000, 2000), "step": torch.tensor(7)}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(store, "READ_SECONDS", 2)
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)  # the smallest part of S3: the file has four
    filesystem = opened(server)._filesystem
    if filesystem.exists("checkpoints/team"):
        filesystem.rm("checkpoints/team", recursive=True)


def opened(url: str, generation: int = 0, policy: RetryPolicy | None = None, **options: Any) -> ObjectDirectory:
    found = open_store(URI, generation, StoreSpec.model_validate({"endpoint": url, "region": "us-east-1", **options}))
    assert isinstance(found, ObjectDirectory)
    found._policy = policy or RetryPolicy(attempts=8, first_seconds=0.01)
    return found


def save_step(directory: ObjectDirectory, step: int) -> None:
    directory.prepare(step)

    def commit(files: dict[str, FileRecord]) -> None:
        directory.commit(manifest_at(step).model_copy(update={"files": files}))

    save_alone(TENSORS, directory.sink(step), commit)


def is_intact(directory: ObjectDirectory, step: int) -> bool:
    files = directory.files(step)
    check_files(files, read_manifest(files))
    reader = FullTensorReader(files)
    return all(torch.equal(reader.read(name), tensor) for name, tensor in TENSORS.items())


def test_checkpoints_are_saved_in_parts_retained_and_loaded(server: str) -> None:
    directory = opened(server)
    for step in (10, 20, 30):
        save_step(directory, step)
        directory.retain(Retention(2))
    assert directory.steps() == [30, 20]
    assert is_intact(directory, 30)
    info = directory._filesystem.info("checkpoints/team/run/step-00000030-g0/rank-00000.safetensors")
    assert int(info["ETag"].strip('"').partition("-")[2]) > 1, "an upload in parts has their number in its tag"


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"encryption": "S3"}, "AES256"), ({"encryption": "KMS", "kmsKey": "alias/ours"}, "aws:kms")],
)
def test_objects_are_encrypted_by_the_store(server: str, options: dict[str, str], expected: str) -> None:
    directory = opened(server, **options)
    save_step(directory, 10)
    for name in ("meshwright.json", "rank-00000.safetensors"):
        key = f"team/run/step-00000010-g0/{name}"
        found = directory._filesystem.call_s3("head_object", Bucket="checkpoints", Key=key)
        assert found["ServerSideEncryption"] == expected


def test_a_save_and_a_load_survive_faults_of_every_kind(server: str) -> None:
    with FaultProxy(server, seed=1, share=0.25, silence_seconds=3.0) as proxy:
        directory = opened(proxy.url)
        for step in (10, 20):
            save_step(directory, step)
        assert directory.steps() == [20, 10]
        assert is_intact(directory, 20)
        assert set(proxy.faults) == set(KINDS), proxy.faults
    assert is_intact(opened(server), 10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_stays_away_fails_the_save_and_leaves_the_one_before(server: str, kind: str) -> None:
    save_step(opened(server), 10)
    with FaultProxy(server, seed=2, share=1.0, silence_seconds=3.0) as proxy:
        proxy.kinds = (kind,)
        broken = opened(proxy.url, policy=RetryPolicy(attempts=1))
        with pytest.raises(CheckpointStoreError, match=r"team/run.* cannot be "):
            broken.prepare(20)
    assert opened(server).steps() == [10]
    assert is_intact(opened(server), 10)


def test_a_bucket_that_does_not_exist_is_named(server: str) -> None:
    found = open_store("s3://nosuch/run", 0, StoreSpec(endpoint=server, region="us-east-1"))
    with pytest.raises(CheckpointStoreError, match="the bucket of s3://nosuch/run does not exist"):
        found.steps()


def test_another_run_begins_from_a_checkpoint_there_which_stays_as_it_is(server: str, mesh: Mesh) -> None:
    for generation, step in ((1, 10), (1, 20), (2, 20)):
        save_step(opened(server, generation), step)
    filesystem = opened(server)._filesystem
    before = filesystem.find("checkpoints/team", detail=True)

    def chosen(resume_from: str, url: str = server, uri: str | None = None) -> tuple[str, int]:
        found = CheckpointSpec.model_validate(
            {"claimName": "c", "resumeFrom": resume_from, "uri": uri, "store": {"endpoint": url, "region": "us-east-1"}}
        )
        path, manifest = checkpoint_of_other_run(found, "", mesh, manifest_at(0), 100)
        return str(path), manifest.state.step

    assert chosen(URI, uri="s3://checkpoints/own") == (f"{URI}/step-00000020-g2", 20)
    assert chosen(f"{URI}/step-00000020-g1/") == (f"{URI}/step-00000020-g1", 20)
    assert chosen(f"{URI}/step-00000010") == (f"{URI}/step-00000010-g1", 10)
    for missing in (
        "s3://checkpoints/team/other",
        "s3://nosuch/run",
        f"{URI}/step-00000030",
        f"{URI}/step-00000010-g2",
    ):
        with pytest.raises(ResumeSourceError, match=f"`checkpoint.resumeFrom: {missing}`: .*(name|exist)"):
            chosen(missing)
    with FaultProxy(server, seed=2, share=1.0, silence_seconds=3.0) as proxy, pytest.MonkeyPatch.context() as patch:
        proxy.kinds = ("500",)
        patch.setattr(object_store, "RetryPolicy", lambda: RetryPolicy(attempts=1))
        with pytest.raises(CheckpointVolumeError, match=f"`checkpoint.resumeFrom: {URI}`: .* cannot be listed"):
            chosen(URI, proxy.url)
    filesystem.pipe_file("checkpoints/team/run/step-00000020-g2/rank-00000.safetensors", b"other")
    assert chosen(URI) == (f"{URI}/step-00000010-g1", 10), "as a run does with its own: the newest one of a step counts"
    with pytest.raises(ResumeSourceError, match="is damaged: it has 5 bytes"):
        chosen(f"{URI}/step-00000020")
    filesystem.invalidate_cache()
    after = filesystem.find("checkpoints/team", detail=True)
    assert {name: entry["ETag"] for name, entry in after.items() if "-g2/rank" not in name} == {
        name: entry["ETag"] for name, entry in before.items() if "-g2/rank" not in name
    }


KILLS = 20
"""Each process makes a new client, which takes a second: `test_killed_saves.py` kills more often."""


def test_a_writer_that_is_killed_at_any_byte_leaves_the_newest_complete_checkpoint(server: str) -> None:
    """At any byte that it sends: of a part, of the request that joins them, of the index or the manifest."""
    save_step(opened(server), 10)

    def save_as(generation: int) -> None:
        # A fork has none of its parent's threads and connections.
        save_step(opened(server, generation), 20)

    total = save_and_die(lambda: save_as(1), 1 << 60, count_connections)
    assert total is not None
    assert total > sum(tensor.nbytes for tensor in TENSORS.values())
    outcomes = []
    for number, offset in enumerate(sorted(random.Random(3).sample(range(total), KILLS)), 2):
        directory = opened(server, number)
        directory.remove_newer(10)
        assert save_and_die(lambda now=number: save_as(now), offset, count_connections) is None  # type: ignore[misc]
        directory.clean()
        outcomes.append(directory.steps()[0])
        assert is_intact(directory, outcomes[-1])
    assert outcomes == sorted(outcomes), "once complete, it is never lost"
    assert outcomes[0] == 10
    save_step(directory, 21)
    assert opened(server).steps()[0] == 21
