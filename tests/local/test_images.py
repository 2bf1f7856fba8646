"""Images that are root directories: what their containers see and run."""

from __future__ import annotations

import json
import os
import shutil
from os.path import exists
from pathlib import Path

import pytest

from meshwright_local.nodeagent.runtime import environment
from meshwright_local.nodeagent.runtime.images import Image, find_image
from meshwright_local.nodeagent.sandbox import PodSpecError
from meshwright_worker.bundle import elf
from tests.local.conftest import Kit

pytestmark = pytest.mark.asyncio(loop_scope="module")


def shell_image(directory: Path, **config: object) -> Path:
    """An image with nothing but a shell and its libraries."""
    root = directory / "rootfs"
    shell = Path(os.path.realpath("/bin/sh"))
    for source in {*elf.libraries([shell]).values(), elf.interpreter(shell)}:
        place = root / str(source).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(source), place)
    (root / "bin").mkdir(exist_ok=True)
    shutil.copy2(shell, root / "bin" / "sh")
    (root / "run").mkdir()
    (root / "var").mkdir()
    (root / "var" / "run").symlink_to("/run")
    (directory / "config.json").write_text(json.dumps({"config": config}))
    return root


def needs_views(kit: Kit) -> None:
    kit.needs_own_nodes()
    if not next(iter(kit.cluster.nodes.values())).isolated:
        pytest.skip("containers have their own view of the file system only if the cluster runs as root")


async def test_a_container_sees_its_image_and_its_volumes_only(kit: Kit) -> None:
    directory = kit.cluster.directory / "images" / "team" / "shell:1"
    root = shell_image(directory, Env=["PATH=/bin", "STAGE=test"], WorkingDir="/work")
    needs_views(kit)
    mounts = [{"name": "a", "mountPath": "/var/run/a"}]
    script = (
        'echo / /*; echo "$PATH $STAGE $PWD ${TMPDIR-unset} $HOME"; echo hello > /var/run/a/file; echo kept > /new; '
    )
    script += "echo bye > /dev/termination-log; echo nothing > /dev/null"
    volumes = {"volumes": [{"name": "a", "emptyDir": {}}]}
    await kit.pod("image", "sh", "-c", script, spec=volumes, image="team/shell:1", volumeMounts=mounts)
    pod = await kit.ended("image")
    assert pod["status"]["phase"] == "Succeeded", pod["status"]
    first, second = kit.log_of(pod).splitlines()
    expected = "/ /bin /dev /etc /lib /lib64 /meshwright /proc /run /sys /usr /var /work"
    assert set(first.split()) <= set(expected.split())
    assert second == "/bin test /work unset /"
    assert not (root / "new").exists(), "what containers write is not part of the image"
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "bye\n"
    assert not exists("/dev/termination-log"), "nor of the machine"  # noqa: ASYNC240
    volume = next(kit.cluster.directory.glob(f"nodes/*/pods/{pod['metadata']['uid']}/volumes/a/file"))
    assert volume.read_text() == "hello\n", "the link of the image was followed inside the image"


async def test_a_program_that_the_image_does_not_have_is_not_taken_from_the_machine(kit: Kit) -> None:
    directory = kit.cluster.directory / "images" / "empty"
    (directory / "rootfs").mkdir(parents=True)
    needs_views(kit)
    await kit.pod("missing", "sh", "-c", "true", image="empty")
    state = (await kit.ended("missing"))["status"]["containerStatuses"][0]["state"]["terminated"]
    assert state["reason"] == "StartError"
    assert "sh" in state["message"]
    assert state["message"].endswith("No such file or directory")


async def test_images_are_found_by_name_inside_their_directory(tmp_path: Path) -> None:
    (tmp_path / "images" / "a" / "rootfs").mkdir(parents=True)
    (tmp_path / "other" / "rootfs").mkdir(parents=True)
    images = tmp_path / "images"
    assert find_image(images, "a") == Image((images / "a" / "rootfs").resolve())
    for name in ("b", "../other", "a/../../other", "", "/a", "."):
        assert find_image(images, name) is None
    assert find_image(None, "a") is None
    (images / "a" / "config.json").write_text("{")
    with pytest.raises(PodSpecError, match="not valid"):
        find_image(images, "a")


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({}, ["/run", "--fast"]),
        ({"args": ["--slow"]}, ["/run", "--slow"]),
        ({"command": ["/other"]}, ["/other"]),
        ({"command": ["/other"], "args": ["$(NAME)"]}, ["/other", "value"]),
    ],
)
async def test_a_container_without_a_command_runs_that_of_its_image(container, expected, tmp_path: Path) -> None:
    image = Image(tmp_path, entrypoint=("/run",), command=("--fast",))
    assert environment.command(container, {"NAME": "value"}, image) == expected


async def test_a_container_needs_a_command_if_its_image_has_none(tmp_path: Path) -> None:
    with pytest.raises(PodSpecError, match=r"set spec\.containers\[\]\.command"):
        environment.command({}, {}, Image(tmp_path))
