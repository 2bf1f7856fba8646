"""The simulation's causes of restarts are the operator's, and mean the same."""

from meshwright.simulation.inputs import DEFAULT_FAULTS
from meshwright.simulation.replay import PLANNED
from meshwright.simulation.run import BACKS_OFF, LIMITED, RESCALED
from meshwright_operator.decide.restart_policy import CAUSES
from meshwright_operator.decide.restart_policy import RESCALED as OPERATORS_RESCALED


def declared() -> dict[str, bool]:
    """The operator's causes of restarts; tests declare others."""
    return {name: cause.is_failure for name, cause in CAUSES.items() if cause.restarts and not name.startswith("Toy")}


def test_causes_count_and_wait_as_the_operators() -> None:
    assert {name for name in declared() if CAUSES[name].limited} == LIMITED
    assert {name for name in declared() if CAUSES[name].backs_off} == BACKS_OFF
    assert {name for name, is_failure in declared().items() if not is_failure} == PLANNED
    assert OPERATORS_RESCALED.name == RESCALED


def test_every_simulated_failure_has_a_cause_of_the_operator() -> None:
    for name, kind in DEFAULT_FAULTS.items():
        assert kind.cause in CAUSES, name
        assert kind.planned == (kind.cause in PLANNED), name
