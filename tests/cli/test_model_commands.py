"""`meshwright generate` and `meshwright export`: the pod, and what a person reads when it cannot be."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from meshwright_cli.client.checkpoints.pod import Tool, memory_quantity, tool_pod
from meshwright_cli.client.checkpoints.programs import (
    Export,
    Generation,
    checkpoints_command,
    failure_message,
    generate_command,
)
from meshwright_cli.client.checkpoints.source import checkpoint_path, export_memory, generation_memory
from meshwright_cli.client.checkpoints.transfer import PodDirectory
from meshwright_cli.client.errors import NotFoundError, RejectedError, UnreachableError
from meshwright_cli.client.objects import Job
from meshwright_cli.main import main
from tests.cli.live_server import LiveServer, job, live_server, running
from tests.golden.files import check

SAVED = {"step": 20, "time": "2026-01-02T03:04:05Z", "path": "/meshwright/checkpoints/lm-01234567/step-00000020"}
JOBS = "/apis/meshwright.dev/v1alpha1/namespaces/default/paralleltrainingjobs"
RICH = {
    "data": {"source": "Files", "claimName": "texts"},
    "workers": {
        "image": "registry.example.com/worker:1", "gpusPerWorker": 2, "gpuResource": "amd.com/gpu",
        "imagePullPolicy": "IfNotPresent", "imagePullSecrets": [{"name": "pull"}], "serviceAccountName": "reader",
        "nodeSelector": {"pool": "a"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "runAsUser": 1000, "runAsGroup": 2000, "supplementalGroups": [3000],
        "env": [{"name": "MODE", "value": ""},
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "key"}}}],
        "volumes": [{"name": "models", "mountPath": "/models", "claimName": "models"},
                    {"name": "config", "mountPath": "/config", "configMapName": "config"},
                    {"name": "keys", "mountPath": "/keys", "secretName": "keys"},
                    {"name": "tmp", "mountPath": "/scratch", "scratch": "1Gi"}],
    },
}  # fmt: skip


def lm(**spec) -> Job:
    made = job("lm", **spec)
    made["metadata"] |= {"namespace": "research", "uid": "01234567-89ab-cdef-0123-456789abcdef"}
    return Job({**made, "status": running(checkpoint=SAVED)})


@pytest.mark.parametrize(("name", "made", "tool"), [
    ("generate", lm(), Tool("generate", ["python", "-m", "meshwright_worker.generate"], memory="2Gi")),
    ("generate-rich", lm(**RICH), Tool("generate", ["python"], gpus=2)),
    ("export-to-claim", lm(), Tool("export", ["python"], writes_claim=True)),
    ("export", lm(**RICH), Tool("export", ["python"], has_output=True)),
    ("read", lm(**RICH), Tool("read", ["python"], memory="256Mi", cpu="50m", only_checkpoints=True)),
])  # fmt: skip
def test_the_pod(name, made, tool):
    pod = tool_pod(made, tool, "0a1b2c3d")
    check(f"cli/model-pod-{name}.yaml", yaml.safe_dump(pod, sort_keys=False))
    spec = pod["spec"]
    # The restricted Pod Security Standard.
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    allowed = {"persistentVolumeClaim", "configMap", "secret", "emptyDir"}
    assert all({*volume} - {"name"} <= allowed for volume in spec["volumes"])
    assert spec["automountServiceAccountToken"] is False
    claims = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}
    writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert claims & writable == ({"checkpoints"} if tool.writes_claim else set())


def test_the_pod_of_a_job_with_a_long_name_has_a_valid_name():
    made = lm()
    made.raw["metadata"]["name"] = "a" * 62 + "." + "b" * 10
    name = tool_pod(made, Tool("generate", []), "0a1b2c3d")["metadata"]["name"]
    assert len(name) <= 63
    assert name.endswith("a-generate-0a1b2c3d")


def test_which_checkpoint():
    assert checkpoint_path(lm()) == "/meshwright/checkpoints/lm-01234567"
    assert checkpoint_path(lm(), 10) == "/meshwright/checkpoints/lm-01234567/step-00000010"


def test_a_job_without_a_checkpoint_is_told_how_to_get_one():
    made = lm(checkpoint={"claimName": "runs", "everySteps": 40})
    made.raw["status"]["checkpoint"] = None
    with pytest.raises(NotFoundError) as caught:
        checkpoint_path(made)
    assert str(caught.value) == (
        "lm has no complete checkpoint yet. It is Running, step 30, and saves one every 40 steps. To wait: "
        "meshwright wait lm --for step=40"
    )
    with pytest.raises(RejectedError, match=r"lm saves no checkpoints: it has no `spec.checkpoint`"):
        checkpoint_path(lm(checkpoint=None))
    with pytest.raises(RejectedError, match=r"lm runs its own command .* They are on the claim `runs`"):
        checkpoint_path(lm(runtime={"command": ["python"]}, model=None, data=None, training=None))


def test_memory_grows_with_the_model():
    small, preset = lm(), lm(model={"preset": "llama-3-8b"})
    assert memory_quantity(generation_memory(small, "fp32", 0)) == "1537Mi"
    # 8 billion parameters of 4 bytes, a quarter more, and the largest tensor.
    assert 37 << 30 < generation_memory(preset, "fp32", 0) < 42 << 30
    assert generation_memory(preset, "bf16", 0) < generation_memory(preset, "fp32", 0) / 1.7
    assert export_memory(preset, "fp32", 4) < 14 << 30
    assert generation_memory(lm(model={"preset": "of-tomorrow"}), "fp32", 0) is None


def test_options_become_arguments():
    wanted = Generation(prompt="-x", tokens=5, temperature=0.0, past_end=True, base="/models/base")
    assert generate_command("/c", wanted, 0) == [
        "python", "-m", "meshwright_worker.generate", "--checkpoint=/c", "--prompt=-x", "--tokens=5",
        "--temperature=0.0", "--base=/models/base", "--past-end",
    ]  # fmt: skip
    assert generate_command("/c", Generation(best=True), 0)[3:] == ["--checkpoint=/c", "--best"]
    assert Export(best=True, adapter=True).arguments() == ["--adapter", "--best"]
    assert checkpoints_command("copy", ["/c"], None, "/d", best=True)[3:] == ["copy", "--at=/c", "--to=/d", "--best"]
    split = generate_command("/c", Generation(), 4)
    assert split[2:6] == ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m"]
    assert split[-2:] == ["--tensor=4", "--checkpoint=/c"]


@pytest.mark.parametrize(("code", "reason", "lines", "text"), [
    (2, "Error", ["usage: x", "python -m meshwright_worker.generate: error: no such file"], "no such file"),
    (137, "OOMKilled", [], "the pod ran out of memory (limit 2Gi): pass more with --memory"),
    (1, "Error", ["Traceback", "ImportError: torch", ""], "the program exited with code 1: ImportError: torch"),
    (1, "Error", [], "the program exited with code 1: Error"),
    (1, "DeadlineExceeded", [], "the pod did not finish within 6 hours"),
])  # fmt: skip
def test_a_failure_is_told_in_one_line(code, reason, lines, text):
    assert failure_message(code, reason, lines, "2Gi") == text


class CutStream:
    """A pod whose connection ends after a few bytes, as those through a proxy do."""

    def __init__(self, files, piece, *, dead=False):
        self.files, self.piece, self.dead, self.connections = files, piece, dead, 0

    async def output(self, *command):
        path = command[3]
        if len(command) == 4:
            yield json.dumps([[n, len(b), hashlib.sha256(b).hexdigest()] for n, b in self.files.items()]).encode()
            return
        self.connections += 1
        rest = self.files[path.rpartition("/out/")[2]][int(command[4]) :]
        if not self.dead:
            yield rest[: self.piece]
        if self.dead or len(rest) > self.piece:
            raise UnreachableError("cut")


def copied(monkeypatch, tmp_path, stream):
    monkeypatch.setattr("meshwright_cli.client.checkpoints.transfer.RETRY_SECONDS", 0)
    monkeypatch.setattr(PodDirectory, "_output", lambda _, *command: stream.output(*command))
    directory = PodDirectory(None, "default", "pod", "/out")
    return asyncio.run(directory.copy_to(tmp_path, lambda *_: None))


def test_a_transfer_continues_where_the_connection_was_cut(monkeypatch, tmp_path):
    files = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4, "empty": b""}
    stream = CutStream(files, 300)
    assert copied(monkeypatch, tmp_path, stream) == 1026
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert stream.connections == 1 + 4


def test_a_transfer_that_brings_nothing_fails(monkeypatch, tmp_path):
    stream = CutStream({"model.safetensors": b"x"}, 1, dead=True)
    with pytest.raises(UnreachableError):
        copied(monkeypatch, tmp_path, stream)
    assert stream.connections == 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """An API server without nodes, with a job that has a checkpoint."""
    with live_server(tmp_path_factory.mktemp("server"), "embedded") as made:
        made.apply(JOBS, {**job("lm"), "status": running(checkpoint=SAVED)})
        yield made


def pods(server: LiveServer) -> list[str]:
    return [item["metadata"]["name"] for item in server.call("GET", "/api/v1/namespaces/default/pods")["items"]]


def test_an_unknown_job_and_a_directory_of_its_name(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shown = server.cli("generate", "runs", code=3)
    assert "no job `runs` in namespace `default`" in shown.stderr
    assert "For the directory of this name, pass ./runs" in shown.stderr


@pytest.mark.parametrize(
    "words", [("generate", "lm"), ("export", "lm", "--on-claim", "x"), ("export", "lm", "-d", "x")]
)
def test_who_may_not_create_pods_is_told_the_right(server, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rules = [{"apiGroups": ["meshwright.dev"], "resources": ["paralleltrainingjobs"], "verbs": ["get", "list"]}]
    grant(server, "viewer", rules)
    shown = server.cli(*words, code=4, kubeconfig=server.as_user("viewer"))
    resource = "pods/exec" if "-d" in words else "pods"
    assert f"you may not create {resource} in namespace `default`" in shown.stderr
    assert not pods(server)
    assert not (tmp_path / "x").exists()


def grant(server: LiveServer, user: str, rules: list[dict[str, object]]) -> None:
    """Give a user these rights in the namespace."""
    kind, group = "rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"
    path = f"/apis/{kind}/namespaces/default"
    server.apply(f"{path}/roles", {"apiVersion": kind, "kind": "Role", "metadata": {"name": user}, "rules": rules})
    binding = {
        "apiVersion": kind, "kind": "RoleBinding", "metadata": {"name": user},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": user},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }  # fmt: skip
    server.apply(f"{path}/rolebindings", binding)


def test_a_pod_that_does_not_start_is_explained_and_deleted(server):
    shown = server.cli("generate", "lm", "--timeout", "1s", code=5)
    assert "did not start within 1 s" in shown.stderr
    assert "To wait longer, pass --timeout" in shown.stderr
    assert not pods(server)


@pytest.mark.parametrize("directory", ["/abs", "../up", "a/../../b"])
def test_a_directory_on_the_claim_is_below_its_root(server, directory):
    shown = server.cli("export", "lm", "--on-claim", directory, code=2)
    assert "must be relative and below its root" in shown.stderr


def test_a_target_is_needed_and_must_be_empty(server, tmp_path):
    assert "either -d DIRECTORY or --on-claim" in server.cli("export", "lm", code=2).stderr
    (tmp_path / "file").write_text("")
    assert "is not an empty directory" in server.cli("export", "lm", "-d", str(tmp_path), code=2).stderr


def test_a_directory_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commands = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: commands.append(command[1:]) or Result())
    for words in (
        ("generate", f"{tmp_path}/", "--gpus", "0"),
        ("export", f"{tmp_path}", "-d", "out"),
        ("export", f"{tmp_path}", "-d", "out", "--adapter", "--dtype", "bf16"),
        ("export", f"{tmp_path}", "-d", "out", "--best"),
    ):
        assert CliRunner().invoke(main, words).exit_code == 0
    assert commands == [
        ["-m", "meshwright_worker.generate", f"--checkpoint={tmp_path}", "--cpu"],
        ["-m", "meshwright_worker.export", f"--checkpoint={tmp_path}", "--output=out"],
        ["-m", "meshwright_worker.export", f"--checkpoint={tmp_path}", "--output=out", "--dtype=bf16", "--adapter"],
        ["-m", "meshwright_worker.export", f"--checkpoint={tmp_path}", "--output=out", "--best"],
    ]
    refused = CliRunner().invoke(main, ("export", f"{tmp_path}", "-d", "out", "--adapter", "--file-gib", "1"))
    assert "--file-gib is not supported with --adapter" in refused.output
    for words in (("export", "-d", "out"), ("generate",), ("checkpoint", "list"), ("checkpoint", "copy", "./out")):
        refused = CliRunner().invoke(main, (*words, f"{tmp_path}", "--best", "--step", "3"))
        assert (refused.exit_code, len(commands)) == (2, 4)
        assert "--best is not supported with --step" in refused.output
    missing = CliRunner().invoke(main, ["generate", "./none"])
    assert "`none` is not a directory" in missing.output


def test_a_list_shows_evaluation_losses_and_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = {"place": "/c", "state": "complete", "size": 5, "saved_at": None, "layout": "1 rank", "problem": ""}
    of_this_version = [
        {**base, "step": 30, "evaluation_loss": 2.5, "best": False},
        {**base, "step": 20, "evaluation_loss": 1.25, "best": True},
        {**base, "step": 10, "evaluation_loss": None, "best": False},
    ]
    earlier = [{**base, "step": 10}]
    shown = []
    for entries in (of_this_version, earlier):
        done = Result()
        done.stdout = "".join(f"{json.dumps(entry)}\n" for entry in entries)
        monkeypatch.setattr("subprocess.run", lambda *_, done=done, **__: done)
        shown.append(CliRunner().invoke(main, ("checkpoint", "list", f"{tmp_path}")).output.splitlines())
    assert [line.split() for line in shown[0]] == [
        ["STEP", "STATE", "SIZE", "EVALUATION", "LOSS", "LAYOUT", "PLACE"],
        ["30", "complete", "5", "B", "2.5", "1", "rank", "/c"],
        ["20", "complete", "5", "B", "1.25", "(best)", "1", "rank", "/c"],
        ["10", "complete", "5", "B", "-", "1", "rank", "/c"],
    ]
    assert shown[1][0].split() == ["STEP", "STATE", "SIZE", "LAYOUT", "PLACE"]


def test_a_list_without_the_step_says_so(tmp_path: Path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    assert CliRunner().invoke(main, ("checkpoint", "list", f"{checkpoints}")).output == "no checkpoints\n"
    shown = CliRunner().invoke(main, ("checkpoint", "list", f"{checkpoints}", "--step", "1200")).output
    assert shown == "no checkpoint of step 1,200\n"


class Result:
    returncode = 0
    stdout = ""
