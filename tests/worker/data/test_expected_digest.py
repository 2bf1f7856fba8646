"""The digest of a run from its data alone: what the ranks of any layout add up to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.api.data import DataSpec
from meshwright_worker import expected_digest as program
from meshwright_worker.data.mixture import open_stream
from meshwright_worker.data.sample_order import SampleDigest

TRAINING: dict[str, Any] = {"steps": 6, "globalBatchSize": 4, "sequenceLength": 8, "seed": 3}


def manifest(path: Path, training: dict[str, Any], **spec: Any) -> str:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"}}
    job = {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelTrainingJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"layers": 1, "hiddenSize": 8, "intermediateSize": 8, "heads": 1, "vocabSize": 260},
            "data": {"source": "Files", "claimName": "text", "pattern": "*.txt"},
            "training": training,
            "workers": {"image": "i"},
            **spec,
        },
    }
    path.write_text(yaml.safe_dump_all([claim, job]))
    return str(path)


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["expected_digest", *arguments])
    program.main()
    return capsys.readouterr().out.strip()


def of_two_replicas(directory: Path, steps: int) -> str:
    """The digest as two replicas compute it, step by step, with half of each batch."""
    data = DataSpec.model_validate({"source": "Files", "claimName": "text", "pattern": "*.txt"})
    stream = open_stream(data, str(directory), 8, 3)
    parts = [SampleDigest(), SampleDigest()]
    for step in range(steps):
        for replica, part in enumerate(parts):
            numbers = range(step * 4 + replica * 2, step * 4 + replica * 2 + 2)
            part.add(numbers, stream.rows(numbers))
    return f"{sum(part.value for part in parts) % (1 << 63):016x}"


def test_digest_is_what_the_replicas_of_a_run_add_up_to(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 20)
    job = manifest(tmp_path / "job.yaml", TRAINING)
    found = printed(monkeypatch, capsys, job, "--data", str(tmp_path))
    assert found == of_two_replicas(tmp_path, 6)
    shorter = printed(monkeypatch, capsys, job, "--data", str(tmp_path), "--steps", "5")
    assert shorter == of_two_replicas(tmp_path, 5) != found


def test_a_batch_that_follows_the_replicas_needs_the_number_of_samples(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 20)
    elastic = {"maxReplicas": 2, "scaledBatch": {"replicas": 1, "learningRate": "Constant"}}
    job = manifest(tmp_path / "job.yaml", TRAINING, elastic=elastic, checkpoint={"claimName": "c"})
    with pytest.raises(SystemExit):
        printed(monkeypatch, capsys, job, "--data", str(tmp_path))
    assert "pass --samples" in capsys.readouterr().err
    found = printed(monkeypatch, capsys, job, "--data", str(tmp_path), "--samples", "20")
    assert found == of_two_replicas(tmp_path, 5)


def test_islands_with_separate_corpora_each_read_their_own(tmp_path, monkeypatch, capsys) -> None:
    for island in range(2):
        directory = tmp_path / f"island-{island}"
        directory.mkdir()
        (directory / "a.txt").write_text(f"{island} and more " * 30)
    federated = {**TRAINING, "outer": {"method": "FedAvg", "everySteps": 2}}
    found = printed(
        monkeypatch, capsys, manifest(tmp_path / "job.yaml", federated, replicas=2), "--data", str(tmp_path)
    )
    data = DataSpec.model_validate({"source": "Files", "claimName": "text", "pattern": "*.txt"})
    digest = SampleDigest()
    for island in range(2):
        digest.add(range(12), open_stream(data, str(tmp_path / f"island-{island}"), 8, 3).rows(range(12)))
    assert found == f"{digest.value:016x}"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kind: Pod", "expected exactly one ParallelTrainingJob, found 0"),
        ("kind: ParallelTrainingJob\nspec: {}", "spec."),
        ("a: [", "expected"),
        ("kind: ParallelTrainingJob\nspec: {runtime: {command: [a]}, workers: {image: i}}", "the data of a command"),
    ],
)
def test_manifests_without_data_are_refused(text, word, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        printed(monkeypatch, capsys, str(tmp_path / "job.yaml"))
    shown = capsys.readouterr().err
    assert word in shown
    assert (ended.value.code, "usage" in shown) == (1, False), "the command is right, its file is not"
