"""The fabric of the site in the operator: a file that is read again, plans of new jobs, and jobs that keep theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.topology.site import SiteFabric, parse_fabric
from meshwright_operator.administrator_files import fabric_file
from meshwright_operator.documents import DocumentError
from meshwright_operator.kube.cache import Cache
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling import inventories as module
from meshwright_operator.scheduling.inventories import Inventories
from tests.operator.support import node
from tests.operator.test_gang_races import small
from tests.operator.test_inventories import spec_of
from tests.operator.world import JOBS, World

RING = "network: {environment: {NCCL_ALGO: Ring}}"
TREE = "network: {environment: {NCCL_ALGO: Tree}}"


def valid(metrics: OperatorMetrics) -> float | None:
    return metrics.registry.get_sample_value("ptj_policy_valid")


async def test_a_changed_file_is_applied_and_a_broken_one_leaves_the_last(tmp_path: Path) -> None:
    path, applied, metrics = tmp_path / "fabric.yaml", list[SiteFabric](), OperatorMetrics()
    path.write_text(RING)
    file = fabric_file(path, metrics, applied.append)
    file.load()
    assert valid(metrics) == 1
    path.write_text("levels: {rack: {gigabytesPerSecond: fast}}")
    await file.check()
    assert valid(metrics) == 0
    assert applied == [parse_fabric(RING)], "the last valid one stays in effect"
    path.write_text(TREE)
    await file.check()
    assert (valid(metrics), applied[1:]) == (1, [parse_fabric(TREE)])


def test_a_process_does_not_start_with_an_invalid_fabric(tmp_path: Path) -> None:
    path = tmp_path / "fabric.yaml"
    path.write_text("levels: 3")
    with pytest.raises(DocumentError, match=r"fabric\.yaml: `levels`"):
        fabric_file(path, OperatorMetrics(), lambda site: None).load()
    metrics = OperatorMetrics()
    fabric_file(None, metrics, lambda site: None).load()
    assert valid(metrics) == 1


@pytest.mark.parametrize("inline", [0, 1000])
async def test_another_fabric_reads_the_nodes_again(inline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_NODES", inline)
    cache = Cache()
    for number in range(4):
        obj = node(f"n{number}", "known")
        obj["metadata"]["labels"]["example.com/leaf"] = f"own{number % 2}"
        cache.put_node(obj)
    known, spec = Inventories(cache), spec_of({})
    await known.prepare(spec)
    assert {n.place.rack for n in known.empty(spec).nodes.values()} == {"known"}
    known.site = parse_fabric("levels: {rack: {labels: [example.com/leaf]}}\n" + RING)
    await known.prepare(spec)
    assert {n.place.rack for n in known.empty(spec).nodes.values()} == {"own0", "own1"}
    assert known.hardware(spec).site == known.site


async def test_new_jobs_get_the_variables_and_running_ones_keep_their_plan() -> None:
    world = World(31, nodes=6, work=10**6)
    operator = world.operators[0]
    operator.scheduler.set_fabric(parse_fabric(RING))
    world.submit(small("first", 2))
    await world.run(30)
    assert world.true("first", "Ready")
    assert world.status("first")["plan"]["environment"] == {"NCCL_ALGO": "Ring"}
    registry = operator.coordinator.registry(world.cluster.objects[f"{JOBS}/first"]["metadata"]["uid"])
    assert registry.document is not None
    assert registry.document.environment == {"NCCL_ALGO": "Ring"}
    revision, generation = world.status("first")["plan"]["revision"], world.status("first")["mesh"]["generation"]

    operator.scheduler.set_fabric(parse_fabric(TREE))
    world.submit(small("second", 2))
    await world.run(30)
    assert world.status("second")["plan"]["environment"] == {"NCCL_ALGO": "Tree"}
    assert world.status("first")["plan"]["revision"] == revision
    assert world.status("first")["mesh"]["generation"] == generation, "an edit of the fabric restarts nothing"
    world.crash("first-w0-0")
    await world.run(60)
    assert world.status("first")["mesh"]["generation"] == generation + 1
    assert registry.document.environment == {"NCCL_ALGO": "Ring"}, "all ranks of the job keep the same variables"
