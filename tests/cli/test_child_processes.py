"""Programs, directories and manifests: the parts of the CLI that touch the machine."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright_cli import manifest
from meshwright_cli.child_processes import ProgramEndedError, Programs
from meshwright_cli.demo.directory import DirectoryError, demo_directory
from tests.patience import patient

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds, seconds=10.0):
    deadline = time.monotonic() + patient(seconds)
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


async def text_of(log):
    async with asyncio.timeout(patient(60)):
        while not (log.exists() and log.read_text().endswith("\n")):  # noqa: ASYNC110 - files give no events
            await asyncio.sleep(0.02)
    return log.read_text()


async def test_leaving_stops_the_entire_process_group(tmp_path):
    log = tmp_path / "family.log"
    async with Programs() as programs:
        program = await programs.start("family", [sys.executable, "-c", FAMILY], log)
        grandchild = int(await text_of(log))
        assert alive(grandchild)
    assert not alive(program.process.pid)
    wait_until(lambda: not alive(grandchild))


async def test_a_program_that_ended_is_reported_with_its_log(tmp_path):
    async with Programs() as programs:
        argv = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
        program = await programs.start("thing", argv, tmp_path / "log")
        await program.process.wait()
        with pytest.raises(ProgramEndedError, match=r"thing exited with code 3[^$]*the reason"):
            programs.check()


async def test_output_is_only_stdout(tmp_path):
    async with Programs() as programs:
        code = "import sys; print('text'); print('noise', file=sys.stderr)"
        assert await programs.output("writer", [sys.executable, "-c", code], tmp_path / "log") == "text\n"
        assert (tmp_path / "log").read_text() == "noise\n"
        with pytest.raises(ProgramEndedError, match="exited with code 2"):
            await programs.output("writer", [sys.executable, "-c", "raise SystemExit(2)"], tmp_path / "log")


def test_programs_die_with_a_killed_parent(tmp_path):
    parent = f"""
import asyncio, sys
from pathlib import Path
from meshwright_cli.child_processes import Programs
async def main():
    async with Programs() as programs:
        program = await programs.start("sleeper", ["sleep", "60"], Path({str(tmp_path / "log")!r}))
        print(program.process.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert alive(child)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive(child))


def test_demo_directory_replaces_an_earlier_demo_and_keeps_others_out(tmp_path):
    place = tmp_path / "demo"
    with demo_directory(place) as first:
        (first / "old").mkdir()
        (first / "old" / "file").write_text("x")
        with pytest.raises(DirectoryError, match="another demo is running"), demo_directory(place):
            pass
    assert (place / "old" / "file").exists()
    with demo_directory(place) as second:
        assert [entry.name for entry in second.iterdir()] == [".meshwright-demo"]


def test_demo_directory_never_touches_foreign_files(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(DirectoryError, match="--directory"), demo_directory(tmp_path):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_demo_directory_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DirectoryError, match="cannot be written"), demo_directory(tmp_path / "demo"):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- 1\n", "document 1 has no `apiVersion`"),
        ("apiVersion: v1\nkind: Pod\n", "document 1 has no `metadata`"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {namespace: x}\n", "no `metadata.name`"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n---\nkind: Pod\n", "document 2 has no `apiVersion`"),
    ],
)
def test_an_invalid_manifest_is_rejected_by_name(tmp_path, text, message):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(manifest.ManifestError, match=message):
        manifest.read(path)


def test_every_example_is_a_readable_manifest():
    examples = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
    assert len(examples) >= 3
    for path in examples:
        kinds = [item["kind"] for item in manifest.read(path)]
        assert "ParallelTrainingJob" in kinds, path
