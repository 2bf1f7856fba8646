"""Options of the whole test suite."""

import gc
import importlib
import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from meshwright.metrics.declaration import Catalog
from meshwright.metrics.exporter import Exporter
from tests.metrics.checks import undeclared_in
from tests.randomness import ASKED

ROOT = Path(__file__).parents[1]

# A busy machine is slow, which is no finding: properties are checked, not times. Nor is a change to blame for what only
# a lucky draw finds: the same examples always, unless a long run asks for others.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not ASKED, print_blob=True
)
settings.load_profile("any-machine")

# Several test processes share the cores. Threads of torch would wait for each other on them, and spin meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cluster",
        choices=["embedded", "assets", "kubeconfig"],
        default="embedded",
        help="tests of clusters on the embedded API server, on the binaries of KUBEBUILDER_ASSETS, or on the cluster of"
        " KUBECONFIG, which should be one to throw away",
    )


TOGETHER = {"distributed": "ranks", "golden/checkpoint": "ranks", "parity": "ranks", "e2e": "clusters"}
"""Directories whose tests start many processes, by what two of them at once would wait for each other's share of."""
APART = ("tests/cuda/test_resume.py",)
"""Files whose tests take so long that each is a piece of work of its own."""
SECOND_CLUSTER = "test_g"
"""The name from which on files of `clusters` run on a second cluster: these tests mostly wait, so two wait at once."""
FIRST = (
    *("ranks", "clusters", "clusters 2", *APART, "tests/test_static.py", "tests/docs/test_pages.py"),
    *("tests/agent/test_agent_commands.py", "tests/worker/parallel/test_pipeline_programs.py"),
    *("tests/worker/parallel/test_compiled.py", "tests/worker/checkpoint/test_killed_saves.py"),
    *("tests/planner/search/test_best_first.py", "tests/planner/test_topology_levels.py"),
    *("tests/schedules/test_schedules.py", "tests/worker/checkpoint/test_inspection.py"),
)
"""What takes longest, so that nothing long is left for the end, when the other processes have nothing to do."""


class Kinds(LoadScopeScheduling):
    """Tests of ranks are one piece of work, those of whole clusters two, and those of any other file one each, but for
    `APART`.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return nodeid if path in APART else kind_of(path)


def kind_of(path: str) -> str:
    """What the tests of a file, relative to the root, run together with."""
    directory, _, file = path.partition("/")[2].rpartition("/")
    kind = TOGETHER.get(directory, path)
    return "clusters 2" if kind == "clusters" and file >= SECOND_CLUSTER else kind


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Kinds:
    return Kinds(config, log)


def import_share(number: int, count: int) -> None:
    """Import every `count`-th test file before the others.

    pytest rewrites the assertions of a file that is imported, and stores the result. Each test process so finds most
    files rewritten by another one, instead of rewriting all of them.
    """
    for file in sorted((ROOT / "tests").rglob("test_*.py"))[number::count]:
        # What cannot be imported, or skips itself, is collected again and reported then.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What imports and collection create lives to the end: no garbage is searched for in it, then or later."""
    gc.disable()
    try:
        worker = getattr(session.config, "workerinput", None)
        if worker is not None and session.config.args == session.config.getini("testpaths"):
            import_share(int(worker["workerid"].removeprefix("gw")), worker["workercount"])
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest begins first when there are several test processes."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (*FIRST, kind := kind_of(item.nodeid.partition("::")[0])).index(kind))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cluster", "embedded") == "kubeconfig" and not os.environ.get("KUBECONFIG"):
        raise pytest.UsageError("--cluster kubeconfig: needs KUBECONFIG")


@pytest.fixture(autouse=True)
def only_declared_label_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that observes a metric with a label value outside its declared set."""
    exporters: list[Exporter] = []
    make = Exporter.__init__

    def remember(self: Exporter, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        exporters.append(self)

    monkeypatch.setattr(Exporter, "__init__", remember)
    yield
    problems = []
    for exporter in exporters:
        collectors = (
            collector for collector in exporter.registry._collector_to_names if isinstance(collector, Catalog)
        )
        declared = [*exporter.metrics, *(metric for collector in collectors for metric in collector.metrics)]
        problems += undeclared_in(exporter.registry.collect(), declared)
    assert problems == []
