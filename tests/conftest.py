"""Options of the whole test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cluster",
        choices=["embedded", "assets"],
        default="embedded",
        help="end-to-end tests on the embedded API server, or on the real binaries of KUBEBUILDER_ASSETS",
    )
