"""Commands are taken apart, and names that do not exist are found without running anything."""

from __future__ import annotations

import pytest

from tests.docs.commands import looks_like_command, problems, problems_in_prose, simple_commands


def test_a_script_is_taken_apart() -> None:
    script = """
export KUBECONFIG="$(meshwright local kubeconfig)"  # where it is
A=1 B=2 meshwright crd | kubectl apply -f - > out.txt 2>&1 && (make demo; make lint)
helm install x helm/meshwright \\
    --set a=b
kubectl get ptj NAME -o jsonpath='{.status | a; b}'
"""
    assert list(simple_commands(script)) == [
        ["meshwright", "local", "kubeconfig"],
        ["export", "KUBECONFIG=X"],
        ["meshwright", "crd"],
        ["kubectl", "apply", "-f", "-"],
        ["make", "demo"],
        ["make", "lint"],
        ["helm", "install", "x", "helm/meshwright", "--set", "a=b"],
        ["kubectl", "get", "ptj", "NAME", "-o", "jsonpath={.status | a; b}"],
    ]


@pytest.mark.parametrize(
    "command",
    [
        "meshwright plan -f job.yaml --gpus 64 | cat",
        ".venv/bin/meshwright local up --racks 3",
        "meshwright local --help",
        "meshwright-operator --coordinator-listen 127.0.0.1:9470",
        "python -m benchmarks.throughput --quick",
        "torchrun --nproc-per-node 2 examples/own_module/encoder.py --tensor 2",
        "make demo",
        "kubectl get ptj,pods -w",
        "kubectl logs -f NAME-w0-0",
        "helm install m helm/meshwright --namespace m --set image.repository=a",
        "docker build -f operator/Dockerfile -t a:1 .",
    ],
)
def test_what_exists_is_not_a_problem(command: str) -> None:
    assert problems(command) == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("meshwright trane", "no command `trane`"),
        ("meshwright local chaos begin", "no command `begin`"),
        ("meshwright plan -f job.yaml --gpu-count 64", "--gpu-count"),
        ("meshwright local up now", "unexpected now"),
        ("meshwright-operator --coordinator-port 1", "no option --coordinator-port"),
        ("python -m benchmarks.no_such_thing", "no module `benchmarks.no_such_thing`"),
        ("python -m no_such_package.thing", "no module"),
        ("python -m benchmarks.throughput --fast", "no option --fast"),
        ("python examples/none.py", "no file"),
        ("make coffee", "no target `coffee`"),
        ("kubectl fetch ptj", "no command `fetch`"),
        ("kubectl get trainings,pods", "no kind `trainings`"),
        ("kubectl wait ptx/NAME --for=delete", "no kind `ptx`"),
        ("helm install m charts/meshwright", "no chart"),
        ("helm install m helm/meshwright --set image.name=a", "no value `image.name`"),
        ("docker build -f operator/Containerfile .", "no file operator/Containerfile"),
        ("echo a && frobnicate", "`frobnicate`: no such program"),
        ("X=$(make coffee)", "no target `coffee`"),
        ("echo 'a", "unexpected EOF"),
        ("if true; then echo a", "syntax error"),
    ],
)
def test_what_does_not_exist_is_found(command: str, problem: str) -> None:
    found = problems(command)
    assert found
    assert problem in found[0]


def test_commands_in_prose_are_checked_too() -> None:
    text = "Run `make\ndemo`, then `make coffee`; `make` alone, ``make tea``.\n\n```bash\n`make tea`\n```\n"
    assert problems_in_prose(text) == ["`make coffee`: `make`: no target `coffee`"]


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("    make demo", True),
        ("$ anything", True),
        ("meshwright plan", True),
        ("cost = sum over groups", False),
        ("request    Meshwright-Date: it's", False),
        ("", False),
    ],
)
def test_a_command_in_a_figure_is_seen(line: str, command: bool) -> None:
    assert looks_like_command(line) is command
