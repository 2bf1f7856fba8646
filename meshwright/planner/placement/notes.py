"""What is worth knowing about a placement beyond its cost, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.placement.objective import CrossingCosts
from meshwright.planner.plan import Plan
from meshwright.planner.topology.levels import DOMAIN
from meshwright.planner.units import GB

_NVLINK = 450


def placement_notes(
    plan: Plan, inventory: Inventory, nodes: Mapping[int, str], crossings: CrossingCosts, tensor_within: str
) -> tuple[str, ...]:
    """Sentences about mixed GPUs, and about tensor-parallel groups without NVLink."""
    used = (inventory.nodes[node].gpu_product for node in nodes.values() if node in inventory.nodes)
    products = Counter(used)
    sentences: list[str] = []
    if len(products) > 1:
        parts = ", ".join(f"{count} workers on {product or 'unknown'}" for product, count in sorted(products.items()))
        sentences.append(f"GPUs of several kinds ({parts}): the slowest sets the pace; no kind alone has room")
    if crossings.straddling_tensor_groups and tensor_within != DOMAIN:
        sentences.append(
            f"{crossings.straddling_tensor_groups} tensor-parallel groups leave their NVLink domain, as allowed up to "
            f"{tensor_within}"
        )
    if plan.layout.tensor > 1:
        sentences += [text for product in sorted(products) if (text := _over_pcie(product))]
    return tuple(sentences)


def _over_pcie(product: str) -> str:
    gpu = accelerator(product)
    if gpu is None or gpu.domain > 1:
        return ""
    return (
        f"tensor-parallel groups run over PCIe inside a host: {gpu.link / GB:.0f} GB/s for a {product}, where NVLink "
        f"of an H100 carries {_NVLINK}; a smaller `parallelism.tensor` pays less for it"
    )
