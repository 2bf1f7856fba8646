"""Feature gates: their flag, their errors and their table in the documentation."""

from __future__ import annotations

import pytest

from meshwright_operator import settings
from meshwright_operator.feature_gates import GATES, PLAN_CALIBRATION, FeatureGates, Gate, Stage
from tests.conflicts import ROOT

PAGE = ROOT / "docs" / "api-policy.md"
ADDRESS = "--coordinator-url=https://c:1"


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
