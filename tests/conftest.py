"""Options of the whole test suite."""

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow, which is no finding: properties are checked, not times.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cluster",
        choices=["embedded", "assets"],
        default="embedded",
        help="end-to-end tests on the embedded API server, or on the real binaries of KUBEBUILDER_ASSETS",
    )
