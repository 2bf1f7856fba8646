"""A save that is killed at any byte, and files that are damaged later: the next start takes the newest complete one."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from meshwright.api.checkpoint import Retention
from meshwright.layout import Layout
from meshwright_worker.checkpoint import save_plan
from meshwright_worker.checkpoint.async_save import commit_checkpoint, write_file
from meshwright_worker.checkpoint.full_tensors import FullTensorReader
from meshwright_worker.checkpoint.loader import newest_of_all
from meshwright_worker.checkpoint.manifest import MANIFEST, Manifest
from meshwright_worker.checkpoint.store import Tier, open_store
from meshwright_worker.distributed.mesh import Mesh
from tests.tiers import mostly_long
from tests.worker.checkpoint.dying_writer import Units, count_files, save_and_die
from tests.worker.checkpoint.test_checkpoint_files import manifest_at

RANKS = 2
TIERS = (("volume",), ("file://store",), ("volume", "file://store"))
FEW, MANY = 12, 100
"""Kills at random bytes: in `make test`, and in the long tier."""
EVERYTHING = 1 << 60


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """Of a run with one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    yield cast(Mesh, SimpleNamespace(rank=0, layout=Layout(), device=torch.device("cpu"), checkpoint_group=group))
    dist.destroy_process_group()


def tensors_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Large enough for several writes of a file."""
    return {f"of {rank}": torch.arange(40_000.0) + step, f"small of {rank}": torch.tensor([step, rank])}


def save(tiers: list[Tier], step: int) -> None:
    """What the ranks of a job do to save a step on each tier, one rank after the other."""
    for tier in tiers:
        tier.store.prepare(step)
        items = [save_plan.local_plan(tensors_of(step, rank), is_coordinator=rank == 0) for rank in range(RANKS)]
        planned = save_plan.global_plan([save_plan.encode_plan(mine) for mine in items])
        files = {}
        for rank, mine in enumerate(items):
            name = save_plan.file_of_rank(rank)
            content = save_plan.tensors_to_write(mine, tensors_of(step, rank))
            files[name] = write_file(tier.store, step, name, content)
        commit_checkpoint(manifest_at(step), tier, files, planned.index_name, planned.index)


def is_intact(files: Any, step: int) -> bool:
    reader = FullTensorReader(files)
    wanted = {name: tensor for rank in range(RANKS) for name, tensor in tensors_of(step, rank).items()}
    return set(reader.names) == set(wanted) and all(torch.equal(reader.read(n), t) for n, t in wanted.items())


@pytest.mark.parametrize("kills", mostly_long([FEW, MANY], FEW.__eq__))
@pytest.mark.parametrize("names", TIERS, ids="+".join)
def test_a_start_after_a_kill_at_any_byte_takes_the_newest_complete_checkpoint(
    tmp_path: Path, mesh: Mesh, names: tuple[str, ...], kills: int
) -> None:
    roots = [name.replace("://", f"://{tmp_path}/") if "://" in name else str(tmp_path / name) for name in names]

    def tiers(generation: int) -> list[Tier]:
        return [Tier(open_store(root, generation), Retention(2)) for root in roots]

    def resumed(generation: int) -> int:
        """The step from which the next start goes on, whose tensors are as they were saved."""
        found = newest_of_all([tier.store for tier in tiers(generation)], mesh, Manifest)
        assert found is not None
        store, manifest = found
        assert is_intact(store.files(manifest.state.step), manifest.state.step)
        return manifest.state.step

    for step in (5, 10):
        save(tiers(0), step)
    total = save_and_die(lambda: save(tiers(1), 20), EVERYTHING, count_files)
    assert total is not None
    assert total > 2 * 160_000 * len(names)
    outcomes = []
    for number, limit in enumerate(sorted(random.Random(17).sample(range(total), kills)), 2):
        for tier in tiers(number):
            tier.store.remove_newer(10)
        assert save_and_die(lambda now=number: save(tiers(now), 20), limit, count_files) is None  # type: ignore[misc]
        outcomes.append(resumed(number + 1))
        hidden = [path.name for root in tmp_path.iterdir() for path in root.iterdir() if "-5" in path.name]
        assert not hidden
        # The run can go on from there.
        if number % 10 == 0:
            save(tiers(number + 1), 21)
            assert resumed(number + 2) == 21
    assert outcomes == sorted(outcomes), "once complete, it is never lost"
    assert outcomes[0] == 10
    assert (outcomes[-1] == 20) == (len(names) == 2), "the first tier was complete, the second was not"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", ["volume", "store"])
def test_any_damage_to_any_file_is_found_and_named(
    tmp_path: Path, mesh: Mesh, caplog: pytest.LogCaptureFixture, kind: str, damage: Callable[[Path], None]
) -> None:
    saved, root = tmp_path / "saved", tmp_path / "root"
    location = f"file://{root}" if kind == "store" else str(root)
    for step in (10, 20):
        save([Tier(open_store(location.replace(str(root), str(saved))), Retention(2))], step)
    newest = next(path.name for path in saved.iterdir() if "20" in path.name)
    for name in sorted(path.name for path in (saved / newest).iterdir()):
        shutil.copytree(saved, root)
        damage(root / newest / name)
        caplog.clear()
        found = newest_of_all([open_store(location)], mesh, Manifest)
        assert found is not None
        assert found[1].state.step == 10, name
        assert is_intact(found[0].files(10), 10)
        # Without its manifest it never was a checkpoint.
        unseen = name == MANIFEST and damage is Path.unlink
        assert (f"{name} is damaged: " in caplog.text) is not unseen
        shutil.rmtree(root)


@pytest.mark.parametrize("kind", ["volume", "store"])
def test_a_run_without_a_complete_checkpoint_says_so(
    tmp_path: Path, mesh: Mesh, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO)
    location = f"file://{tmp_path}" if kind == "store" else str(tmp_path)
    assert newest_of_all([open_store(location)], mesh, Manifest) is None
    assert f"no complete checkpoint in {location}: starting at step 0" in caplog.text
    save([Tier(open_store(location), Retention(2))], 10)
    for path in tmp_path.rglob("rank-00001.safetensors"):
        flip(path)
    caplog.clear()
    assert newest_of_all([open_store(location, 1)], mesh, Manifest) is None
    assert f"every checkpoint in {location} is damaged (steps 10): starting at step 0" in caplog.text


def test_a_killed_process_is_counted_to_the_byte(tmp_path: Path) -> None:
    """The test's own means: a file has exactly the bytes that were allowed."""
    path = tmp_path / "file"

    def write() -> None:
        with path.open("xb") as file:
            file.write(b"x" * 100)

    for limit in (0, 1, 99):
        path.unlink(missing_ok=True)
        assert save_and_die(write, limit, count_files) is None
        assert path.stat().st_size == limit
    path.unlink()
    assert save_and_die(write, 100, count_files) == 100
    assert Units(3).take(5) == 3
