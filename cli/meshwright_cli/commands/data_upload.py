"""`meshwright data upload`: copies a local directory onto a claim, through a pod that exists only for this.

The files go through `kubectl exec`, so every cluster and every login that kubectl knows works. The pod meets the
restricted Pod Security Standard, and gets no service-account token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import click

from meshwright.api.labels import USER_ID
from meshwright_cli.client.checkpoints.pod import GRACE_SECONDS, LIFE_SECONDS
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.parameters import Duration
from meshwright_cli.text import plural

MOUNT = "/upload"

_RECEIVE = """
import hashlib, json, os, sys, tarfile
target, total = sys.argv[1], hashlib.sha256()
os.makedirs(target, exist_ok=True)
count = size = 0
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
    for member in archive:
        if member.name == ".end":
            break
        path = os.path.join(target, member.name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".part", "wb") as out:
            source = archive.extractfile(member)
            while block := source.read(1 << 20):
                out.write(block)
                total.update(block)
            out.flush()
            os.fsync(out.fileno())
        os.replace(path + ".part", path)
        total.update(member.name.encode("utf-8", "surrogateescape") + b"\\0")
        count, size = count + 1, size + member.size
print(json.dumps({"files": count, "bytes": size, "sha256": total.hexdigest()}))
"""
"""Runs in the pod. Stops at the file `.end`: whether the end of standard input arrives depends on the cluster."""


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("claim")
@click.option("--to", "target", default="", help="Directory on the claim. Defaults to its root.")
@click.option(
    "--image", default="meshwright-worker:0.1.0", show_default=True, help="Image of the pod. It must contain Python."
)
@click.option(
    "--timeout", type=Duration(), default="5m", show_default=True, help="Longest time until the pod runs, such as 90s."
)
@cluster_options
def upload(
    directory: Path,
    claim: str,
    target: str,
    image: str,
    timeout: float,
    access: Access,
) -> None:
    """Copy the files of DIRECTORY onto the PersistentVolumeClaim CLAIM.

    Needs kubectl 1.31 or newer. Files of the same name are replaced, others stay. Hidden files are left out. The number
    of files, their size and a checksum are compared at the end.
    """
    if ".." in PurePosixPath(target).parts:
        raise click.ClickException(f"--to {target}: must not contain `..`")
    if "/" in claim:
        name, _, below = claim.partition("/")
        raise click.ClickException(
            f"{claim} is no name of a claim: pass a directory on it with --to: `{name} --to {below or 'DIRECTORY'}`"
        )
    files = _files(directory)
    kubectl = _Kubectl(access)
    kubectl.run("get", "persistentvolumeclaim", claim)
    pod = f"meshwright-upload-{secrets.token_hex(4)}"
    kubectl.run("create", "-f", "-", stdin=json.dumps(_pod(pod, claim, image)))
    try:
        _wait_until_ready(kubectl, pod, timeout)
        sent, received = _send(kubectl, pod, directory, files, f"{MOUNT}/{target}".rstrip("/"))
    finally:
        kubectl.run("delete", "pod", pod, f"--grace-period={GRACE_SECONDS}", "--wait=false", check=False)
    if sent != received:
        raise click.ClickException(f"the claim has received {received}, but {sent} was sent: upload again")
    where = f"claim {claim}{f' in {target}' if target else ''}"
    click.echo(f"{plural(sent['files'], 'file')}, {sent['bytes']:,} bytes on {where}")


def _files(directory: Path) -> list[Path]:
    """The files below a directory, by name.

    Raises:
        click.ClickException: there is none, or a link has files that would be missing on the claim unnoticed.
    """
    found = sorted(directory.rglob("*"))
    visible = [path for path in found if not any(part.startswith(".") for part in path.relative_to(directory).parts)]
    for path in visible:
        if path.is_symlink() and path.is_dir():
            raise click.ClickException(
                f"{path} is a link to a directory, and links are not followed: upload that directory with "
                f"`--to {path.relative_to(directory)}`, or put it in the place of the link"
            )
        if path.is_symlink() and not path.exists():
            raise click.ClickException(f"{path} is a link without a target: restore the target, or remove the link")
    files = [path for path in visible if path.is_file()]
    if not files:
        raise click.ClickException(f"{directory} has no file to upload")
    return files


class _Kubectl:
    """kubectl with the chosen cluster and namespace.

    Raises:
        click.ClickException: kubectl is not installed.
    """

    def __init__(self, access: Access) -> None:
        program = shutil.which("kubectl")
        if program is None:
            raise click.ClickException("`meshwright data upload` needs kubectl on the PATH: install it")
        self._command = [program]
        for flag in ("namespace", "context", "kubeconfig"):
            value = getattr(access, flag)
            self._command += [f"--{flag}={value}"] if value is not None else []

    def run(self, *words: str, stdin: str = "", check: bool = True) -> str:
        """Run kubectl; return what it prints.

        Raises:
            click.ClickException: it failed; the message is kubectl's.
        """
        done = subprocess.run([*self._command, *words], input=stdin, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise click.ClickException(f"kubectl {words[0]}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start kubectl with pipes."""
        pipe = subprocess.PIPE
        return subprocess.Popen([*self._command, *words], stdin=pipe, stdout=pipe, stderr=pipe)


def _pod(name: str, claim: str, image: str) -> dict[str, Any]:
    """The pod that receives the files."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "meshwright-upload"}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LIFE_SECONDS,
            "automountServiceAccountToken": False,
            "securityContext": {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"},
            "volumes": [{"name": "target", "persistentVolumeClaim": {"claimName": claim}}],
            "containers": [
                {
                    "name": "upload",
                    "image": image,
                    "command": ["python", "-c", f"import time; time.sleep({LIFE_SECONDS})"],
                    "volumeMounts": [{"name": "target", "mountPath": MOUNT}],
                    "securityContext": security,
                }
            ],
        },
    }


def _wait_until_ready(kubectl: _Kubectl, pod: str, timeout: float) -> None:
    try:
        kubectl.run("wait", "--for=condition=Ready", f"pod/{pod}", f"--timeout={timeout:g}s")
    except click.ClickException as error:
        events = kubectl.run("get", "events", f"--field-selector=involvedObject.name={pod}", check=False)
        last = next(iter(events.strip().splitlines()[-1:]), "")
        raise click.ClickException(f"the pod for the upload did not start: {error.message}. {last}".strip()) from None


def _send(
    kubectl: _Kubectl, pod: str, directory: Path, files: Sequence[Path], target: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Send the files; return what was sent and what the pod received.

    Raises:
        click.ClickException: the transfer failed.
    """
    words = ("exec", "-i", pod, "--", "python", "-c", _RECEIVE, target)
    total, size = hashlib.sha256(), 0
    with kubectl.start(words) as process:
        assert process.stdin is not None
        with (
            contextlib.suppress(BrokenPipeError),
            # A file with two names is sent twice: the pod reads a stream, and cannot go back to the first.
            tarfile.open(fileobj=process.stdin, mode="w|", dereference=True) as archive,
        ):
            for path in files:
                name = path.relative_to(directory).as_posix()
                with _readable(path, process), path.open("rb") as source:
                    entry = archive.gettarinfo(arcname=name, fileobj=source)
                    archive.addfile(entry, _Hashing(source, total))
                total.update(name.encode("utf-8", "surrogateescape") + b"\0")
                size += entry.size
            archive.addfile(tarfile.TarInfo(".end"))
        with contextlib.suppress(BrokenPipeError):
            out, errors = process.communicate()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise click.ClickException(f"the transfer failed: {lines[-1] if lines else f'exit code {process.returncode}'}")
    return {"files": len(files), "bytes": size, "sha256": total.hexdigest()}, json.loads(out)


@contextlib.contextmanager
def _readable(path: Path, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Reads a file.

    Raises:
        click.ClickException: it cannot be read, or becomes shorter meanwhile. The transfer is ended.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        process.kill()
        raise click.ClickException(f"{path}: {error.strerror or error}") from None


class _Hashing:
    """A file that adds what is read from it to a hash."""

    def __init__(self, source: Any, total: Any) -> None:
        self._source, self._total = source, total

    def read(self, size: int = -1) -> bytes:
        """Read and hash."""
        block: bytes = self._source.read(size)
        self._total.update(block)
        return block
