"""Experiment trackers: what the packages' own readers find is what rank 0 reported, also across restarts."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.tracking import MlflowSpec, TrackingSpec, WandbSpec
from meshwright_worker.rank.task import StepReport
from meshwright_worker.tracking import tracked_events
from meshwright_worker.tracking.__main__ import Tracker, event_of
from meshwright_worker.tracking.json_lines import cut_after
from meshwright_worker.tracking.records import LINES, Start, step_record
from meshwright_worker.tracking.run_state import RunState
from meshwright_worker.tracking.tracked_events import TrackedEvents, TrackingProcess
from tests.patience import patient

Steps = dict[int, float]


def report(step: int, loss: float | None = None, **more: Any) -> StepReport:
    fields = {
        "gradient_norm": 1.5,
        "learning_rate": 1e-3,
        "tokens": 640,
        "samples": 10 * step,
        "seconds": 0.5,
        "data_seconds": 0.1,
    }
    loss = 10.0 / step if loss is None else loss
    return StepReport(step=step, loss=loss, **{**fields, **more})


def start(directory: Path, spec: TrackingSpec, step: int = 0, generation: int = 1, replicas: int = 2) -> Start:
    return Start(
        spec=spec,
        directory=str(directory),
        name="lm",
        generation=generation,
        step=step,
        ranks=4 * replicas,
        replicas=replicas,
    )


def track(begin: Start, steps: range) -> int:
    """Track these steps in a real tracking process; the number of failures."""
    tracking = TrackingProcess(begin)
    for step in steps:
        tracking.send(report(step, evaluation_loss=3.0 if step % 5 == 0 else None), begin.generation)
    tracking.close()
    return tracking.failures()


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / LINES).read_text().splitlines()]


def json_lines(directory: Path) -> Steps:
    found = [record for record in records(directory) if "event" not in record]
    assert len({record["step"] for record in found}) == len(found)
    return {record["step"]: record["loss"] for record in found}


def tensor_board(directory: Path) -> Steps:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(directory / "tensorboard"), purge_orphaned_data=True)
    reader.Reload()
    found = [(event.step, event.value) for event in reader.Scalars("loss")]
    assert len(dict(found)) == len(found)
    return dict(found)


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after W&B's header of 7 bytes. The package's protobuf reads them."""
    assert content.startswith(b":W&B")
    position, data = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        data += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or the last part
            yield data
            data = b""


def wandb_offline(directory: Path) -> Steps:
    protobuf = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found: list[tuple[int, float]] = []
    for path in sorted((directory / "wandb").glob("offline-run-*/*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = protobuf.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {(item.key or ".".join(item.nested_key)): item.value_json for item in record.history.item}
                found.append((int(json.loads(row["_step"])), float(json.loads(row["loss"]))))
    assert len(dict(found)) == len(found)
    return dict(found)


def mlflow_files(directory: Path) -> Steps:
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient((directory / "mlflow").resolve().as_uri())
    experiment = client.get_experiment_by_name("lm")
    (run,) = client.search_runs([experiment.experiment_id])
    found = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
    assert len(dict(found)) == len(found)
    assert "Restart after step 6" in run.data.tags.get("meshwright.generation.2", "Restart after step 6")
    return dict(found)


TRACKERS = [
    pytest.param(TrackingSpec(), json_lines, id="json-lines"),
    pytest.param(TrackingSpec(tensor_board=True), tensor_board, id="tensorboard"),
    pytest.param(
        TrackingSpec(wandb=WandbSpec(project="lm", offline=True)), wandb_offline, id="wandb", marks=pytest.mark.slow
    ),
    pytest.param(TrackingSpec(mlflow=MlflowSpec(experiment="lm")), mlflow_files, id="mlflow", marks=pytest.mark.slow),
]
PACKAGES = {tensor_board: "tensorboard", wandb_offline: "wandb", mlflow_files: "mlflow"}


def installed(read: Callable[[Path], Steps]) -> None:
    if read in PACKAGES:
        pytest.importorskip(PACKAGES[read])


@pytest.fixture(autouse=True)
def closes_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(tracked_events, "CLOSE_SECONDS", patient(60))


@pytest.mark.long  # as what follows, which restarts in between
@pytest.mark.parametrize(("spec", "read"), TRACKERS)
def test_the_packages_own_readers_find_the_reported_numbers(tmp_path: Path, spec: TrackingSpec, read: Any):
    installed(read)
    assert track(start(tmp_path, spec), range(1, 9)) == 0
    assert read(tmp_path) == pytest.approx({step: 10.0 / step for step in range(1, 9)})


@pytest.mark.parametrize(("spec", "read"), TRACKERS)
def test_after_a_restart_no_step_is_there_twice(tmp_path: Path, spec: TrackingSpec, read: Any):
    installed(read)
    assert track(start(tmp_path, spec), range(1, 9)) == 0
    # The checkpoint is that of step 6: steps 7 and 8 are done again.
    assert track(start(tmp_path, spec, step=6, generation=2), range(7, 13)) == 0
    assert read(tmp_path) == pytest.approx({step: 10.0 / step for step in range(1, 13)})


@pytest.mark.slow
def test_steps_without_a_loss_are_not_in_mlflow_twice(tmp_path: Path):
    """The last step of a run was that of its last loss, and a loss that is not finite is left out."""
    pytest.importorskip("mlflow")
    spec = TrackingSpec(mlflow=MlflowSpec(experiment="e"))
    for generation in (1, 2):
        tracking = TrackingProcess(start(tmp_path, spec, generation=generation))
        for step in range(1, 5):
            tracking.send(report(step, loss=2.0 if step < 3 else math.nan), generation)
        tracking.close()
        assert tracking.failures() == 0
    (written,) = (tmp_path / "mlflow").glob("*/*/metrics/learningRate")
    assert [int(line.split()[2]) for line in written.read_text().splitlines()] == [1, 2, 3, 4]


def test_the_runs_of_two_services_are_both_found_again(tmp_path: Path):
    """Each stored what it had read at its start: W&B's next step removed the run of MLflow, which got another one."""
    wandb, mlflow = RunState(str(tmp_path)), RunState(str(tmp_path))
    wandb_id = wandb.run_id()
    mlflow.put("mlflowRun", "theirs")
    wandb.put("wandbStep", 3)
    again = RunState(str(tmp_path))
    assert (again.run_id(), again.get("mlflowRun"), again.get("wandbStep")) == (wandb_id, "theirs", 3)


def test_starts_restarts_and_rescales_are_events(tmp_path: Path):
    spec = TrackingSpec()
    track(start(tmp_path, spec), range(1, 4))
    track(start(tmp_path, spec, step=2, generation=2), range(3, 6))
    track(start(tmp_path, spec, step=5, generation=3, replicas=1), range(6, 8))
    events = [record for record in records(tmp_path) if "event" in record]
    assert [(one["event"], one["step"], one["generation"], one["replicas"]) for one in events] == [
        ("Start", 0, 1, 2),
        ("Restart", 2, 2, 2),
        ("Rescale", 5, 3, 1),
    ]
    assert sorted(json_lines(tmp_path)) == list(range(1, 8))


def test_a_restart_from_the_beginning_starts_the_file_again(tmp_path: Path):
    track(start(tmp_path, TrackingSpec()), range(1, 6))
    track(start(tmp_path, TrackingSpec(), generation=2), range(1, 3))
    assert sorted(json_lines(tmp_path)) == [1, 2]


@pytest.mark.parametrize("end", ['{"step": 3, "lo', '{"step": 4}', "garbage\n", '{"no": 1}\n'])
def test_a_line_that_was_not_completed_is_cut(tmp_path: Path, end: str):
    path = tmp_path / LINES
    whole = '{"step": 1}\n{"step": 2}\n'
    path.write_text(whole + end)
    cut_after(path, 100)
    assert path.read_text() == whole


@pytest.mark.parametrize(
    "line", ["\0" * 40, "garbage", '{"no": 1}', "[" * 100_000], ids=["zeros", "text", "other", "nested"]
)
def test_a_line_in_the_middle_that_is_no_record_costs_no_other_line(tmp_path: Path, line: str):
    """A restart cut the file there: everything behind was lost, and the change of replicas was a restart."""
    track(start(tmp_path, TrackingSpec()), range(1, 4))
    path = tmp_path / LINES
    path.write_text(path.read_text() + line + "\n")
    with path.open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(4, 8))
    before = path.read_text()
    track(start(tmp_path, TrackingSpec(), step=6, generation=2, replicas=1), range(7, 9))
    after = path.read_text()
    assert after.startswith(before.partition('{"step": 7')[0])
    records = [json.loads(one) for one in after.splitlines() if one != line]
    assert [one["step"] for one in records] == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8]
    assert records[7]["event"] == "Rescale"


def test_numbers_that_are_not_finite_are_left_out():
    record = step_record(report(3, loss=math.nan, gradient_norm=math.inf), 1)
    assert "loss" not in record
    assert "gradientNorm" not in record
    assert record["tokensPerSecond"] == 1280.0
    json.dumps(record, allow_nan=False)


def test_the_report_of_a_step_that_a_loss_interrupted_has_no_time():
    record = step_record(report(3, seconds=0.0, data_seconds=0.0), 1)
    assert {"tokensPerSecond", "stepSeconds", "dataSeconds", "mfu"}.isdisjoint(record)
    assert record["loss"] == report(3).loss


def test_a_tracker_that_fails_is_counted_warned_about_once_and_the_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    spec = TrackingSpec(tensor_board=True)
    (tmp_path / "tensorboard").write_text("a file, where a directory must be")
    pytest.importorskip("tensorboard")
    tracking = TrackingProcess(start(tmp_path, spec))
    for step in range(1, 9):
        tracking.send(report(step), 1)
    tracking.close()
    assert tracking.failures() >= 1
    assert sum("tracking failed" in entry.message for entry in caplog.records) == 1
    assert sorted(json_lines(tmp_path)) == list(range(1, 9))


def test_each_tracker_that_fails_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    for package in ("wandb", "mlflow"):
        (tmp_path / "missing" / package).mkdir(parents=True)
        (tmp_path / "missing" / package / "__init__.py").write_text(f"raise ModuleNotFoundError('no {package}')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "missing"), os.environ.get("PYTHONPATH", "")]))
    spec = TrackingSpec(wandb=WandbSpec(project="p", offline=True), mlflow=MlflowSpec(experiment="e"))
    tracking = TrackingProcess(start(tmp_path / "run", spec))
    for step in range(1, 4):
        tracking.send(report(step), 1)
    tracking.close()
    warned = [entry.getMessage() for entry in caplog.records if "tracking failed" in entry.message]
    assert sorted(text.partition("only counted: ")[2].partition(":")[0] for text in warned) == ["mlflow", "wandb"]


@pytest.mark.parametrize(
    ("package", "says"),
    [
        (
            "raise ConnectionError('http://me:secret@127.0.0.1:9/api: 404')",
            "mlflow (http://127.0.0.1:9): ConnectionError: http://***@127.0.0.1:9/api: 404",
        ),
        ("import time; time.sleep(600)", "does not end within 0 s: does mlflow (http://127.0.0.1:9) answer?"),
    ],
    ids=["fails", "hangs"],
)
def test_a_server_that_is_away_is_named(
    package: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(tracked_events, "CLOSE_SECONDS", 0.1 if "sleep" in package else patient(60))
    spec = TrackingSpec(mlflow=MlflowSpec(experiment="e", uri="http://me:secret@127.0.0.1:9"))
    tracking = TrackingProcess(start(tmp_path / "run", spec))
    process = tracking._process
    assert process is not None
    tracking.close()
    process.kill()
    process.wait()
    assert tracking.failures() >= 1
    warned = [entry.getMessage() for entry in caplog.records if "tracking failed" in entry.message]
    assert [text.partition("only counted: ")[2] for text in warned] == [says]


def test_files_do_not_wait_for_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that ends meanwhile had no step in `steps.jsonl`: W&B waits 90 s for its server."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    tracking = TrackingProcess(start(tmp_path / "run", TrackingSpec(wandb=WandbSpec(project="p"))))
    for step in range(1, 9):
        tracking.send(report(step), 1)
    process = tracking._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    path, deadline = tmp_path / "run" / LINES, time.monotonic() + patient(60)
    while time.monotonic() < deadline and not (path.exists() and len(path.read_text().splitlines()) == 9):
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert sorted(json_lines(tmp_path / "run")) == list(range(1, 9))


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    blocked = tmp_path / "file"
    blocked.write_text("")
    tracking = TrackingProcess(start(blocked / "tracking", TrackingSpec()))
    deadline = time.monotonic() + patient(60)
    failures = 0
    while not failures and time.monotonic() < deadline:
        tracking.send(report(1), 1)
        failures += tracking.failures()
    tracking.close()
    assert failures
    warned = [entry.getMessage() for entry in caplog.records if "tracking failed" in entry.message]
    assert len(warned) <= 2, "one may be that the process does not keep up"
    assert "NotADirectoryError" in warned[-1]


def test_a_process_that_was_killed_is_started_again_and_the_steps_between_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Such as by the kernel, because memory ran out: nothing was tracked until the ranks started again."""
    monkeypatch.setattr(tracked_events, "FIRST_PAUSE", 0.0)
    tracking = TrackingProcess(start(tmp_path, TrackingSpec()))
    first = tracking._process
    assert first is not None
    first.kill()
    first.wait()
    step = 0
    while tracking._process in (None, first):
        step += 1
        tracking.send(report(step), 1)
    tracking.send(report(step + 1), 1)
    tracking.close()
    assert tracking.failures() == step - 1
    found = records(tmp_path)
    assert [one["step"] for one in found] == [step, step + 1]
    assert not any("event" in one for one in found), "the ranks have not started again"


@pytest.mark.parametrize(("name", "read"), [("jsonLines", json_lines), ("tensorBoard", tensor_board)])
def test_a_file_that_failed_is_opened_again(tmp_path: Path, name: str, read: Callable[[Path], Steps]):
    """TensorBoard's writer fails for good once its disk was full."""
    installed(read)
    begin, failed = start(tmp_path, TrackingSpec()), list[str]()
    tracker = Tracker(name, begin, event_of(begin), lambda name, reason: failed.append(reason))
    for step in range(1, 7):
        tracker._next = 0.0
        tracker.step(step_record(report(step), 1))
        if step == 3:
            assert tracker._sink is not None
            tracker._sink.close()
    tracker.close()
    assert len(failed) == 1, "the step after the close"
    assert sorted(read(tmp_path)) == [1, 2, 3, 5, 6]
    if read is json_lines:
        assert sum("event" in one for one in records(tmp_path)) == 1


def test_steps_that_nobody_takes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracked_events, "FIRST_PAUSE", 3600.0)
    tracking = TrackingProcess(start(tmp_path, TrackingSpec()))
    assert tracking._process is not None
    tracking._process.kill()
    tracking._process.wait()
    for step in range(1, 6):
        tracking.send(report(step), 1)
    tracking.close()
    assert tracking.failures() == 5


def test_a_rescale_is_one_without_steps_jsonl_too(tmp_path: Path):
    spec = TrackingSpec(json_lines=False)
    track(start(tmp_path, spec), range(1, 3))
    for replicas, kind in ((2, "Restart"), (1, "Rescale")):
        event = event_of(start(tmp_path, spec, step=2, generation=2, replicas=replicas))
        assert event is not None
        assert event.event == kind


class Recorded:
    """The events of a rank."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def phase(self, name: str, seconds: float) -> None: ...

    def running(self, step: int, source: str = "") -> None: ...

    def at_work(self, work: object = None) -> None: ...

    def checkpoint(self, step: int, path: str, seconds: float) -> None: ...

    def take_checkpoint_request(self) -> bool:
        return False

    def checkpoint_begun(self, step: int) -> None: ...

    def stop_requested(self) -> bool:
        return False

    def step(self, report: StepReport) -> None:
        self.reports.append(report)


def test_failures_are_in_the_reports_of_steps_each_once(tmp_path: Path):
    inner = Recorded()
    tracking = TrackingProcess(start(tmp_path, TrackingSpec()))
    tracking._failed("made up")
    events = TrackedEvents(inner, tracking, 1)
    events.step(report(1))
    events.step(report(2))
    tracking.close()
    assert [one.tracking_failures for one in inner.reports] == [1, 0]


def test_a_tracker_that_does_not_keep_up_blocks_no_step(tmp_path: Path):
    tracking = TrackingProcess(start(tmp_path, TrackingSpec()))
    assert tracking._process is not None
    tracking._process.send_signal(19)  # SIGSTOP: it reads nothing
    for step in range(1, 20_000):
        tracking.send(report(step), 1)
    assert tracking.failures() > 0
    tracking._process.send_signal(18)
    tracking.close()
    written = json_lines(tmp_path)
    assert 0 < len(written) < 20_000
