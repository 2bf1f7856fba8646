"""Feature gates: their flag, their errors, the loops that they stop, and their table in the documentation."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from meshwright.api import labels
from meshwright_operator import settings
from meshwright_operator.feature_gates import (
    DYNAMIC_RESOURCES,
    GATES,
    KUEUE_QUEUES,
    PLAN_CALIBRATION,
    FeatureGates,
    Gate,
    Stage,
)
from tests.conflicts import ROOT
from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.proxy import Proxy
from tests.operator.support import JOBS, Api, OperatorThread, condition, job, until, write_kubeconfig

PAGE = ROOT / "docs" / "api-policy.md"
ADDRESS = "--coordinator-url=https://c:1"
LOOPS = {PLAN_CALIBRATION.name: "learning", KUEUE_QUEUES.name: "Kueue", DYNAMIC_RESOURCES.name: "devices"}
"""Gate -> the task that runs while it is on."""


def test_beta_is_on_and_alpha_is_off_unless_the_administrator_says_otherwise() -> None:
    gates = settings.parse([ADDRESS, "--feature-gates=PlanCalibration=false,"], {}).feature_gates
    assert not gates.enabled(PLAN_CALIBRATION)
    assert settings.parse([ADDRESS], {}).feature_gates.enabled(PLAN_CALIBRATION)
    assert not FeatureGates().enabled(Gate("New", Stage.ALPHA, "0.2.0", ""))
    named = {"MESHWRIGHT_OPERATOR_FEATURE_GATES": "PlanCalibration=false"}
    assert not settings.parse([ADDRESS], named).feature_gates.enabled(PLAN_CALIBRATION)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PlanCalibraton=true", "unknown feature gate `PlanCalibraton`: did you mean `PlanCalibration`?"),
        ("planCalibration=true", "did you mean `PlanCalibration`?"),
        ("Zzz=true", "unknown feature gate `Zzz`: use one of PlanCalibration"),
        ("PlanCalibration", "`PlanCalibration` must be true or false"),
        ("PlanCalibration=yes", "such as PlanCalibration=true, got `PlanCalibration=yes`"),
        ("PlanCalibration=true,PlanCalibration=false", "`PlanCalibration` is both true and false"),
    ],
)
def test_wrong_gates_are_refused_by_name(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse([ADDRESS, f"--feature-gates={text}"], {})
    assert message in capsys.readouterr().err


def test_the_documented_table_is_that_of_the_code() -> None:
    rows = [
        f"| `{gate.name}` | {gate.stage} | {'on' if gate.default else 'off'} | {gate.since} | {gate.text} |"
        for gate in GATES.values()
    ]
    text = PAGE.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("| `")] == rows


async def leads(operator: OperatorThread) -> set[str]:
    """The tasks of an operator that leads and watches."""

    async def all_started() -> set[str]:
        found = operator.tasks
        return found if {"workers", "watch of jobs"} <= found else set()

    found: set[str] = await until(all_started, "it leads and watches")
    return found


async def test_every_loop_of_a_gate_runs_by_default(start_operator: StartOperator) -> None:
    assert LOOPS.keys() == GATES.keys()
    assert set(LOOPS.values()) <= await leads(await start_operator())


@pytest.mark.parametrize("gate", sorted(GATES))
async def test_a_gate_that_is_off_stops_its_loop_and_no_other(gate: str, start_operator: StartOperator) -> None:
    running = await leads(await start_operator(feature_gates=FeatureGates(((gate, False),))))
    assert running & set(LOOPS.values()) == set(LOOPS.values()) - {LOOPS[gate]}


@pytest.mark.slow
async def test_with_every_gate_off_jobs_run_and_nothing_is_asked_of_other_projects(
    api: Api,
    kubelet: Kubelet,
    session: aiohttp.ClientSession,
    start_operator: StartOperator,
    settled: Settled,
    operators_token: str,
    tmp_path: Path,
) -> None:
    queued = job("queued")
    queued["metadata"]["labels"] = {labels.KUEUE_QUEUE: "team"}
    async with Proxy(api.url, session).serving() as proxy:
        kubeconfig = write_kubeconfig(tmp_path / "behind", proxy.url, operators_token)
        off = FeatureGates(tuple((gate, False) for gate in sorted(GATES)))
        operator = await start_operator(kubeconfig=kubeconfig, feature_gates=off)
        await api.create(JOBS, job("plain"))
        await api.create(JOBS, queued)
        await settled("plain")

        async def says() -> str | None:
            ready = condition(await api.status("queued"), "Ready")
            return str(ready["message"]) if ready.get("reason") == "QueueUnavailable" else None

        assert "the operator's feature gate KueueQueues is off" in await until(says, "it says what is off", 60)
        assert condition(await api.status("queued"), "Stalled")["status"] == "True"
        await operator.stop()
    asked = {right[0] for request in proxy.requests if (right := request.right) is not None}
    assert not asked & {"kueue.x-k8s.io", "resource.k8s.io"}
