"""Checkpoints behind a URI: complete or invisible without a rename, and requests that fail for a while."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from meshwright.api.checkpoint import Retention, StoreSpec
from meshwright.protocol.messages import FailureKind
from meshwright_worker.checkpoint.full_tensors import FullTensorReader, find_checkpoint
from meshwright_worker.checkpoint.loader import load_tensors
from meshwright_worker.checkpoint.manifest import MANIFEST, FileRecord, check_files, read_manifest
from meshwright_worker.checkpoint.object_store import ObjectDirectory
from meshwright_worker.checkpoint.retry import RetryPolicy, retry
from meshwright_worker.checkpoint.store import _settings, open_store
from meshwright_worker.checkpoint_errors import (
    CheckpointError,
    CheckpointStoreError,
    DamagedCheckpointError,
    UnusableStoreError,
)
from meshwright_worker.rank.failures import classify
from tests.worker.checkpoint.saving import save_alone
from tests.worker.checkpoint.test_checkpoint_files import manifest_at

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.tensor(7), "empty": torch.empty(0, 2)}
QUICK = RetryPolicy(attempts=3, first_seconds=0.0)


@pytest.fixture
def root() -> Iterator[str]:
    uri = f"memory://{uuid.uuid4().hex}/run"
    yield uri
    MemoryFileSystem.store.clear()


def save_step(store: ObjectDirectory, step: int) -> None:
    store.prepare(step)

    def commit(files: dict[str, FileRecord]) -> None:
        store.commit(manifest_at(step).model_copy(update={"files": files}))

    save_alone(TENSORS, store.sink(step), commit)


def store_at(uri: str, generation: int = 0) -> ObjectDirectory:
    store = open_store(uri, generation)
    assert isinstance(store, ObjectDirectory)
    return store


def test_a_store_can_be_sent_to_the_process_that_writes(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run", 3)
    assert isinstance(store, ObjectDirectory)
    save_step(pickle.loads(pickle.dumps(store)), 5)  # noqa: S301 - its own
    assert store.steps() == [5]
    assert store.location(5).endswith("step-00000005-g3")


def test_a_checkpoint_comes_back_as_it_was(root: str) -> None:
    store = store_at(root, generation=2)
    save_step(store, 5)
    assert store.steps() == [5]
    files = store.files(5)
    assert str(files) == store.location(5) == f"{root}/step-00000005-g2"
    manifest = read_manifest(files)
    check_files(files, manifest)
    loaded = {name: torch.full_like(tensor, 3) for name, tensor in TENSORS.items()}
    load_tensors(loaded, files, None)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    reader = FullTensorReader(find_checkpoint(root)[0])
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in TENSORS.items())
    assert find_checkpoint(store.location(5))[1] == manifest


def test_a_checkpoint_is_invisible_until_its_manifest_is_written(root: str) -> None:
    store = store_at(root)
    store.prepare(5)
    store.sink(5).write_tensors("rank-00000.safetensors", TENSORS)
    assert store.steps() == []
    store.commit(manifest_at(5))
    assert store.steps() == [5]


def test_the_newest_are_retained_and_what_is_being_written_too(root: str) -> None:
    store = store_at(root)
    for step in (3, 20, 100):
        save_step(store, step)
    store.sink(200).write("rank-00001.safetensors", b"x")
    store.sink(7).write("rank-00001.safetensors", b"x")  # of a save that failed
    store.retain(Retention(2))
    assert store.steps() == [100, 20]
    assert store._names() == ["step-00000020-g0", "step-00000100-g0", "step-00000200-g0"]


def test_a_new_generation_removes_what_the_one_before_has_not_finished(root: str) -> None:
    old, new = store_at(root, 1), store_at(root, 2)
    save_step(old, 10)
    old.sink(20).write("rank-00000.safetensors", b"x")
    new.clean()
    assert (new.steps(), new._names()) == ([10], ["step-00000010-g1"])
    # A straggler's manifest without its files is damage, and never another generation's checkpoint.
    files = {"rank-00000.safetensors": FileRecord(size=1, crc32=1)}
    old.commit(manifest_at(20).model_copy(update={"files": files}))
    with pytest.raises(DamagedCheckpointError, match="the file is missing"):
        check_files(new.files(20), read_manifest(new.files(20)))
    new.quarantine(20)
    assert new.steps() == [10]


def test_the_same_step_of_a_later_generation_replaces_the_old(root: str) -> None:
    for generation in (1, 2):
        save_step(store_at(root, generation), 10)
    store = store_at(root, 3)
    assert str(store.files(10)).endswith("step-00000010-g2")
    store.retain(Retention(2))
    assert store._names() == ["step-00000010-g2"]


def test_a_step_before_the_existing_ones_is_rejected(root: str) -> None:
    store = store_at(root)
    save_step(store, 200)
    with pytest.raises(CheckpointError, match="later steps than 10, up to 200"):
        store.prepare(10)


@pytest.mark.parametrize("change", ["flip", "cut", "remove", "manifest"])
def test_damage_gives_way_to_the_one_before(root: str, change: str) -> None:
    store = store_at(root)
    for step in (1, 2):
        save_step(store, step)
    path = f"{store._path}/step-00000002-g0/rank-00000.safetensors"
    content = store._filesystem.cat_file(path)
    if change == "remove":
        store._filesystem.rm_file(path)
    elif change == "manifest":
        store._filesystem.pipe_file(path.replace("rank-00000.safetensors", MANIFEST), b"{}")
    else:
        new = content[:-1] + bytes([content[-1] ^ 1]) if change == "flip" else content[:-1]
        store._filesystem.pipe_file(path, new)
    assert find_checkpoint(root)[1].state.step == 1


class Failing:
    """A file system whose requests fail a few times."""

    def __init__(self, inner: Any, failures: list[Exception], skipped: tuple[str, ...] = ()) -> None:
        self._inner, self.failures, self.skipped, self.calls = inner, failures, skipped, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.failures and name not in self.skipped:
                raise self.failures.pop(0)
            return found(*args, **kwargs)

        return call


def test_requests_are_repeated_while_the_store_is_busy(root: str) -> None:
    path = fsspec.core.url_to_fs(root)[1]
    failures: list[Exception] = [OSError(503, "SlowDown"), TimeoutError(), ConnectionResetError(), OSError("busy")]
    filesystem = Failing(fsspec.filesystem("memory"), failures)
    store = ObjectDirectory(filesystem, path, root, policy=RetryPolicy(attempts=5, first_seconds=0.0))
    save_step(store, 1)
    assert (failures, store.steps()) == ([], [1])


class Locked(Failing):
    """A file system whose objects nobody may remove, as in a bucket for which these credentials may only write."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, [])

    def rm_file(self, *_: object) -> None:
        raise PermissionError("Access Denied")

    rm = rm_file


def test_without_the_right_to_delete_checkpoints_are_saved_and_starts_go_on(root: str) -> None:
    path = fsspec.core.url_to_fs(root)[1]
    locked = [ObjectDirectory(Locked(fsspec.filesystem("memory")), path, root, number) for number in range(3)]
    locked[0].prepare(10)
    locked[0].sink(10).write("rank-00000.safetensors", b"interrupted")
    for store in locked[1:]:
        store.clean()
    save_step(locked[1], 10)
    save_step(locked[1], 20)
    assert locked[1].steps() == [20, 10]
    with pytest.raises(CheckpointStoreError, match=r"cannot be removed .*: check the credentials and their rights"):
        locked[1].retain(Retention(1))
    assert set(locked[2].steps()) >= {20}, "the newest one is not among what was to be removed"
    check_files(locked[2].files(20), read_manifest(locked[2].files(20)))


def answered(code: str, kind: type[Exception] = PermissionError) -> Exception:
    """The error of a back end for an answer of S3, as s3fs makes it."""
    answer = RuntimeError("ClientError")
    answer.response = {"Error": {"Code": code}}  # type: ignore[attr-defined]
    error = kind("no")
    error.__cause__ = answer
    return error


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (answered("RequestTimeTooSkewed"), "PermissionError: no: the clock of this node is wrong"),
        (answered("ExpiredToken"), r"no \(ExpiredToken\): check the credentials .* `checkpoint.store.secretName`"),
        (answered("InvalidToken", OSError), r"OSError: no \(InvalidToken\): check the credentials"),
        (PermissionError("Forbidden"), "Forbidden: check the credentials and their rights in the bucket"),
    ],
)
def test_an_error_of_credentials_or_clocks_says_what_to_do_and_is_not_repeated(error: Exception, fix: str) -> None:
    def action() -> None:
        raise error

    with pytest.raises(CheckpointStoreError, match=r"writing x \(1 attempt\): .*" + fix):
        retry(action, "writing x", QUICK)


def test_a_bucket_that_is_not_there_is_not_an_empty_one(root: str) -> None:
    """A run that took it for empty would begin at step 0."""
    path = fsspec.core.url_to_fs(root)[1]
    filesystem = Failing(fsspec.filesystem("memory"), [], skipped=("invalidate_cache",))
    store = ObjectDirectory(filesystem, path, root, policy=QUICK)
    assert store.steps() == []
    save_step(store, 10)
    for action in (store.steps, store.clean):
        filesystem.failures = [answered("NoSuchBucket", FileNotFoundError)]
        with pytest.raises(CheckpointStoreError, match=f"the bucket of {root} does not exist"):
            action()
    assert store.steps() == [10]


@pytest.mark.parametrize("error", [PermissionError("Forbidden"), OSError(28, "full"), ImportError("gcsfs")])
def test_what_does_not_pass_is_not_repeated(error: Exception) -> None:
    calls: list[int] = []

    def action() -> None:
        calls.append(1)
        raise error

    with pytest.raises(CheckpointStoreError, match=r"writing x \(1 attempt\)"):
        retry(action, "writing x", QUICK)
    assert calls == [1]


def test_a_store_that_stays_away_is_an_error_of_the_store() -> None:
    waits: list[float] = []

    def action() -> None:
        raise TimeoutError("no answer")

    with pytest.raises(CheckpointStoreError, match=r"writing x \(6 attempts\): TimeoutError: no answer"):
        retry(action, "writing x", RetryPolicy(), waits.append)
    assert all(0.25 * 2**n <= seconds <= 0.5 * 2**n for n, seconds in enumerate(waits))
    assert len(waits) == 5


def test_an_upload_that_fails_leaves_no_checkpoint(root: str) -> None:
    store = store_at(root)
    store._policy = QUICK
    tensors = {"a": torch.ones(3), "b": torch.ones(1, dtype=torch.complex64)}
    with pytest.raises(OSError, match="has no name in the safetensors format"):
        store.sink(1).write_tensors("rank-00000.safetensors", tensors)
    assert store.steps() == []
    store.clean()
    assert store._names() == []


@pytest.mark.parametrize("uri", ["nosuch://bucket/x", "s3x://bucket/x"])
def test_an_unknown_scheme_names_the_fix(uri: str) -> None:
    with pytest.raises(UnusableStoreError, match=f"^`checkpoint.uri: {uri}` cannot be opened: .*package") as caught:
        open_store(uri, field="checkpoint.uri")
    assert classify(caught.value) is FailureKind.INVALID_INPUT, "another attempt would end the same way"
    with pytest.raises(CheckpointStoreError, match=f"^`{uri}` cannot be opened: .*package"):
        open_store(uri)


def test_a_missing_package_is_named_and_found_at_once() -> None:
    fsspec.register_implementation("needy", "nosuch_package.files.NeedyFiles", errtxt="Install it to access needy")
    says = "Install it .*the package nosuch_package: `pip install nosuch_package`$"
    with pytest.raises(UnusableStoreError, match=says) as caught:
        open_store("needy://bucket/x", field="checkpoint.uri")
    assert classify(caught.value) is FailureKind.INVALID_INPUT, "another attempt would end the same way"


@pytest.mark.parametrize("uri", ["S3://Bucket/x", "FILE:///x"])
def test_a_scheme_in_capitals_is_not_a_missing_package(uri: str) -> None:
    scheme, _, rest = uri.partition("://")
    with pytest.raises(CheckpointStoreError, match=f"lower case, as in `{scheme.lower()}://{rest}`$"):
        open_store(uri)


def test_settings_of_the_store_reach_the_package_of_its_scheme() -> None:
    options = StoreSpec.model_validate(
        {"endpoint": "https://s3.test", "region": "eu-west-1", "encryption": "KMS", "kmsKey": "key"}
    )
    settings = _settings("s3://bucket/x", options)
    assert settings["endpoint_url"] == "https://s3.test"
    assert settings["client_kwargs"] == {"region_name": "eu-west-1"}
    assert settings["s3_additional_kwargs"] == {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key"}
    assert _settings("gs://bucket/x", StoreSpec()) == {}
    assert json.dumps(settings)


def test_a_directory_of_this_machine_is_a_store_too(tmp_path: Path) -> None:
    store = store_at(f"file://{tmp_path}/run")
    save_step(store, 4)
    store.retain(Retention(1))
    assert sorted(path.name for path in (tmp_path / "run" / "step-00000004-g0").iterdir()) == [
        MANIFEST,
        "rank-00000.safetensors",
        "tensors.json",
    ]
