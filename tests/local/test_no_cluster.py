"""Commands of `meshwright local` without a cluster: nothing that follows them reaches a cluster that was not meant."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright_cli.main import main
from tests.patience import patient


def test_the_kubeconfig_of_no_cluster_is_a_file_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text("of a cluster that was killed")
    result = CliRunner().invoke(main, ["local", "kubeconfig", "--directory", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout == f"{tmp_path / 'kubeconfig'}\n"
    assert "start one with `meshwright local up`" in result.stderr
    assert not (tmp_path / "kubeconfig").exists()


def test_kubectl_does_not_fall_back_to_another_cluster(tmp_path: Path, kubectl: str) -> None:
    """What README says to type, in a shell of a user who has another cluster."""
    other = tmp_path / ".kube" / "config"
    other.parent.mkdir()
    other.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: production\n"
        "contexts: [{name: production, context: {cluster: c, user: u}}]\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: u, user: {token: t}}]\n"
    )
    meshwright = f"{shlex.quote(sys.executable)} -c 'from meshwright_cli.main import main; main()'"
    asked = f"{meshwright} local kubeconfig --directory {shlex.quote(str(tmp_path))}/none"
    script = f'export KUBECONFIG="$({asked})"; {kubectl} config view'
    environment = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert "production" not in done.stdout
    assert "127.0.0.1:1" not in done.stdout


@pytest.fixture
def kubectl() -> str:
    """kubectl on the PATH."""
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("no kubectl on the PATH")
    return found
