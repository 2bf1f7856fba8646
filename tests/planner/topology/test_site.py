"""The fabric of a site: the document, and what planning and placement make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.fabric import INTER_LATENCY, INTRA_LATENCY
from meshwright.planner.cost_model import cost_model_for, machine_of_cluster
from meshwright.planner.hardware import Hardware
from meshwright.planner.nccl import communication_environment
from meshwright.planner.placement.traffic_weights import weights_for
from meshwright.planner.placement.weights import Dimension
from meshwright.planner.plan import make_plan, running_plan
from meshwright.planner.topology.levels import DEFAULT_LEVELS
from meshwright.planner.topology.site import DEFAULT_SITE, FabricError, SiteFabric, parse_fabric

EXAMPLE = (Path(__file__).parents[3] / "examples/fabric/h100-infiniband.yaml").read_text()
LEAF = "example.com/leaf-switch"


def cluster(site: SiteFabric = DEFAULT_SITE, nodes: int = 8, racks: int = 2) -> Inventory:
    """Nodes of 8 H100 in racks, which the site's label names, and not a known one."""
    objects = [
        {
            "metadata": {
                "name": f"n{number}",
                "labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", LEAF: f"leaf{number % racks}"},
            },
            "status": {
                "allocatable": {"nvidia.com/gpu": "8", "cpu": "100", "memory": "1Ti", "pods": "100"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        for number in range(nodes)
    ]
    return Inventory.from_objects(objects, (), site=site)


def spec(**changes: Any) -> ParallelTrainingJobSpec:
    return ParallelTrainingJobSpec.model_validate(
        {
            "replicas": 8,
            "model": {"preset": "llama-3.1-8b"},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 10, "globalBatchSize": 64, "sequenceLength": 4096, "precision": "bf16"},
            "parallelism": {"tensor": 8, "pipeline": 1, "microBatches": 8},
            "workers": {"image": "worker", "gpusPerWorker": 8},
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("levels: {rack: {bandwidth: 3}}", "unknown field `levels.rack.bandwidth`: remove it, or correct its name"),
        ("levels: {row: {}}", "unknown field `levels.row`"),
        ("levels: {rack: {gigabytesPerSecond: 0}}", "`levels.rack.gigabytesPerSecond`: input should be greater than 0"),
        (
            "levels: {rack: {gigabytesPerSecond: 40}, core: {gigabytesPerSecond: 60}}",
            "`core.gigabytesPerSecond` must be at most that of `rack` (40), got 60",
        ),
        ("levels: {domain: {labels: [a/b]}, rack: {labels: [a/b]}}", "`rack.labels`: a/b also names `domain`"),
        ("levels: {cluster: {labels: [a/b]}}", "`cluster.labels`: remove it"),
        ("levels: {rack: {labels: ['no label']}}", "`levels.rack.labels[0]`"),
        ("network: {kind: Infiniband}", "`network.kind`: input should be 'InfiniBand', 'RoCE'"),
        ("network: {adapters: [mlx5_0]}", "`adapters` requires `kind: InfiniBand` or `kind: RoCE`"),
        ("network: {kind: InfiniBand, gidIndex: 3}", "`gidIndex` requires `kind: RoCE`"),
        ("network: {kind: EFA, tcpFallback: false}", "name the plugin of another network"),
        ("network: {environment: {LD_PRELOAD: /x.so}}", "LD_PRELOAD"),
        ("- 1", "must be a mapping with `levels` and `network`"),
        ("a: [", "not valid YAML"),
    ],
)
def test_an_invalid_document_names_the_field_and_the_fix(text: str, problem: str) -> None:
    with pytest.raises(FabricError) as error:
        parse_fabric(text)
    assert problem in str(error.value)


def test_an_empty_document_changes_nothing() -> None:
    empty = parse_fabric("")
    assert empty == DEFAULT_SITE
    assert empty.fabric_levels() is DEFAULT_LEVELS
    assert Hardware.of(cluster(empty), 8).machine == machine_of_cluster(cluster(), 8)
    assert communication_environment(empty, several_workers=True) == {}
    assert make_plan(spec(), cluster(empty)).to_status().environment is None


def test_labels_of_the_site_name_the_levels_and_an_empty_list_names_none() -> None:
    found = cluster(parse_fabric(EXAMPLE))
    assert {node.place.rack for node in found.nodes.values()} == {"leaf0", "leaf1"}
    assert len({node.place.rack for node in cluster().nodes.values()}) == 8
    none = parse_fabric("levels: {domain: {labels: []}, rack: {labels: []}}")
    assert [level.keys for level in none.fabric_levels()[:2]] == [(), ()]
    assert none.fabric_levels()[2:] == DEFAULT_LEVELS[2:]


def test_the_cost_model_uses_the_numbers_of_the_site() -> None:
    default, stated = machine_of_cluster(cluster(), 8), machine_of_cluster(cluster(parse_fabric(EXAMPLE)), 8)
    assert default is not None
    assert stated is not None
    nvlink, network = default.fabric.levels
    assert (nvlink.latency, network.latency, network.in_network) == (INTRA_LATENCY, INTER_LATENCY, False)
    nvlink, rack, across = stated.fabric.levels
    assert (nvlink.bandwidth, nvlink.in_network) == (450e9, True)
    assert (rack.gpus, rack.bandwidth, rack.in_network) == (32, 50e9, True)
    assert rack.latency == across.latency == pytest.approx(10e-6)
    assert (across.bandwidth, across.in_network) == (25e9, False)
    assert stated.gpu.nic == 50e9


def test_without_known_racks_the_closest_stated_level_is_the_network_between_domains() -> None:
    site = parse_fabric("levels: {spine: {gigabytesPerSecond: 12, latencyMicroseconds: 20}}")
    machine = machine_of_cluster(cluster(site), 8)
    assert machine is not None
    network = machine.fabric.levels[-1]
    assert (network.bandwidth, network.latency) == (12e9, pytest.approx(20e-6))


def test_between_two_locations_the_next_level_of_the_tree_counts() -> None:
    site = parse_fabric(
        "levels: {rack: {gigabytesPerSecond: 50}, spine: {gigabytesPerSecond: 30}, zone: {gigabytesPerSecond: 5},"
        " cluster: {gigabytesPerSecond: 1}}"
    )
    assert site.measured(("domain", "rack", "spine", "zone")) == {
        "domain": 50e9,
        "rack": 30e9,
        "spine": 5e9,
        "zone": 1e9,
    }
    assert site.measured(("domain", "rack")) == {"domain": 50e9, "rack": 30e9}
    zone = parse_fabric("levels: {zone: {gigabytesPerSecond: 5}}")
    assert zone.measured(("domain", "rack")) == {"rack": 5e9}, "a level that is not stated keeps its default"


def test_a_slower_level_makes_its_crossings_cost_more() -> None:
    costs = []
    for rate in (25, 5):
        site = parse_fabric(
            EXAMPLE.replace("spine: {gigabytesPerSecond: 25}", f"spine: {{gigabytesPerSecond: {rate}}}")
        )
        found = cluster(site)
        plan = make_plan(spec(), found)
        model = cost_model_for(spec(), plan.architecture, found)
        assert model is not None
        weights = weights_for(model, plan.strategy, 8, found.levels, found.site)
        costs.append(weights.of(Dimension.DATA, "rack"))
    assert costs[1] > 3 * costs[0] > 0


def test_sharp_and_slow_links_change_the_estimate_of_a_plan() -> None:
    def seconds(text: str) -> float:
        plan = make_plan(spec(), cluster(parse_fabric(text)))
        assert plan.estimate is not None
        return plan.estimate.seconds

    usual = seconds("")
    assert seconds("levels: {rack: {gigabytesPerSecond: 2}}") > 1.1 * usual
    assert seconds("levels: {domain: {gigabytesPerSecond: 100}, rack: {gigabytesPerSecond: 50}}") > usual


def test_variables_follow_from_the_fabric() -> None:
    site = parse_fabric(EXAMPLE)
    assert communication_environment(site, several_workers=True) == {
        "NCCL_COLLNET_ENABLE": "1",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_CROSS_NIC": "0",
        "NCCL_NET": "IB",
    }
    assert communication_environment(site, several_workers=False) == {}, "one worker uses no network"
    roce = "network: {kind: RoCE, rails: false, gidIndex: 3, trafficClass: 106, environment: {NCCL_IB_TC: '5'}}"
    assert communication_environment(parse_fabric(roce), several_workers=True) == {
        "NCCL_CROSS_NIC": "1",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_IB_TC": "5",
    }
    no_switch = parse_fabric("levels: {domain: {inNetworkReduction: false}}")
    assert communication_environment(no_switch, several_workers=False) == {"NCCL_NVLS_ENABLE": "0"}


def test_a_new_plan_has_the_variables_and_a_running_one_keeps_its_own() -> None:
    site = parse_fabric(EXAMPLE)
    plan = make_plan(spec(), cluster(site))
    assert plan.environment["NCCL_CROSS_NIC"] == "0"
    status = plan.to_status()
    other = Hardware.of(cluster(parse_fabric("network: {environment: {NCCL_ALGO: Ring}}")), 8)
    assert running_plan(spec(), other, status).environment == plan.environment
    before = status.model_copy(update={"environment": None})
    assert running_plan(spec(), other, before).environment == {}, "a job that started without them has none"


def test_a_command_gets_the_variables_too() -> None:
    command = spec(
        model=None, data=None, training=None, parallelism={}, runtime={"command": ["python", "train.py"]}, replicas=16
    )
    assert make_plan(command, cluster(parse_fabric(EXAMPLE))).environment["NCCL_NET"] == "IB"
