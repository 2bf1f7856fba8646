"""`meshwright model`: a configuration as the fields of a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from meshwright.api.model import ModelSpec
from meshwright.models.huggingface.registry import config_from_architecture
from meshwright.models.presets import PRESETS, resolve
from meshwright_cli import manifest
from meshwright_cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging-face.yaml"


def run(path: Path) -> Result:
    return CliRunner().invoke(main, ["model", str(path)])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "deepseek-v2-lite"])
def test_fields_that_a_job_takes(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_from_architecture(PRESETS[name])))
    for where in (tmp_path, tmp_path / "config.json"):
        printed = run(where)
        assert printed.exit_code == 0, printed.output
        assert printed.output.startswith(f"# {PRESETS[name].parameters:,} parameters\nmodel:\n  layers: ")
        model = resolve(ModelSpec.model_validate(yaml.safe_load(printed.output)["model"]))
        assert model == resolve(ModelSpec(hugging_face=(tmp_path / "config.json").read_text()))


def test_what_the_example_says(tmp_path: Path) -> None:
    (job,) = manifest.read(EXAMPLE)
    told = ModelSpec.model_validate(job["spec"]["model"])
    assert told.hugging_face is not None
    (tmp_path / "config.json").write_text(told.hugging_face)
    printed = yaml.safe_load(run(tmp_path).output)["model"]
    assert printed == {
        "layers": 2,
        "hiddenSize": 64,
        "intermediateSize": 192,
        "heads": 4,
        "kvHeads": 2,
        "vocabSize": 320,
        "ropeTheta": 500000,
        "tieEmbeddings": True,
    }


def test_what_is_not_supported_is_rejected_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {**config_from_architecture(PRESETS["llama-2-7b"]), "quantization_config": {"quant_method": "awq"}}
    path.write_text(json.dumps(config))
    refused = run(path)
    assert refused.exit_code == 1
    assert "`quantization_config` is not supported" in refused.output
    assert "(it has 6,738,415,616 parameters)" in refused.output
    path.write_text("{")
    assert "config.json: not valid JSON" in run(path).output
    assert run(tmp_path / "none.json").exit_code == 2
    path.unlink()
    assert "config.json cannot be read" in run(tmp_path).output


@pytest.mark.parametrize(
    ("text", "told"), [('{"model_type": ["x"]}', "must be a string, got ['x']"), ("[" * 100000, "not valid JSON")]
)
def test_what_is_not_a_configuration_is_reported(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    refused = run(path)
    assert refused.exit_code == 1
    assert told in refused.output, refused.exception
