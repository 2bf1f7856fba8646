"""`meshwright cost` and the forecast of `meshwright plan`: GPU-hours and money, from ledgers and from estimates."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from meshwright.models.counts import training_flops
from meshwright.models.presets import PRESETS
from meshwright_cli.demo.setup import install_crd
from meshwright_cli.main import main
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.kubeconfig import write_kubeconfig
from meshwright_local.kube.resources import JOBS
from tests.cli.test_plan import job
from tests.local.test_client import server

HOUR = 3_600_000


def finished(name: str, namespace: str, **hours: float) -> dict[str, Any]:
    """A finished job with these GPU-hours by cause."""
    booked = [
        {"cause": cause, "milliseconds": HOUR, "gpuMilliseconds": round(gpu_hours * HOUR)}
        for cause, gpu_hours in hours.items()
    ]
    ledger = {"cause": "", "since": "2026-01-02T00:00:00Z", "gpus": 0, "gpusSince": "2026-01-02T00:00:00Z"}
    return {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelTrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "status": {"goodput": {**ledger, "booked": booked}, "startTime": "2026-01-01T00:00:00Z"},
    }


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["cost", *map(str, words)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    jobs = [
        finished("big", "team-b", Training=96, Restarting=4),
        finished("small", "team-a", Training=10),
        finished("tried", "team-a", Starting=2.5, Training=7.5),
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"kind": "List", "items": jobs}))
    return path


def test_the_table_has_every_cause_and_the_sums(file: Path) -> None:
    result = run("-f", file, "--price", 2)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "NAMESPACE  JOB    CAUSE       GPU-HOURS    COST",
        "team-a     small  Training        10.00   20.00",
        "team-a     tried  Starting         2.50    5.00",
        "team-a     tried  Training         7.50   15.00",
        "team-a     tried  all             10.00   20.00",
        "team-a     all    all             20.00   40.00",
        "team-b     big    Training        96.00  192.00",
        "team-b     big    Restarting       4.00    8.00",
        "team-b     big    all            100.00  200.00",
        "all        all    all            120.00  240.00",
    ]


def test_csv_has_one_line_for_each_cause_of_a_job(file: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("-f", file, "-o", "csv", "--price", "1.5").stdout)))
    assert [row["job"] for row in rows] == ["small", "tried", "tried", "big", "big"]
    assert list(rows[3].values()) == ["team-b", "big", "Training", "96.0000", "144.00"]
    assert {row["cost"] for row in csv.DictReader(io.StringIO(run("-f", file, "-o", "csv").stdout))} == {""}
    (only,) = json.loads(run("small", "-f", file, "-o", "json").stdout)
    assert only == {"namespace": "team-a", "job": "small", "cause": "Training", "gpuHours": 10.0}


def test_a_running_job_is_counted_up_to_now(tmp_path: Path) -> None:
    running = finished("live", "team-a", Starting=1)
    running["status"]["goodput"] |= {"cause": "Training", "gpus": 8, "gpuMilliseconds": HOUR}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(running))
    by_cause = {row["cause"]: row["gpuHours"] for row in json.loads(run("-f", path, "-o", "json").stdout)}
    assert by_cause["Starting"] == 1
    assert by_cause["Training"] > 8 * 24, "8 GPUs since January 2026"


def test_jobs_without_gpu_time_are_named(tmp_path: Path) -> None:
    old = finished("old", "team-a")
    del old["status"]["goodput"]
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump(old))
    result = run("-f", path)
    assert result.stdout == "No job has spent GPU time.\n"
    assert "only an operator before 0.2 ran them: team-a/old" in result.stderr


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("[", (), "not valid JSON or YAML"),
        ("kind: Pod", (), "contains no ParallelTrainingJob: pass the output of `kubectl get ptj -o json`"),
        (None, (), "No such file"),
        (json.dumps(finished("a", "b", Training=1)), ("c",), "has no job c"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str | None, words: tuple[str, ...], message: str) -> None:
    path = tmp_path / "jobs"
    if text is not None:
        path.write_text(text)
    result = run("-f", path, *words)
    assert result.exit_code == 1
    assert message in result.output


def plan(tmp_path: Path, *words: object, **spec: Any) -> Result:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job(**spec)))
    return CliRunner().invoke(main, ["plan", "-f", str(path), "--gpus", "16", *map(str, words)])


def test_a_plan_forecasts_flops_time_and_money(tmp_path: Path) -> None:
    data = {"source": "PythonStdlib"}
    result = plan(tmp_path, "--tokens", 10**12, "--price", "2.5", "-o", "json", data=data)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    found, tokens_per_second = document["forecast"], document["estimate"]["tokensPerSecond"]
    assert found["flops"] == pytest.approx(10**12 * training_flops(PRESETS["llama-3-8b"], 8192))
    assert found["days"] == pytest.approx(10**12 / tokens_per_second / 86400)
    assert found["gpuHours"] == pytest.approx(found["days"] * 24 * document["plan"]["worldSize"])
    assert found["cost"] == pytest.approx(2.5 * found["gpuHours"])
    text = plan(tmp_path, "--tokens", 10**12, "--price", "2.5", data=data).stdout
    assert f"The run\n  1,000,000,000,000 tokens, {found['flops']:.3g} FLOPs\n" in text
    assert "GPU-hours, cost " in text


def test_without_tokens_the_forecast_is_that_of_the_jobs_steps(tmp_path: Path) -> None:
    document = json.loads(plan(tmp_path, "--price", 1, "-o", "json", data={"source": "PythonStdlib"}).stdout)
    assert document["forecast"]["tokens"] == 100 * 64 * 8192
    assert "forecast" not in json.loads(plan(tmp_path, "-o", "json", data={"source": "PythonStdlib"}).stdout)


async def test_costs_of_a_cluster(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "config"
    async with server(tmp_path) as connection, ApiClient(connection) as client:
        write_kubeconfig(kubeconfig, connection)
        await install_crd(client)
        for name, hours in (("one", 3.0), ("two", 5.0)):
            created = job(data={"source": "PythonStdlib"}) | {"metadata": {"name": name, "namespace": "default"}}
            await client.create(JOBS, created)
            status = finished(name, "default", Training=hours)["status"]
            await client.patch(JOBS, name, {"status": status}, "default", subresource="status")
        options = ["--kubeconfig", kubeconfig, "-o", "csv"]
        one = await asyncio.to_thread(run, "one", *options)
        every = await asyncio.to_thread(run, "-A", *options)
        missing = await asyncio.to_thread(run, "three", *options)
    assert one.stdout.splitlines()[1:] == ["default,one,Training,3.0000,"]
    assert every.stdout.splitlines()[1:] == ["default,one,Training,3.0000,", "default,two,Training,5.0000,"]
    assert (missing.exit_code, "three" in missing.output) == (3, True)
