"""Rules on the volumes a job adds: one source each, and out of the way of the operator's own."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.api.volumes import VolumeSpec
from meshwright.rules.rule import Rule

OWN_NAMES = ("shm", "checkpoints", "data", "scripts")
OWN_PATHS = ("/meshwright", "/dev")


def _one_source(volume: VolumeSpec) -> bool:
    sources = (volume.claim_name, volume.config_map_name, volume.secret_name, volume.scratch)
    return sum(source is not None for source in sources) == 1


def _free_path(volume: VolumeSpec) -> bool:
    return not any(
        volume.mount_path == reserved or volume.mount_path.startswith(f"{reserved}/") for reserved in OWN_PATHS
    )


def _plain_path(volume: VolumeSpec) -> bool:
    return ".." not in volume.mount_path.split("/")


VOLUMES_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "workers.volumes",
        "must have exactly one of `claimName`, `configMapName`, `secretName` and `scratch`",
        "self.workers.volumes.all(v, [has(v.claimName), has(v.configMapName), has(v.secretName), has(v.scratch)]"
        ".filter(given, given).size() == 1)",
        lambda spec: all(_one_source(v) for v in spec.workers.volumes),
    ),
    Rule(
        "workers.volumes",
        f"must not be called {', '.join(OWN_NAMES)}: these are the operator's own, rename them",
        f"!self.workers.volumes.exists(v, v.name in [{', '.join(repr(name) for name in OWN_NAMES)}])",
        lambda spec: not any(v.name in OWN_NAMES for v in spec.workers.volumes),
    ),
    Rule(
        "workers.volumes",
        "must not be mounted at or below /meshwright or /dev: these are the operator's own, choose another `mountPath`",
        "!self.workers.volumes.exists(v, v.mountPath == '/meshwright' || v.mountPath.startsWith('/meshwright/')"
        " || v.mountPath == '/dev' || v.mountPath.startsWith('/dev/'))",
        lambda spec: all(_free_path(v) for v in spec.workers.volumes),
    ),
    Rule(
        "workers.volumes",
        "must not have `..` in `mountPath`",
        "!self.workers.volumes.exists(v, v.mountPath.matches('/[.][.](/|$)'))",
        lambda spec: all(_plain_path(v) for v in spec.workers.volumes),
    ),
    Rule(
        "workers.volumes",
        "must each have a `mountPath` of their own",
        "self.workers.volumes.all(v, self.workers.volumes.exists_one(other, other.mountPath == v.mountPath))",
        lambda spec: len({v.mount_path for v in spec.workers.volumes}) == len(spec.workers.volumes),
    ),
)
