"""The commands that know the fabric of the site: plan, validate, explain and doctor."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from meshwright_cli.doctor.capacity import check_fabric
from meshwright_cli.doctor.facts import Facts
from meshwright_cli.fabric import read_fabric
from meshwright_cli.main import main
from tests.cli.test_plan import job

FABRIC = Path(__file__).parents[2] / "examples/fabric/h100-infiniband.yaml"
LEAF = "example.com/leaf-switch"


def command(*words: object) -> Any:
    return CliRunner().invoke(main, [*map(str, words)])


def test_plan_takes_the_document(tmp_path: Path) -> None:
    wanted = job(data={"source": "PythonStdlib"}, parallelism={"tensor": 8, "pipeline": 1, "microBatches": 8})
    wanted["spec"]["replicas"] = 4
    manifest, nodes = tmp_path / "job.yaml", tmp_path / "nodes.yaml"
    manifest.write_text(yaml.safe_dump(wanted))
    node = {"gpus": 8, "product": "NVIDIA-H100-80GB-HBM3"}
    nodes.write_text(yaml.safe_dump([{"name": f"n{n}", "labels": {LEAF: f"l{n % 2}"}, **node} for n in range(8)]))
    with_fabric = command("plan", "-f", manifest, "--inventory", nodes, "--fabric", FABRIC, "-o", "json")
    without = command("plan", "-f", manifest, "--inventory", nodes, "-o", "json")
    assert with_fabric.exit_code == without.exit_code == 0, with_fabric.output
    racks = [{w["rack"] for w in json.loads(one.stdout)["placement"]["workers"]} for one in (with_fabric, without)]
    assert len(racks[0]) == 1, "the site's label names the racks, and four workers fit in one"
    assert len(racks[1]) == 4, "without it each node counts as a rack"
    assert json.loads(with_fabric.stdout)["plan"]["environment"]["NCCL_COLLNET_ENABLE"] == "1"
    assert not json.loads(without.stdout)["plan"].get("environment")
    text = command("plan", "-f", manifest, "--inventory", nodes, "--fabric", FABRIC)
    assert "  NCCL_CROSS_NIC=0\n" in text.stdout


def test_a_wrong_document_is_named_with_its_field(tmp_path: Path) -> None:
    wrong = tmp_path / "fabric.yaml"
    wrong.write_text("levels: {rack: {speed: 3}}")
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job(data={"source": "PythonStdlib"})))
    found = command("plan", "-f", manifest, "--fabric", wrong)
    assert found.exit_code == 1
    assert f"{wrong}: unknown field `levels.rack.speed`" in found.output
    checked = command("validate", "--fabric", wrong)
    assert (checked.exit_code, "unknown field `levels.rack.speed`" in checked.output) == (1, True)
    assert "No such file" in command("validate", "--fabric", tmp_path / "none.yaml").output
    assert command("validate", "--fabric", FABRIC).output == f"{FABRIC}: fabric of the site: valid\n"
    assert command("validate").exit_code == 2


def test_the_fabric_may_be_in_values_of_the_chart(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"operator": {}, "fabric": yaml.safe_load(FABRIC.read_text())}))
    assert read_fabric(values) == read_fabric(FABRIC)
    assert command("validate", "--fabric", values).exit_code == 0
    values.write_text("fabric: {levels: {rack: {gigabytesPerSecond: fast}}}")
    assert "`levels.rack.gigabytesPerSecond`" in command("validate", "--fabric", values).output


def test_explain_allreduce_takes_the_document(tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    slow.write_text("levels: {rack: {gigabytesPerSecond: 5}}")
    usual = command("explain", "allreduce", "--ranks", 64)
    slower = command("explain", "allreduce", "--ranks", 64, "--fabric", slow)
    assert usual.exit_code == slower.exit_code == 0, slower.output
    assert usual.output.splitlines()[-1] != slower.output.splitlines()[-1]


def test_doctor_checks_the_document_and_reads_levels_by_it() -> None:
    def facts(text: str) -> Facts:
        node = {
            "metadata": {"name": "n0", "labels": {LEAF: "l0", "nvidia.com/gpu.clique": "d"}},
            "status": {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]},
        }
        document = {"metadata": {"namespace": "ops", "name": "mw-fabric"}, "data": {"fabric.yaml": text}}
        return Facts("default", datetime.now(UTC), nodes=[node], fabrics=[document])

    assert [one.level.value for one in check_fabric(facts(FABRIC.read_text()))] == ["ok"]
    assert "no rack label" in next(iter(check_fabric(facts("{}")))).message
    first = next(iter(check_fabric(facts("levels: 3"))))
    assert (first.check, first.level.value) == ("Fabric of the site", "error")
    assert "ops/mw-fabric is invalid: `levels`" in first.message
    assert "Correct `fabric` in the chart's values" in first.fix
