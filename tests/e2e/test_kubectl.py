"""What a new user types."""

import asyncio
import shutil
import sys

import pytest
import yaml

from meshwright_local.nodeagent.volumes import claim_directory
from tests.e2e.local_stack import EXAMPLES, NAMESPACE, eventually, tiny
from tests.patience import patient

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the PATH")


async def kubectl(stage, *arguments, stdin=""):
    """stdout and stderr together; fails when the command does."""
    process = await asyncio.create_subprocess_exec(
        "kubectl", "--kubeconfig", str(stage.kubeconfig), *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(stdin.encode()), patient(120))
    assert process.returncode == 0, out.decode()
    return out.decode()


async def test_apply_watch_and_delete_as_a_new_user_types_them(stage, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all(tiny("typed", replicas=1, training={"steps": 20})))
    assert "typed created" in await kubectl(stage, "apply", "-f", str(path))
    waited = await kubectl(stage, "wait", "--for=condition=Complete", "ptj/typed", "--timeout=240s")
    assert "typed condition met" in waited
    table = (await kubectl(stage, "get", "ptj")).splitlines()
    assert table[0].split()[:3] == ["NAME", "READY", "STATUS"]
    assert any(line.startswith("typed ") and "Completed" in line and "TP 2 x PP 1 x DP 1" in line for line in table)
    assert "typed" in await kubectl(stage, "get", "training")
    described = await kubectl(stage, "describe", "ptj", "typed")
    for word in ("Placed", "MeshFormed", "Completed", "Micro Batches"):
        assert word in described, word
    logs = await kubectl(stage, "logs", "-f", "typed-w0-0")
    assert "step" in logs
    assert "loss" in logs
    assert "deleted" in await kubectl(stage, "delete", "-f", str(path), "--wait=true")

    async def collected():
        return "typed" not in await kubectl(stage, "get", "ptj,pods,svc,secret")

    await eventually("what the job owned is collected", collected)


async def test_explain_describes_the_fields(stage):
    text = await kubectl(stage, "explain", "ptj.spec.parallelism.tensor")
    assert "NVLink domain" in " ".join(text.split())


@pytest.mark.long
async def test_apply_server_side_and_again_changes_nothing(stage):
    """By default, all other tests here apply on the server, and `tests/conformance` applies the same again."""
    path = str(EXAMPLES / "ten-line.yaml")
    assert "serverside-applied" in await kubectl(stage, "apply", "--server-side", "-f", path)
    await kubectl(stage, "wait", "--for=condition=Complete", "ptj/ten-line", "--timeout=240s")
    before = await kubectl(stage, "get", "ptj", "ten-line", "-o", "jsonpath={.metadata.generation}")
    await kubectl(stage, "apply", "--server-side", "-f", path)
    assert await kubectl(stage, "get", "ptj", "ten-line", "-o", "jsonpath={.metadata.generation}") == before
    await stage.delete("ten-line")


async def uploaded(stage, tmp_path):
    """Upload a folder, and check its files; a job that reads them."""
    texts = tmp_path / "texts"
    (texts / "part").mkdir(parents=True)
    (texts / "a.txt").write_text("once upon a time\n" * 500)
    (texts / "part" / "b.txt").write_bytes(bytes(range(256)) * 5000)
    (texts / ".hidden").write_text("not this one")
    files = {"source": "Files", "claimName": "uploaded"}
    claim, job = tiny("uploaded", replicas=1, training={"steps": 10}, data=files)
    await stage.apply([claim])
    command = [sys.executable, "-c", "from meshwright_cli.main import main; main()", "data", "upload"]
    options = ["--kubeconfig", str(stage.kubeconfig), "--to", "en"]
    process = await asyncio.create_subprocess_exec(
        *command, str(texts), "uploaded", *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), patient(120))
    assert process.returncode == 0, out.decode()
    assert out.decode() == "2 files, 1,288,500 bytes on claim uploaded in en\n"
    directory = await claim_directory(stage.client, NAMESPACE, "uploaded")
    assert (directory / "en" / "part" / "b.txt").read_bytes() == (texts / "part" / "b.txt").read_bytes()
    assert not (directory / "en" / ".hidden").exists()
    assert not list(directory.rglob("*.part"))
    job["spec"]["data"] = {"source": "Files", "claimName": "uploaded", "pattern": "en/**/*.txt"}
    return job


async def test_a_folder_is_uploaded_onto_a_claim(stage, tmp_path):
    await uploaded(stage, tmp_path)


@pytest.mark.long
async def test_an_uploaded_folder_is_trained_on(stage, tmp_path):
    """By default, the claim of a job of `test_mistakes` is read, and tests of the runtime train on files."""
    await stage.apply([await uploaded(stage, tmp_path)])
    await stage.complete("uploaded")
