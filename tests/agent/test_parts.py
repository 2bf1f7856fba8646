"""The agent's small pure parts."""

from __future__ import annotations

import errno
import math
import os
import socket
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.api import labels
from meshwright.data.errors import DataError
from meshwright.protocol.messages import FailureKind, MeshRequest
from meshwright.rules.workers import VARIABLE_NAMES, VARIABLE_PREFIXES
from meshwright_worker.agent.agent import TrainingLog
from meshwright_worker.agent.metrics import WorkerMetrics
from meshwright_worker.agent.ports import FIRST_PORT, LAST_PORT, ReservedPort
from meshwright_worker.agent.rank_environment import (
    rank_environment,
    rank_task,
    resolve_script_paths,
)
from meshwright_worker.agent.rank_process import MAX_LINE, OutputPump
from meshwright_worker.agent.server_process import process_environment
from meshwright_worker.agent.settings import Settings, SettingsError, from_environment
from meshwright_worker.checkpoint_errors import (
    CheckpointMismatchError,
    CheckpointVolumeError,
    FailedSaveError,
    ForeignCheckpointError,
    ResumeSourceError,
    describe_failed_save,
)
from meshwright_worker.rank import failures, messages
from meshwright_worker.rank.failures import InvalidRunError
from meshwright_worker.rank.fork_server import decode_request, encode_request
from meshwright_worker.rank.task import ExpertLoad, Outcome, StepReport
from tests.agent.support import mesh, training_run
from tests.runs import command_run

ENVIRONMENT = {
    labels.ENV_JOB_NAME: "job",
    labels.ENV_JOB_NAMESPACE: "team-a",
    labels.ENV_JOB_UID: "0f3c",
    labels.ENV_WORKER_INDEX: "1",
    labels.ENV_INCARNATION: "2",
    labels.ENV_POD_UID: "9a8b",
    labels.ENV_POD_IP: "10.0.0.7",
    labels.ENV_COORDINATOR_URL: "https://operator:9470/",
    labels.ENV_TOKEN: "secret",
}
REPORT = StepReport(3, 2.5, 1.25, 1e-3, 512, 12, 0.4, 0.01)


def settings() -> Settings:
    return from_environment({**ENVIRONMENT, labels.ENV_CHECKPOINT_DIR: "/c"})


def test_settings_and_their_defaults() -> None:
    got = settings()
    assert (got.worker, got.incarnation, got.coordinator_url) == (1, 2, "https://operator:9470")
    assert (got.metrics_port, got.grace_seconds, got.drain_seconds) == (labels.METRICS_PORT, 30.0, 25.0)
    assert (got.checkpoint_dir, got.data_dir) == ("/c", None)
    assert "secret" not in repr(got)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *((name, "", "is not set") for name in ENVIRONMENT),
        (labels.ENV_WORKER_INDEX, "-1", "integer"),
        (labels.ENV_INCARNATION, "x", "integer"),
        (labels.ENV_POD_IP, "pod", "IP address"),
        (labels.ENV_COORDINATOR_URL, "operator:9470", "http"),
        (labels.ENV_METRICS_PORT, "70000", "65535"),
        (labels.ENV_GRACE_SECONDS, "0", "above 0"),
        (labels.ENV_GRACE_SECONDS, "nan", "above 0"),
        (labels.ENV_GRACE_SECONDS, "soon", "above 0"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str, says: str) -> None:
    with pytest.raises(SettingsError) as error:
        from_environment({**ENVIRONMENT, name: value})
    assert name in str(error.value)
    assert says in str(error.value)


def test_drain_leaves_time_in_any_grace_period() -> None:
    for grace in (1, 2, 6, 30, 600):
        got = from_environment({**ENVIRONMENT, labels.ENV_GRACE_SECONDS: str(grace)})
        assert 0 < got.drain_seconds < grace


def test_the_environment_of_a_rank() -> None:
    hellos = [
        MeshRequest(worker=w, incarnation=w, pod_uid="uid", address=f"10.0.0.{w}", store_port=21000) for w in range(2)
    ]
    run = command_run(["x"], 1).model_copy(update={"tensor": 2, "pipeline": 2})
    document = mesh(3, run, hellos, 2).model_copy(update={"max_restarts": 10})
    got = rank_environment(document, document.members[1], 3, settings())
    assert got == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.0",
        "MASTER_PORT": "21000",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "10",
        "TORCHELASTIC_RUN_ID": "0f3c",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "MESHWRIGHT_GENERATION": "3",
        "MESHWRIGHT_TENSOR_PARALLEL_SIZE": "2",
        "MESHWRIGHT_TENSOR_PARALLEL_RANK": "1",
        "MESHWRIGHT_PIPELINE_PARALLEL_SIZE": "2",
        "MESHWRIGHT_PIPELINE_PARALLEL_RANK": "1",
        "MESHWRIGHT_CONTEXT_PARALLEL_SIZE": "1",
        "MESHWRIGHT_CONTEXT_PARALLEL_RANK": "0",
        "MESHWRIGHT_DATA_PARALLEL_SIZE": "1",
        "MESHWRIGHT_DATA_PARALLEL_RANK": "0",
        "MESHWRIGHT_CHECKPOINT_DIR": "/c",
    }
    with pytest.raises(ValueError, match="mesh has 5"):
        rank_environment(document.model_copy(update={"world_size": 5}), document.members[1], 3, settings())
    reserved = [name for name in got if name in VARIABLE_NAMES or name.startswith(VARIABLE_PREFIXES)]
    assert sorted(got) == sorted(reserved), "a job may not set what the agent sets"


def test_what_processes_inherit(tmp_path: Path) -> None:
    user = {"HOME": str(tmp_path), "USER": "ada"}
    got = process_environment({labels.ENV_TOKEN: "secret", "A": "b", **user})
    assert got == {"A": "b", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **user}
    assert process_environment({"OMP_NUM_THREADS": "4", **user})["OMP_NUM_THREADS"] == "4"


def test_a_fork_request_arrives_complete() -> None:
    hello = MeshRequest(worker=1, incarnation=2, pod_uid="uid", address="10.0.0.7", store_port=21000)
    run = training_run(5, data_parallel=2)
    document = mesh(1, run, [hello], 2)
    task = rank_task(document, run, document.members[0], 1, settings())
    assert decode_request(encode_request(task, {"RANK": "1"})) == (task, {"RANK": "1"})
    assert (task.local_rank, task.checkpoint_dir, task.pod_address) == (1, "/c", "10.0.0.7")


@pytest.mark.parametrize(
    "message",
    [
        messages.PhaseDone("load", 0.5),
        messages.Running(4),
        messages.Running(4, "/c/base-0a1b2c3d/step-00000004"),
        messages.StepDone(REPORT),
        messages.CheckpointSaved(4, "/c/step-4", 0.1),
        messages.RankFailed(FailureKind.PEER_LOST, "line\nline"),
        messages.Finished(Outcome.STOPPED),
    ],
)
def test_messages_survive_the_pipe(message: messages.RankMessage) -> None:
    line = messages.encode(message)
    assert line.count(b"\n") == 1
    assert messages.decode(line) == message


def test_a_loss_that_is_no_number_survives_the_pipe() -> None:
    loads = (ExpertLoad(1, 1.5, 0.0, 1.0, 2.0), ExpertLoad(3, 2.5, 0.25, 1.5, 3.0))
    sent = messages.StepDone(StepReport(1, math.nan, math.inf, 0.0, 1, 1, 0.1, 0.0, experts=loads))
    got = messages.decode(messages.encode(sent))
    assert isinstance(got, messages.StepDone)
    assert math.isnan(got.report.loss)
    assert math.isinf(got.report.gradient_norm)
    assert got.report.experts == loads


@pytest.mark.parametrize("line", [b"", b"{}", b"not json", b'{"kind": "exec"}', b'{"kind": "running", "step": "x"}'])
def test_what_is_not_a_message_is_rejected(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of the two parsers may refuse
        messages.decode(line)


class DistNetworkError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1"), FailureKind.PEER_LOST),
        (RuntimeError("Application timeout caused pair closure: Timed out waiting 8000ms"), FailureKind.PEER_LOST),
        (RuntimeError("Gloo connectFullMesh failed with ..."), FailureKind.PEER_LOST),
        (DistNetworkError("The client socket has timed out after 1000ms"), FailureKind.PEER_LOST),
        (DistNetworkError("failed to recv, got 0 bytes"), FailureKind.PEER_LOST),
        (BrokenPipeError(32, "Broken pipe"), FailureKind.PEER_LOST),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), FailureKind.ERROR),
        (ValueError("connection closed"), FailureKind.ERROR),
        (MemoryError(), FailureKind.ERROR),
        (InvalidRunError("`training.precision: fp16`: the socket timeout of the device"), FailureKind.REJECTED),
        (ForeignCheckpointError("another version"), FailureKind.CHECKPOINT_INCOMPATIBLE),
        (CheckpointMismatchError("another model"), FailureKind.CHECKPOINT_INCOMPATIBLE),
        (ResumeSourceError("no such checkpoint"), FailureKind.INVALID_INPUT),
        (CheckpointVolumeError("Input/output error"), FailureKind.ERROR),
        (KeyboardInterrupt(), FailureKind.ERROR),
    ],
)
def test_whose_fault(error: BaseException, kind: FailureKind) -> None:
    assert failures.classify(error) is kind


@pytest.mark.parametrize(
    ("code", "line", "invalid"),
    [
        (127, "meshwright: train.py does not exist", True),
        (126, "", True),
        (2, "python: can't open file '/meshwright/scripts/trian.py': [Errno 2] No such file or directory", True),
        (1, "ModuleNotFoundError: No module named 'transformer'", True),
        (1, "SyntaxError: invalid syntax", True),
        (1, "meshwright_worker.custom_module.plan.PlanError: `column`: no module is called `q`", True),
        (1, "RuntimeError: CUDA error", False),
        (1, "", False),
        (-9, "ModuleNotFoundError: it was killed afterwards", False),
    ],
)
def test_a_command_that_can_never_run_is_told_from_one_that_failed(code: int, line: str, invalid: bool) -> None:
    assert failures.is_invalid_command(code, ["Traceback", line]) is invalid


def full_disk() -> BaseException:
    """What torch raises on every rank if one of them cannot write."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/checkpoints/step-4.tmp/rank-00001.safetensors")
    stack = traceback.StackSummary.from_list([(f"/python/{n}.py", n, "write", "x" * 80) for n in range(40)])
    return CheckpointException("write", {1: (error, stack)})


def test_a_full_volume_is_named_before_anything_is_cut() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/checkpoints/step-4.tmp/rank-00001.safetensors")
    said = describe_failed_save(FailedSaveError({1: full}))
    assert said.startswith("rank 1: OSError: [Errno 28] No space left on device: '/checkpoints/step-4.tmp")
    assert "`checkpoint.claimName` is full: enlarge the claim, or retain fewer (`checkpoint.keep`)" in said
    assert describe_failed_save(ValueError("x")) == "ValueError: x"


def test_the_last_line_of_a_traceback_comes_first() -> None:
    assert failures.describe(full_disk()).startswith("OSError: [Errno 28] No space left on device")
    assert failures.describe(ValueError("x")) == "ValueError: x"
    own = InvalidRunError("`training.precision: fp8` needs another GPU")
    assert failures.describe(own) == "`training.precision: fp8` needs another GPU"
    own.add_note("in the first pass")
    assert failures.describe(own).endswith("\nin the first pass")
    assert failures.describe(InvalidRunError()).endswith("InvalidRunError")


def test_an_error_about_a_file_whose_name_is_not_utf8_reaches_the_agent() -> None:
    described = failures.describe(DataError(f"{os.fsdecode(b'caf' + bytes([233]))}.jsonl: line 3 is not JSON"))
    failed = messages.RankFailed(FailureKind.INVALID_INPUT, described)
    assert messages.decode(messages.encode(failed)) == failed
    assert described == "caf?.jsonl: line 3 is not JSON"


def test_a_rank_whose_mapped_file_became_shorter_says_so(tmp_path: Path) -> None:
    (tmp_path / "00000.tokens").write_bytes(bytes(1 << 16))
    read = "import mmap, os, sys; file = open(sys.argv[1], 'r+b'); read = mmap.mmap(file.fileno(), 0)"
    ended = subprocess.run(
        [sys.executable, "-c", f"{read}; file.truncate(0); read[0]", tmp_path / "00000.tokens"], check=False
    )
    assert failures.describe_exit(1, ended.returncode, []).startswith(
        "rank 1 was killed by SIGBUS (a mapped file became shorter or cannot be read any more"
    )


def test_a_rank_that_the_kernel_killed_for_its_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "(out of memory, or killed from outside)" in failures.describe_exit(1, -9, [])
    (tmp_path / "memory.events").write_text("low 0\nmax 12\noom 1\noom_kill 3\n")
    (tmp_path / "memory.max").write_text(f"{8 * 2**30}\n")
    monkeypatch.setattr(failures, "_CGROUP", tmp_path)
    monkeypatch.setattr(failures, "_OOM_KILLS_BEFORE", 2)
    said = failures.describe_exit(1, -9, [])
    assert said == "rank 1 was killed by SIGKILL: out of memory, limit 8Gi: raise `workers.resources.memory`"


def test_so_it_does_with_cgroup_v1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**30}\n")
    monkeypatch.setattr(failures, "_CGROUP", tmp_path)
    monkeypatch.setattr(failures, "_OOM_KILLS_BEFORE", 2)
    assert "out of memory, limit 1Gi: raise" in failures.describe_exit(1, -9, [])


@pytest.mark.parametrize(
    ("tail", "line"),
    [
        ([], ""),
        (["", "  "], ""),
        (["a", "b", ""], "b"),
        (
            ["Traceback ...", "torch.OutOfMemoryError: CUDA out of memory", "cleaning up"],
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (["[rank0]: ValueError: x", "[rank0]:[W1] something"], "ValueError: x"),
    ],
)
def test_the_telling_line(tail: list[str], line: str) -> None:
    assert failures.error_line(tail) == line


def test_long_messages_are_cut() -> None:
    assert len(failures.describe(ValueError("x" * 9999))) <= failures.MAX_MESSAGE
    assert len(failures.describe_exit(1, 1, ["y" * 9999])) <= failures.MAX_MESSAGE


def test_output_is_complete_lines_with_the_rank() -> None:
    lines: list[str] = []
    pump = OutputPump(3, lines.append)
    for chunk in (b"one\ntw", b"o\r\n\n 10%\r 20%\r", b"\xff end"):
        pump.feed(chunk)
    pump.close()
    assert lines == [
        "[rank 3] one",
        "[rank 3] two",
        "[rank 3]  10%",
        "[rank 3]  20%",
        "[rank 3] \N{REPLACEMENT CHARACTER} end",
    ]
    assert pump.tail[0] == "one"


def test_a_line_without_an_end_is_broken() -> None:
    lines: list[str] = []
    pump = OutputPump(0, lines.append)
    for _ in range(10):
        pump.feed(b"x" * MAX_LINE)
    pump.close()
    assert len(lines) == 10
    assert sum(line.count("x") for line in lines) == 10 * MAX_LINE


def test_a_reserved_port_is_free_once_released() -> None:
    ports = [ReservedPort() for _ in range(8)]
    assert len({port.number for port in ports}) == 8
    for port in ports:
        assert FIRST_PORT <= port.number <= LAST_PORT
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.5", port.number))
        port.release()
        with socket.socket() as other:
            other.bind(("", port.number))
            other.listen()


def test_the_training_log_is_thin_but_ends_with_the_last_step() -> None:
    training_log = TrainingLog(100)
    steps = [StepReport(n, 2.0, 1.0, 1e-3, 100, n, 0.1, 0.0) for n in range(1, 101)]
    lines = [line for n, report in enumerate(steps) if (line := training_log.line(report, 1000.0, n * 0.1))]
    assert 10 <= len(lines) <= 12
    assert lines[0] == "step 1/100 loss=2.0000 lr=0.001 grad_norm=1 tokens/s=1000 step_seconds=0.100"
    assert lines[-1].startswith("step 100/100")


def test_metrics_follow_the_ranks() -> None:
    metrics = WorkerMetrics("team-a", "job")
    metrics.generation(1, [0, 1], restart=False)
    metrics.rank_up(0, up=True)
    metrics.step(0, REPORT)
    metrics.step(1, REPORT)
    metrics.step(1, replace(REPORT, seconds=0.0, data_seconds=0.0))  # the end of a step that a loss interrupted
    assert "ptj_pipeline_bubble_ratio{" not in metrics.exposition().decode()
    metrics.step(0, replace(REPORT, experts=(ExpertLoad(5, 1.25, 0.125, 1.0625, 4.0),), pipeline_bubble=0.25))
    metrics.checkpoint_saved(0.2)
    metrics.phase(0, "load", 0.3)
    text = metrics.exposition().decode()
    base = 'job_name="job",namespace="team-a"'
    mixture = 'job_name="job",layer="5",namespace="team-a"'
    for line in (
        f'ptj_rank_up{{{base},rank="0"}} 1.0',
        f'ptj_rank_up{{{base},rank="1"}} 0.0',
        f'ptj_step{{{base},rank="1"}} 3.0',
        f"ptj_tokens_total{{{base}}} 1024.0",
        f"ptj_expert_load_imbalance{{{mixture}}} 1.25",
        f"ptj_expert_dropped_ratio{{{mixture}}} 0.125",
        f"ptj_auxiliary_loss{{{mixture}}} 1.0625",
        f"ptj_router_z_loss{{{mixture}}} 4.0",
        f"ptj_loss{{{base}}} 2.5",
        f"ptj_pipeline_bubble_ratio{{{base}}} 0.25",
        f"ptj_rank_restarts_total{{{base}}} 0.0",
        f'ptj_step_duration_seconds_count{{{base},rank="0"}} 2.0',
        f'ptj_step_duration_seconds_count{{{base},rank="1"}} 1.0',
        f'ptj_checkpoint_duration_seconds_count{{{base},op="save"}} 1.0',
        f'ptj_checkpoint_duration_seconds_count{{{base},op="load"}} 1.0',
    ):
        assert line in text.replace('namespace="team-a",job_name="job"', base), line
    metrics.generation(2, [4, 5], restart=True)
    text = metrics.exposition().decode()
    assert 'rank="0"' not in text
    assert 'layer="5"' not in text
    gone = ("pipeline_bubble_ratio", "loss", "grad_norm", "learning_rate", "mfu", "startup_phase_seconds")
    assert [name for name in gone if f"ptj_{name}{{" in text] == []
    assert 'rank="4"' in text
    assert "ptj_rank_restarts_total" in text
    assert "2.0" in next(line for line in text.splitlines() if line.startswith("ptj_rank_restarts_total{"))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/meshwright/scripts/train.py", "/real/train.py"),
        ("/meshwright/scripts", "/real"),
        ("/meshwright/scripts-of-mine/train.py", "/meshwright/scripts-of-mine/train.py"),
        ("--config=/meshwright/scripts/a", "--config=/meshwright/scripts/a"),
    ],
)
def test_a_commands_scripts_are_found_where_they_are_mounted(word: str, expected: str) -> None:
    assert resolve_script_paths(["python", word], {"MESHWRIGHT_SCRIPTS_DIR": "/real"}) == ["python", expected]
    assert resolve_script_paths(["python", word], {}) == ["python", word]


def test_a_word_that_names_the_directory_of_checkpoints_is_replaced() -> None:
    word, environment = "$MESHWRIGHT_CHECKPOINT_DIR", {"MESHWRIGHT_CHECKPOINT_DIR": "/c"}
    assert resolve_script_paths(["train", "--save", word], environment) == ["train", "--save", "/c"]
    assert resolve_script_paths(["sh", "-c", f"ls {word}"], environment) == ["sh", "-c", f"ls {word}"]
    assert resolve_script_paths(["train", word], {}) == ["train", word]
