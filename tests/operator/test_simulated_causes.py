"""The simulation's causes of restarts are the operator's, and mean the same."""

from meshwright.simulation.inputs import DEFAULT_FAULTS
from meshwright.simulation.replay import PLANNED
from meshwright.simulation.run import BACKS_OFF, LIMITED, RESCALED
from meshwright_operator.decide.restart_policy import CAUSES
from meshwright_operator.decide.restart_policy import RESCALED as OPERATORS_RESCALED


def test_causes_count_and_wait_as_the_operators() -> None:
    """Of the causes that are simulated. Causes of other failures have no fault that is simulated."""
    simulated = LIMITED | BACKS_OFF | {kind.cause for kind in DEFAULT_FAULTS.values()}
    assert {name for name in simulated if CAUSES[name].limited} == LIMITED
    assert {name for name in simulated if CAUSES[name].backs_off} == BACKS_OFF
    assert OPERATORS_RESCALED.name == RESCALED


def test_restarts_that_are_no_failures_are_planned() -> None:
    declared = {name for name, cause in CAUSES.items() if cause.restarts and not name.startswith("Toy")}
    assert {name for name in declared if not CAUSES[name].is_failure} == PLANNED


def test_every_simulated_failure_has_a_cause_of_the_operator() -> None:
    for name, kind in DEFAULT_FAULTS.items():
        assert kind.cause in CAUSES, name
        assert kind.planned == (kind.cause in PLANNED), name
