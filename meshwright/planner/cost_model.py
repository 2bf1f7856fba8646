"""Estimates the cost of a job's layouts on its cluster: converts spec and inventory to the cost model's terms.

If the catalog does not have a cluster's GPUs, there is no cost model, and plans are made from memory only.

A running job's estimate differs from its measured steps if the constants are wrong for this cluster: slower links,
other kernels, a throttled GPU. `recalibrate` fits the constants to the measurements, with the shipped constants as
prior. One unusual job therefore changes them little, and several jobs that agree change them fully.

Measurements come from tenants, who may lie. Each namespace has one vote, however many jobs it has, and the median of
the votes counts. One namespace moves a constant by at most `REACH_OF_ONE`, several that agree by at most `REACH`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.models.architecture import Architecture
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.accelerators import Accelerator, accelerator
from meshwright.planner.cost.comm_groups import GroupSpans
from meshwright.planner.cost.constants import Constants, agreed, calibrate
from meshwright.planner.cost.estimate import Estimate, estimate, machine_for
from meshwright.planner.cost.fabric import Fabric, FabricLevel
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.topology.levels import DOMAIN, RACK
from meshwright.planner.topology.links import SHARE_OF_NIC
from meshwright.planner.topology.site import SiteFabric, SiteLevel
from meshwright.planner.units import GB
from meshwright.planner.workload import TrainingJob


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants fitted to running jobs, by accelerator. They replace the shipped ones."""

    constants: Mapping[str, Constants] = field(default_factory=dict)

    def on(self, machine: Machine) -> Machine:
        """Return the machine with the fitted constants of its GPU, if there are any."""
        calibrated = self.constants.get(machine.gpu.name)
        return replace(machine, constants=calibrated) if calibrated else machine

    def with_constants(self, gpu: str, constants: Constants) -> Calibration:
        """Return a copy with other constants for one GPU."""
        return Calibration({**self.constants, gpu: constants})


@dataclass(frozen=True, slots=True)
class CostModel:
    """Estimates for the layouts of one job."""

    job: TrainingJob
    machine: Machine
    machines: Mapping[str, Machine] = field(default_factory=dict, compare=False)
    """GPU product -> machine of its nodes alone. Empty if all nodes have the same."""

    def on_nodes(self, inventory: Inventory, nodes: Iterable[str]) -> CostModel:
        """Return the cost model on the GPUs of these nodes, if all have the same product."""
        if not self.machines:
            return self
        products = {inventory.nodes[name].gpu_product for name in nodes if name in inventory.nodes}
        machine = self.machines.get(products.pop()) if len(products) == 1 else None
        return self if machine is None else CostModel(self.job, machine)

    @property
    def work(self) -> Workload:
        """The workload of one step."""
        return self.job.work

    def estimate(self, strategy: Strategy, groups: GroupSpans | None = None) -> Estimate:
        """Estimate memory and time of one step. Without `groups` of a placement, ranks fill domains in order.

        Raises:
            ValueError: there are more stages than layers.
        """
        return estimate(self.work, strategy, self.machine, groups)


def cost_model_for(
    spec: ParallelTrainingJobSpec,
    architecture: Architecture | None,
    inventory: Inventory,
    calibration: Calibration | None = None,
) -> CostModel | None:
    """Return the cost model of a job. None for a user's command, and if no usable node's GPU is in the catalog."""
    if architecture is None or spec.training is None:
        return None
    gpus, fitted = spec.workers.gpus_per_worker, calibration or Calibration()
    machine = machine_of_cluster(inventory, gpus)
    found = cost_model_on(spec, architecture, fitted.on(machine) if machine else None)
    if found is None:
        return None
    alone = {name: machine_of_cluster(inventory.only(name), gpus) for name in gpu_products(inventory, gpus)}
    runtime = found.job.runtime
    return replace(found, machines={name: fitted.on(one).running(runtime) for name, one in alone.items() if one})


def cost_model_on(
    spec: ParallelTrainingJobSpec, architecture: Architecture | None, machine: Machine | None
) -> CostModel | None:
    """Return the cost model of a job on a machine. None for a user's command, and if there is no machine."""
    if architecture is None or spec.training is None or machine is None:
        return None
    job = TrainingJob.of(spec, architecture)
    return CostModel(job, machine.running(job.runtime))


def gpu_products(inventory: Inventory, gpus_per_worker: int) -> list[str]:
    """Return the GPU products of a cluster with several, sorted. Empty if all nodes have the same."""
    products = {node.gpu_product for node in inventory.with_workers(gpus_per_worker)}
    return sorted(products) if len(products) > 1 else []


def machine_of_cluster(inventory: Inventory, gpus_per_worker: int) -> Machine | None:
    """Return the machine that represents a cluster's usable nodes. None if none of their GPUs is in the catalog.

    The most common GPU represents them. A job may run on any of them and waits for its slowest rank, so a mixed cluster
    has the speed of its slowest GPU.
    """
    gpus_by_name: Counter[str] = Counter()
    for node in inventory.with_workers(gpus_per_worker):
        matched = accelerator(node.gpu_product) if node.gpu_product else None
        if matched is not None:
            gpus_by_name[matched.name] += node.capacity.gpus
    if not gpus_by_name:
        return None
    gpus = [_catalogued(name) for name in gpus_by_name]
    chosen = _catalogued(gpus_by_name.most_common(1)[0][0])
    cluster_limits = ClusterLimits.of(inventory, gpus_per_worker)
    usable = replace(
        chosen,
        memory=float(min(cluster_limits.gpus_by_memory, default=int(min(gpu.memory for gpu in gpus)))),
        node=cluster_limits.node_gpus or chosen.node,
    )
    usable = gpu_on_site(usable, inventory.site)
    slowest = min(1.0, min(gpu.half for gpu in gpus) / chosen.half)
    domain = (cluster_limits.domain_gpus or chosen.domain) if chosen.domain > 1 else 1
    fabric = fabric_on_site(usable, inventory.site, domain)
    if cluster_limits.pods_apart:
        fabric = _ending_at_pods(fabric, cluster_limits.linked_gpus or gpus_per_worker)
    fabric = _with_racks(fabric, inventory, usable.nic)
    return machine_for(usable, fabric=fabric, slowest=slowest)


def gpu_on_site(gpu: Accelerator, site: SiteFabric) -> Accelerator:
    """Return the GPU with the bandwidths that are stated for a domain and a rack of the site."""
    inside, between = site.inside(DOMAIN), site.inside(RACK)
    stated: dict[str, Any] = {
        "link": _bytes_per_second(inside),
        "nic": _bytes_per_second(between),
        "in_network": inside.in_network_reduction,
    }
    return replace(gpu, **{name: value for name, value in stated.items() if value is not None})


def fabric_on_site(gpu: Accelerator, site: SiteFabric, domain: int | None = None) -> Fabric:
    """Return the fabric of a GPU of `gpu_on_site`: its domains, and one network between them.

    Args:
        gpu: the GPU.
        site: what is stated about the fabric.
        domain: number of GPUs of one domain, if known.
    """
    *inner, network = Fabric.of(gpu, domain=domain).levels
    levels = [_as_stated(level, site.inside(DOMAIN)) for level in inner]
    return Fabric((*levels, _as_stated(network, site.outside_domains())))


def _ending_at_pods(fabric: Fabric, gpus: int) -> Fabric:
    """The fabric if NVLink and PCIe join only the `gpus` GPUs of one pod: pods of one host use the network."""
    inner, *others = fabric.levels
    return Fabric((replace(inner, gpus=min(inner.gpus, gpus)), *others)) if others else fabric


def _as_stated(level: FabricLevel, stated: SiteLevel) -> FabricLevel:
    latency, rate = stated.latency_microseconds, _bytes_per_second(stated)
    in_network = level.in_network if stated.in_network_reduction is None else stated.in_network_reduction
    return FabricLevel(
        level.name,
        level.gpus,
        level.bandwidth if rate is None else rate,
        level.latency if latency is None else latency * 1e-6,
        in_network,
    )


def _bytes_per_second(stated: SiteLevel) -> float | None:
    return None if stated.gigabytes_per_second is None else stated.gigabytes_per_second * GB


def _with_racks(fabric: Fabric, inventory: Inventory, nic: float) -> Fabric:
    """Return the fabric with a level for racks, if labels name racks with several NVLink domains."""
    racks: Counter[str] = Counter()
    domains: set[tuple[str, str]] = set()
    for node in inventory.usable:
        racks[node.place.rack] += node.capacity.gpus
        domains.add((node.place.rack, node.place.domain))
    if len(racks) == len(domains) or len(fabric.levels) < 2:
        return fabric
    inner, network, site = fabric.levels[0], fabric.levels[-1], inventory.site
    width = max(inner.gpus, min(racks.values()))
    within = _as_stated(FabricLevel("rack", width, nic, network.latency), site.inside(RACK))
    across = FabricLevel(network.name, network.gpus, within.bandwidth * SHARE_OF_NIC[RACK], within.latency)
    across = _as_stated(across, site.between(RACK, inventory.levels))
    return Fabric((inner, within, replace(across, bandwidth=min(across.bandwidth, within.bandwidth))))


def _catalogued(name: str) -> Accelerator:
    matched = accelerator(name)
    assert matched is not None
    return matched


REACH_OF_ONE, REACH = 2.0, 4.0
"""Largest factor by which the measurements of one namespace, and of several that agree, move a constant."""
MIN_STEPS = 10
"""Number of steps before a job's step time counts, because the first steps are slower."""


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """A running job's step time, and its strategy."""

    cost_model: CostModel
    strategy: Strategy
    step_seconds: float
    steps: int
    """Number of steps in the mean, which is the weight of the measurement."""
    groups: GroupSpans | None = None
    """Its groups as placed, so that a scattered placement is not attributed to a slow network."""
    namespace: str = ""
    """Whose job it is: all measurements of a namespace have one vote."""

    @property
    def is_warm(self) -> bool:
        """Whether enough steps were measured."""
        return self.steps >= MIN_STEPS and self.step_seconds > 0


def recalibrate(shipped: Calibration, measurements: Iterable[StepMeasurement]) -> Calibration:
    """Fit a calibration to the step times of jobs, starting from the shipped one.

    GPUs without measurements keep their constants. The result depends only on the measurements, not on their order or
    on earlier results, so that a restarted operator computes the same constants.
    """
    by_gpu: dict[str, list[StepMeasurement]] = {}
    for measurement in measurements:
        if measurement.is_warm:
            by_gpu.setdefault(measurement.cost_model.machine.gpu.name, []).append(measurement)
    calibration = shipped
    for gpu, measurements_of_gpu in sorted(by_gpu.items()):
        start = shipped.on(measurements_of_gpu[0].cost_model.machine).constants
        calibration = calibration.with_constants(gpu, _fitted(measurements_of_gpu, start))
    return calibration


def _fitted(measurements_of_gpu: Sequence[StepMeasurement], start: Constants) -> Constants:
    by_namespace: dict[str, list[StepMeasurement]] = {}
    for measurement in measurements_of_gpu:
        by_namespace.setdefault(measurement.namespace, []).append(measurement)
    reach = REACH if len(by_namespace) > 1 else REACH_OF_ONE
    return agreed([_vote(by_namespace[name], start, reach) for name in sorted(by_namespace)], start)


def _vote(measurements_of_namespace: Sequence[StepMeasurement], start: Constants, reach: float) -> Constants:
    """The constants that fit the jobs of one namespace."""
    ordered = sorted(measurements_of_namespace, key=lambda measurement: (measurement.step_seconds, measurement.steps))
    return calibrate(
        [_estimator(measurement) for measurement in ordered],
        [measurement.step_seconds for measurement in ordered],
        prior=start,
        weights=[min(1.0, measurement.steps / 100) for measurement in ordered],
        reach=reach,
    )


def _estimator(measurement: StepMeasurement) -> Callable[[Constants], float]:
    def seconds(constants: Constants) -> float:
        machine = replace(measurement.cost_model.machine, constants=constants)
        return (
            replace(measurement.cost_model, machine=machine).estimate(measurement.strategy, measurement.groups).seconds
        )

    return seconds
