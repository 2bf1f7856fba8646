"""`render`: blocks that the product reads or that repeat a file, built from the code and the file.

`render spec` is a piece of a job's spec: `meshwright plan` must accept it, laid over a plain job. `render inventory` is
a list of nodes for `meshwright plan`, `render chaos` a list of faults for the embedded API server, `render fabric` a
fabric of a site, `render simulation-inputs` failures and times for `meshwright simulate`. `render label-sets` is the
list of known fabric labels. `render PATH` is a file of the repository, or with `...` parts of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from click.testing import CliRunner
from pydantic import TypeAdapter, ValidationError

from meshwright.planner.topology.levels import LABEL_SETS, LEVELS
from meshwright.planner.topology.site import FabricError, parse_fabric
from meshwright.simulation.inputs import Inputs
from meshwright_local.apiserver.rest.chaos import Rule
from tests.docs import programs, transcript
from tests.docs.blocks import ROOT, Block

GPUS = 64
PLAIN: dict[str, Any] = {
    "model": {"preset": "llama-3.2-1b"},
    "data": {"source": "PythonStdlib"},
    "training": {"steps": 1000, "globalBatchSize": 64, "sequenceLength": 2048, "precision": "bf16"},
    "workers": {"image": "meshwright-worker:0.1.0", "gpusPerWorker": 8},
}
OWN_TEXT = {"claimName", "uri"}
"""Fields of `data` that take the place of its `source`."""
LABELS = "label-sets"


class RenderError(AssertionError):
    """The product does not accept what a block shows. The message says why."""


def rendered(block: Block) -> list[str]:
    """The lines that a block should show.

    Raises:
        RenderError: what it shows is wrong, and only its author can say what is right.
    """
    what = block.options[0]
    if what in _READERS:
        _READERS[what](block.text)
        return block.lines
    if what == LABELS:
        return label_sets()
    if not (ROOT / what).is_file():
        raise RenderError(f"`{what}` is neither {', '.join((*_READERS, LABELS))} nor a file of the repository")
    return transcript.updated(block.lines, (ROOT / what).read_text().splitlines())


def label_sets() -> list[str]:
    """The label keys of each level, by who sets them."""
    lines = []
    for label_set in LABEL_SETS:
        lines.append(label_set.source)
        lines += [f"  {level:6}  {key}" for level in LEVELS for key in label_set.keys.get(level, ())]
    return lines


def with_fragment(spec: dict[str, Any]) -> dict[str, Any]:
    """The plain job with a piece of a spec laid over it."""
    whole = {name: dict(value) for name, value in PLAIN.items()}
    if OWN_TEXT & set(spec.get("data", {})):
        del whole["data"]["source"]
    for name, value in spec.items():
        merged = isinstance(value, dict) and name != "model"
        whole[name] = {**whole.get(name, {}), **value} if merged else value
    return {
        "apiVersion": "meshwright.dev/v1alpha1",
        "kind": "ParallelTrainingJob",
        "metadata": {"name": "shown"},
        "spec": whole,
    }


def _spec(text: str) -> None:
    fragment = _parsed(text)
    if not isinstance(fragment, dict):
        raise RenderError("a piece of a spec has fields")
    with _file(with_fragment(fragment)) as path:
        _plan("-f", str(path), "--gpus", str(GPUS))


def _inventory(text: str) -> None:
    with _file(_parsed(text)) as path:
        _plan("-f", str(ROOT / "examples" / "ten-line.yaml"), "--inventory", str(path))


def _chaos(text: str) -> None:
    try:
        TypeAdapter(list[Rule]).validate_json(text)
    except ValidationError as error:
        raise RenderError(str(error)) from None


def _fabric(text: str) -> None:
    try:
        parse_fabric(text)
    except FabricError as error:
        raise RenderError(str(error)) from error


def _simulation_inputs(text: str) -> None:
    try:
        Inputs.model_validate(_parsed(text))
    except ValidationError as error:
        raise RenderError(str(error)) from None


_READERS: dict[str, Callable[[str], None]] = {
    "spec": _spec,
    "inventory": _inventory,
    "chaos": _chaos,
    "fabric": _fabric,
    "simulation-inputs": _simulation_inputs,
}


def _plan(*words: str) -> None:
    done = CliRunner().invoke(programs.command("meshwright"), ["plan", *words])
    if done.exit_code:
        raise RenderError(done.output or repr(done.exception))


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RenderError(str(error)) from None


@contextmanager
def _file(content: Any) -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "shown.yaml"
        path.write_text(json.dumps(content))
        yield path
