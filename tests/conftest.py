"""Options of the whole test suite."""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.randomness import ASKED

# A busy machine is slow, which is no finding: properties are checked, not times. Nor is a change to blame for what only
# a lucky draw finds: the same examples always, unless a long run asks for others.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not ASKED, print_blob=True
)
settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cluster",
        choices=["embedded", "assets", "kubeconfig"],
        default="embedded",
        help="tests of clusters on the embedded API server, on the binaries of KUBEBUILDER_ASSETS, or on the cluster of"
        " KUBECONFIG, which should be one to throw away",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cluster", "embedded") == "kubeconfig" and not os.environ.get("KUBECONFIG"):
        raise pytest.UsageError("--cluster kubeconfig: needs KUBECONFIG")
