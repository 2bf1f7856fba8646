"""`meshwright simulate`: what it reports of a job, in text and JSON, from a ledger too, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from meshwright.simulation.inputs import Inputs
from meshwright_cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
PRODUCTION = EXAMPLES / "production.yaml"
ELASTIC = EXAMPLES / "elastic.yaml"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, words)])


def simulated(*words: object) -> dict[str, Any]:
    result = run(*words, "--runs", 10, "-o", "json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def changed(path: Path, directory: Path, **spec: Any) -> Path:
    documents = list(yaml.safe_load_all(path.read_text()))
    for document in documents:
        if document["kind"] == "ParallelTrainingJob":
            document["spec"] |= spec
            document["spec"] = {name: value for name, value in document["spec"].items() if value is not None}
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    return file


def test_the_text_fits_80_columns_and_names_fields() -> None:
    result = run("-f", PRODUCTION, "--nodes", 5, "--mtbf", "24h", "--runs", 20)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Job          production: 4 nodes, 32 GPUs, 1 spare node"
    for field in ("checkpoint.everySteps", "elastic.minReplicas", "recovery.spareNodes", "elastic.onLoss: Shrink"):
        assert field in result.stdout
    assert "checkpoint.everySteps: " in result.stdout.partition("\nAdvice\n")[2]


def test_json_has_the_same_and_the_inputs() -> None:
    found = simulated("-f", PRODUCTION, "--nodes", 5, "--mtbf", "24h", "--repair", "6h")
    assert found["job"]["mtbfSeconds"] == 86400
    assert (found["job"]["nodes"], found["job"]["spareNodes"], found["job"]["replicas"]) == (4, 1, 4)
    result = found["result"]
    assert result["goodput"] == pytest.approx(found["job"]["workSeconds"] / result["seconds"])
    assert sum(result["secondsByCause"].values()) == pytest.approx(result["seconds"])
    assert found["inputs"]["faults"]["node"]["repair"] == 6 * 3600
    assert [row["name"] for row in found["spareNodes"] if row["isJob"]] == ["1"]
    assert [row["name"] for row in found["minReplicas"] if row["isJob"]] == ["4"]
    Inputs.model_validate(found["inputs"])


def test_the_same_seed_gives_the_same_report() -> None:
    words = ("-f", PRODUCTION, "--mtbf", "12h", "--days", "5")
    first = simulated(*words)
    assert simulated(*words) == first
    assert simulated(*words, "--seed", 1) != first


def test_an_elastic_job_shrinks_as_its_spec_says() -> None:
    found = simulated("-f", ELASTIC, "--mtbf", "6h", "--days", "8", "--repair", "12h")
    assert found["result"]["degradedSeconds"] > 0
    assert found["result"]["secondsByCause"]["Rescaling"] > 0


def test_ranks_that_keep_their_state_lose_what_the_settings_say(tmp_path: Path) -> None:
    words = ("--mtbf", "12h", "--days", "5", "--repair", "1h")
    layout = {"tensor": 2, "microBatches": 2, "zeroStage": 0}
    kept = {}
    for action in ("Wait", "Continue"):
        recovery = {"inMemory": True, "onReplicaLoss": action}
        found = simulated("-f", changed(ELASTIC, tmp_path, recovery=recovery, parallelism=layout), *words)
        kept[action] = found["recovery"]
        assert any("ranks on GPUs restart" in note for note in found["notes"])
    step = found["job"]["stepSeconds"]
    assert [one["inMemory"] for one in kept.values()] == [True, True]
    assert [one["continues"] for one in kept.values()] == [False, True]
    assert all(one["secondsLostByKind"]["process"]["redoneSteps"] <= step for one in kept.values())
    assert kept["Continue"]["secondsLostByKind"]["node"]["redoneSteps"] <= 2 * step
    restarted = simulated("-f", changed(ELASTIC, tmp_path, parallelism=layout), *words)["recovery"]
    assert not restarted["inMemory"]
    for kind in ("process", "hang"):
        assert restarted["secondsLostByKind"][kind]["redoneSteps"] > 20 * step, "half of 200 steps"
    assert kept["Wait"]["secondsLostByKind"]["hang"] == restarted["secondsLostByKind"]["hang"]


def test_the_text_says_how_the_job_recovers_or_why_it_does_not(tmp_path: Path) -> None:
    words = ("--mtbf", "12h", "--days", "2", "--runs", 2)
    recovery = {"inMemory": True, "copyEverySteps": 10}
    sharded = changed(ELASTIC, tmp_path, recovery=recovery, parallelism={"tensor": 2, "zeroStage": 3})
    text = " ".join(run("-f", sharded, *words).stdout.split())
    assert (
        "Lost by one failure, after which ranks that are left keep their state, of which peers have copies every 10"
        " steps" in text
    )
    assert "after which all ranks restart" in " ".join(run("-f", ELASTIC, *words).stdout.split())
    command = changed(EXAMPLES / "torch-ddp.yaml", tmp_path, recovery={"inMemory": True})
    told = run("-f", command, "--interval", "10m", *words)
    assert told.exit_code == 0, told.output
    assert "`recovery.inMemory` has no effect, and all ranks restart: `runtime.command` has its own state" in " ".join(
        told.stdout.split()
    )


def test_a_job_is_simulated_with_the_plan_of_the_operator(tmp_path: Path) -> None:
    """NVLink ends at each of its pods, and each host is a domain of its own."""
    workers = {"image": "worker:1", "gpusPerWorker": 1}
    path = changed(PRODUCTION, tmp_path, replicas=2, workers=workers, model={"preset": "llama-3-8b"}, parallelism={})
    found = simulated("-f", path, "--nodes", 8)
    planned = CliRunner().invoke(main, ["plan", "-f", str(path), "--gpus", "64", "-o", "json"])
    plan = json.loads(planned.stdout)
    assert found["job"]["gpus"] == plan["plan"]["worldSize"]
    assert found["job"]["stepSeconds"] == pytest.approx(plan["estimateUnplaced"]["stepSeconds"])


def test_measured_times_replace_the_defaults(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.yaml"
    inputs.write_text(yaml.safe_dump({"faults": {"stop": {"share": 1, "cause": "PodLost", "detection": 600}}}))
    found = simulated("-f", PRODUCTION, "--mtbf", "24h", "--inputs", inputs, "--step", "2s", "--days", 30)
    assert found["job"]["stepSeconds"] == 2
    assert list(found["result"]["failuresByKind"]) == ["stop"]
    seconds = found["result"]["secondsByCause"]
    assert seconds["Detecting"] == pytest.approx(600 * found["result"]["failuresByKind"]["stop"])


def test_the_printed_inputs_are_the_defaults() -> None:
    result = run("--show-inputs")
    assert result.exit_code == 0
    assert Inputs.model_validate(yaml.safe_load(result.stdout)) == Inputs()


def test_a_job_without_failures_has_only_a_result() -> None:
    result = run("-f", PRODUCTION, "--node-failures", 0)
    assert result.exit_code == 0, result.output
    assert "Failures     none" in result.stdout
    assert "Each rung" not in result.stdout


def test_a_job_that_never_completes_says_so(tmp_path: Path) -> None:
    """It needs half a day without a failure, because it saves nothing before its end."""
    training = {"steps": 2000, "globalBatchSize": 512, "sequenceLength": 8192, "precision": "bf16"}
    checkpoint = {"claimName": "checkpoints", "everySteps": 2000}
    spec = changed(PRODUCTION, tmp_path, training=training, checkpoint=checkpoint)
    result = run("-f", spec, "--mtbf", "1h", "--runs", 2)
    assert result.exit_code == 0, result.output
    assert "Complete     no run within" in result.stdout


def test_a_job_that_trains_for_less_time_than_it_starts_completes() -> None:
    result = run("-f", EXAMPLES / "ten-line.yaml", "--node-failures", 0)
    assert result.exit_code == 0, result.output
    assert "Complete     after 5m expected" in result.stdout


def test_a_command_needs_its_interval(tmp_path: Path) -> None:
    spec = changed(EXAMPLES / "torch-ddp.yaml", tmp_path)
    result = run("-f", spec, "--mtbf", "8h", "--step", "2s", "--interval", "10m", "--days", 3, "--runs", 5)
    assert result.exit_code == 0, result.output
    assert "every 300 steps (10m0s)" in result.stdout or "every 300 steps (10m)" in result.stdout


def test_without_checkpoints_it_advises_them(tmp_path: Path) -> None:
    spec = changed(PRODUCTION, tmp_path, checkpoint=None)
    result = run("-f", spec, "--mtbf", "240h", "--days", 10, "--runs", 5)
    assert result.exit_code == 0, result.output
    assert "Checkpoints  none" in result.stdout
    assert "add `checkpoint`" in result.stdout


def with_ledger(directory: Path, **seconds: float) -> Path:
    (job,) = (one for one in yaml.safe_load_all(PRODUCTION.read_text()) if one["kind"] == "ParallelTrainingJob")
    booked = [{"cause": cause, "milliseconds": round(value * 1000)} for cause, value in seconds.items()]
    job["status"] = {
        "goodput": {"booked": booked, "furthestStep": 20000},
        "restarts": [{"cause": "RankFailure", "count": 12}, {"cause": "NodeDrained", "count": 2}],
        "ofALaterVersion": True,
    }
    path = directory / "finished.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_a_ledger_is_shown_next_to_its_simulation(tmp_path: Path) -> None:
    path = with_ledger(
        tmp_path, Queued=900, Starting=300, Training=400_000, RedoneSteps=60_000, Detecting=120, Restarting=1400
    )
    result = run("-f", path, "--replay", "--runs", 20)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "Ledger       0.866" in result.stdout
    assert "(depends on the cluster)" in result.stdout
    assert "planner's estimate" not in result.stdout, "the times of steps are those of the ledger"
    found = simulated("-f", path, "--replay")
    assert found["job"]["mtbfSeconds"] == pytest.approx(460_000 / 12)
    assert found["job"]["stepSeconds"] == 20
    assert found["ledger"]["goodput"] == pytest.approx(0.866, abs=0.001)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-f", PRODUCTION, "--nodes", 3), "--nodes: the job needs 4 nodes, got 3"),
        (("-f", PRODUCTION, "--mtbf", "8h", "--node-failures", 4), "--mtbf cannot be used with --node-failures"),
        (("-f", PRODUCTION, "--mtbf", "0"), "--mtbf: must be above 0"),
        (("-f", PRODUCTION, "--mtbf", "30s"), "--mtbf: with one failure in 30 s, a run has about"),
        (("-f", PRODUCTION, "--mtbf", "often"), "`often` is not a duration"),
        (("-f", PRODUCTION, "--step", "0"), "--step: must be above 0"),
        (("-f", PRODUCTION, "--interval", "0"), "--interval: must be above 0"),
        (("-f", PRODUCTION, "--interval", "1s"), "--interval: must be at least one step, 25.4 s, got 1 s"),
        (("-f", PRODUCTION, "--mtbf", "1s"), "a run has about 7e+49, and at most 20,000 are simulated"),
        (("-f", PRODUCTION, "--replay", "--mtbf", "8h"), "--mtbf cannot be used with --replay, which takes it from"),
        (("-f", PRODUCTION, "--replay", "--node-failures", 4), "--node-failures cannot be used with --replay"),
        (("-f", PRODUCTION, "--replay"), "`status` is missing: use the output of `kubectl get ptj NAME -o yaml`"),
        (("-f", EXAMPLES / "torch-ddp.yaml", "--mtbf", "8h"), "--interval: required for a job with `runtime.command`"),
        (("-f", "missing.yaml"), "No such file"),
        (("--nodes", 3), "exactly one manifest is needed: `simulate FILE`, or `simulate -f FILE`"),
    ],
)
def test_a_wrong_option_is_explained(words: tuple[object, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code != 0
    assert message in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("saves: {stall: -1}", "saves.stall: "),
        ("fault: {}", "fault: "),
        ("phases: {pod: {median: 0, sigma: 1}}", "phases.pod"),
        ("[", "not valid YAML"),
    ],
)
def test_wrong_inputs_name_the_field(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "inputs.yaml"
    path.write_text(content)
    result = run("-f", PRODUCTION, "--inputs", path)
    assert result.exit_code == 1
    assert f"{path}: " in result.output
    assert message in result.output


def test_a_ledger_without_steps_is_explained(tmp_path: Path) -> None:
    result = run("-f", with_ledger(tmp_path, Queued=900), "--replay")
    assert result.exit_code == 1
    assert "has not finished a step" in result.output
