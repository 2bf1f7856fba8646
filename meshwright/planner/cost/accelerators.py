"""Catalog of GPUs: peak rates, memory, and the bandwidths of their usual nodes. All values can be overridden.

Rates are dense (no sparsity). Bandwidths are per GPU and direction. Sources: vendors' data sheets, torchtitan's
`get_peak_flops`, MLPerf system descriptions. The H100 of torchtitan's published runs has a separate entry.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.api.precision import Precision
from meshwright.planner.units import GB, GIB

TERA = 1e12


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU product in its usual node."""

    name: str
    """The product, such as `H100-SXM5-80GB`."""
    half: float
    """Peak of fp16 and bf16 products, FLOP/s."""
    fp8: float
    """Peak of fp8 products. Equal to `half` if the GPU has no fp8."""
    single: float
    """Peak of fp32 products without TF32, as frameworks configure it."""
    memory: float
    """Bytes of device memory that the driver reports."""
    bandwidth: float
    """Bytes/s of device memory."""
    link: float
    """Bytes/s between GPUs of one domain: NVLink, or PCIe if the GPU has no NVLink."""
    nic: float
    """Bytes/s to other domains."""
    node: int = 8
    """GPUs of the usual node."""
    domain: int = 8
    """GPUs that `link` connects."""
    host: float = 25 * GB
    """Bytes/s to host memory."""
    sustained: float = 0.8
    """Fraction of the peak that large products reach under the power cap of a long run.

    That of the H200 is fitted to this runtime's steps (`benchmarks/results`); a single product reached 0.78 there.
    """
    in_network: bool = False
    """Whether the domain's switches sum the data of a reduction (NVLink SHARP)."""

    def __hash__(self) -> int:
        """Hash only the name, which is enough and fast: GPUs are part of many keys."""
        return hash(self.name)

    def peak(self, precision: Precision, *, fp8: bool = False) -> float:
        """Peak FLOP/s in a number format."""
        if precision in (Precision.FP32, Precision.FP64):
            return self.single
        return self.fp8 if fp8 else self.half


def _accelerator(
    name: str,
    half: float,
    fp8: float,
    single: float,
    memory_gib: float,
    bandwidth: float,
    link: float,
    nic: float,
    node: int = 8,
    domain: int = 8,
    host: float = 25.0,
    sustained: float = 0.8,
) -> Accelerator:
    return Accelerator(
        name=name,
        half=half * TERA,
        fp8=(fp8 or half) * TERA,
        single=single * TERA,
        memory=memory_gib * GIB,
        bandwidth=bandwidth * TERA,
        link=link * GB,
        nic=nic * GB,
        node=node,
        domain=domain,
        host=host * GB,
        sustained=sustained,
        in_network=half >= 989 and link >= 400,
    )


_GPUS = (
    _accelerator("V100-SXM2-16GB", 125, 0, 15.7, 16, 0.90, 150, 6.25, host=12),
    _accelerator("V100-SXM2-32GB", 125, 0, 15.7, 32, 0.90, 150, 6.25, host=12),
    _accelerator("T4", 65, 0, 8.1, 15, 0.32, 12, 3, node=4, domain=1, host=12),
    _accelerator("A10G", 70, 0, 35, 22, 0.60, 24, 6.25, node=4, domain=1),
    _accelerator("A10", 125, 0, 31, 22, 0.60, 24, 6.25, node=4, domain=1),
    _accelerator("L4", 121, 242, 30, 22, 0.30, 24, 6.25, domain=1),
    _accelerator("L40", 181, 362, 90, 45, 0.864, 24, 12.5, domain=1),
    _accelerator("L40S", 362, 733, 91, 45, 0.864, 24, 12.5, domain=1),
    _accelerator("A100-SXM4-40GB", 312, 0, 19.5, 39.5, 1.555, 300, 25),
    _accelerator("A100-SXM4-80GB", 312, 0, 19.5, 79.2, 2.039, 300, 25),
    _accelerator("A100-PCIE-40GB", 312, 0, 19.5, 39.5, 1.555, 24, 25, domain=1),
    _accelerator("A100-PCIE-80GB", 312, 0, 19.5, 79.2, 1.935, 24, 25, domain=1),
    _accelerator("A800-SXM4-80GB", 312, 0, 19.5, 79.2, 2.039, 200, 25),
    _accelerator("H100-SXM5-80GB", 989, 1979, 67, 79.6, 3.35, 450, 50, host=55, sustained=0.7),
    _accelerator("H100-SXM5-96GB-HBM2E", 989, 1979, 67, 95.0, 2.4, 450, 50, host=55, sustained=0.55),
    _accelerator("H100-PCIE", 756, 1513, 51, 79.6, 2.0, 50, 25, domain=1, host=55, sustained=0.6),
    _accelerator("H100-NVL", 835, 1671, 60, 93.5, 3.9, 300, 25, domain=2, host=55, sustained=0.65),
    _accelerator("GH200-96GB", 989, 1979, 67, 95.0, 4.0, 150, 25, node=4, domain=4, host=400, sustained=0.68),
    _accelerator("H800-SXM5-80GB", 989, 1979, 67, 79.6, 3.35, 200, 50, host=55, sustained=0.7),
    _accelerator("H20", 148, 296, 44, 95.0, 4.0, 450, 50, host=55),
    _accelerator("H200-SXM5-141GB", 989, 1979, 67, 140.4, 4.8, 450, 50, host=55, sustained=0.75),
    _accelerator("H200-NVL", 835, 1671, 60, 140.4, 4.8, 450, 25, domain=4, host=55, sustained=0.65),
    _accelerator("B200", 2250, 4500, 80, 179, 7.7, 900, 50, host=55, sustained=0.75),
    _accelerator("B300", 2250, 4500, 80, 268, 8.0, 900, 100, host=55, sustained=0.75),
    _accelerator("GB200", 2450, 4900, 80, 185, 8.0, 900, 50, node=4, domain=72, host=200, sustained=0.75),
    _accelerator("GB300", 2500, 5000, 80, 277, 8.0, 900, 100, node=4, domain=72, host=200, sustained=0.75),
)

ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType({gpu.name: gpu for gpu in _GPUS})

# Words of `nvidia.com/gpu.product` or of a report's GPU column -> catalog name. The first entry with all words wins.
_PRODUCT_WORDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("GB300",), "GB300"),
    (("GB200",), "GB200"),
    (("B300",), "B300"),
    (("B200",), "B200"),
    (("GH200",), "GH200-96GB"),
    (("GH", "96"), "GH200-96GB"),
    (("H200", "NVL"), "H200-NVL"),
    (("H200",), "H200-SXM5-141GB"),
    (("H800",), "H800-SXM5-80GB"),
    (("H20",), "H20"),
    (("H100", "NVL"), "H100-NVL"),
    (("H100", "PCIE"), "H100-PCIE"),
    (("H100", "HBM2E"), "H100-SXM5-96GB-HBM2E"),
    (("H100",), "H100-SXM5-80GB"),
    (("A800",), "A800-SXM4-80GB"),
    (("A100", "PCIE", "40GB"), "A100-PCIE-40GB"),
    (("A100", "PCIE"), "A100-PCIE-80GB"),
    (("A100", "40GB"), "A100-SXM4-40GB"),
    (("A100",), "A100-SXM4-80GB"),
    (("L40S",), "L40S"),
    (("L40",), "L40"),
    (("L4",), "L4"),
    (("A10G",), "A10G"),
    (("A10",), "A10"),
    (("V100", "32GB"), "V100-SXM2-32GB"),
    (("V100",), "V100-SXM2-16GB"),
    (("T4",), "T4"),
)


@functools.lru_cache(maxsize=1024)
def accelerator(product: str) -> Accelerator | None:
    """Return the GPU of a product label or a report. None if it is unknown, or a slice of a GPU (MIG)."""
    exact = ACCELERATORS.get(product)
    if exact is not None:
        return exact
    words = set(product.upper().replace("(", " ").replace(")", " ").replace("-", " ").replace(",", " ").split())
    if "MIG" in words:
        return None
    return next(
        (ACCELERATORS[name] for required_words, name in _PRODUCT_WORDS if words.issuperset(required_words)), None
    )


def gpu_memory_bytes(product: str) -> int | None:
    """Return the bytes of memory of one GPU of this product, for nodes without such a label. None if it is unknown."""
    match = accelerator(product) if product else None
    return int(match.memory) if match is not None else None
