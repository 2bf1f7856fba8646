"""Options of the whole test suite."""

import os
from pathlib import Path

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


MANY_PROCESSES = ("e2e", "distributed", "parity", "agent", "local")
"""Directories whose tests start pods or ranks: two of them at once would wait for each other's processors."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests share a process when there are several, those of many processes first: they take longest."""
    root = Path(__file__).parent

    def group(item: pytest.Item) -> str:
        first, *_ = item.path.relative_to(root).parts
        return "many-processes" if first in MANY_PROCESSES else str(item.path.relative_to(root))

    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(group(item)))
        if getattr(config.option, "dist", "no") != "no":
            items.sort(key=lambda item: group(item) != "many-processes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cluster", "embedded") == "kubeconfig" and not os.environ.get("KUBECONFIG"):
        raise pytest.UsageError("--cluster kubeconfig: needs KUBECONFIG")
