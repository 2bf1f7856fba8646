"""`meshwright validate`: problems, the fields and fixes that it names, and exit codes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from meshwright.api.parsing import parse_spec
from meshwright.crd.manifest_check import check_manifest, spec_schema
from meshwright.crd.schema_check import CHOICE, FORMS
from meshwright.rules.validation import check_spec
from meshwright_cli.main import main

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {
    "apiVersion": "meshwright.dev/v1alpha1",
    "kind": "ParallelTrainingJob",
    "metadata": {"name": "train"},
    "spec": {
        "model": {"layers": 2, "hiddenSize": 64, "intermediateSize": 192, "heads": 4, "vocabSize": 257},
        "data": {"source": "PythonStdlib"},
        "training": {"steps": 20, "globalBatchSize": 8, "sequenceLength": 64},
        "workers": {"image": "worker:1", "gpusPerWorker": 1},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The valid job with another value at a dotted path; None removes the field."""
    out = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    holder: Any = out
    for name in parents:
        holder = holder.setdefault(name, {})
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    return out


MISTAKES: list[tuple[str, Any, str, str]] = [
    ("spec.replicas", "2", "spec.replicas", 'must be an integer, got a string ("2"): write 2'),
    ("spec.replicas", 2.5, "spec.replicas", "must be an integer, got a number (2.5)"),
    ("spec.replicas", 0, "spec.replicas", "must be at least 1, got 0"),
    ("spec.training.sequenceLength", 4, "spec.training.sequenceLength", "must be at least 8, got 4"),
    ("spec.training.optimizer", {"learningRate": 0}, "spec.training.optimizer.learningRate", "must be greater than 0"),
    ("metadata.name", "x" * 70, "metadata.name", f"at most 43 characters, .*write `{'x' * 43}`"),
    ("metadata.name", "my_job", "metadata.name", "write `my-job`"),
    ("metadata.name", "2nd-run", "metadata.name", "write `nd-run`"),
    ("metadata.name", None, "metadata.name", "is missing"),
    ("metadata.labels", {"team": 7}, "metadata.labels[team]", 'must be a string, got an integer (7): write "7"'),
    ("metadata.labels", {"team": "a b"}, "metadata.labels[team]", "must be at most 63 letters"),
    ("apiVersion", "meshwright.dev/v1", "apiVersion", "must be `meshwright.dev/v1alpha1`"),
    ("kind", "ParallelTrainingjob", "kind", "must be `ParallelTrainingJob`"),
    ("spec", None, "spec", "is missing"),
    ("spec.workers", None, "spec.workers", "is missing"),
    ("spec.workers.image", None, "spec.workers.image", "is missing"),
    ("spec.workers.image", "", "spec.workers.image", "must not be empty"),
    (
        "spec.workers.image",
        "worker 0.1.0",
        "spec.workers.image",
        "without spaces, got `worker 0.1.0`",
    ),
    ("spec.data", {"claimName": "My_Text"}, "spec.data.claimName", "got `My_Text`: write `my-text`"),
    ("spec.checkpoint", {"claimName": "Runs"}, "spec.checkpoint.claimName", "write `runs`"),
    ("spec.workers.imagePullPolicy", "always", "spec.workers.imagePullPolicy", "did you mean `Always`?"),
    ("spec.workers.gpuResource", "gpu", "spec.workers.gpuResource", "such as `nvidia.com/gpu`, got `gpu`"),
    ("spec.workers.resources", {"memory": "8GB"}, "spec.workers.resources.memory", "got `8GB`: write `8G`"),
    ("spec.workers.resources", {"memory": "8 gib"}, "spec.workers.resources.memory", "write `8Gi`"),
    ("spec.workers.resources", {"memory": "much"}, "spec.workers.resources.memory", "such as `64Gi`"),
    ("spec.workers.tolerations", [{"effect": "noschedule"}], "spec.workers.tolerations[0].effect", "`NoSchedule`"),
    ("spec.checkpoint", {"claimName": "c", "every": "10 min"}, "spec.checkpoint.every", "write `10m`"),
    ("spec.checkpoint", {"uri": "/runs"}, "spec.checkpoint.uri", "must be a URI, such as `s3://bucket/prefix`"),
    *[
        ("spec.checkpoint", {"claimName": "c", "resumeFrom": uri}, "spec.checkpoint.resumeFrom", "a URI with a bucket")
        for uri in ("s3://", "s3a:///base-0a1b2c3d", "gs:///base-0a1b2c3d")
    ],
    ("spec.workers.nodeSelector", {"gpu": True}, "spec.workers.nodeSelector.gpu", 'write "true"'),
    ("spec.workers.volumes", "data", "spec.workers.volumes", 'must be a list, got a string ("data")'),
    (
        "spec.workers.env",
        [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
        "spec.workers.env[1]",
        "is there twice: name `A`",
    ),
    ("spec.workers.command", "python 'a b.py'", "spec.workers.command", "did you mean `spec.runtime.command`?"),
    ("spec.image", "a", "spec.image", "did you mean `spec.workers.image`?"),
    ("spec.training.learning_rate", 1, "spec.training.learning_rate", "`spec.training.optimizer.learningRate`"),
    ("spec.training.lr_scheduler_type", "linear", "spec.training.lr_scheduler_type", "`spec.training.optimizer.decay`"),
    (
        "spec.training.resume_from_checkpoint",
        "a",
        "spec.training.resume_from_checkpoint",
        "`spec.checkpoint.resumeFrom`",
    ),
    ("spec.training.optimizer", {"decay": "linear"}, "spec.training.optimizer.decay", "did you mean `Linear`?"),
    (
        "spec.training.optimizer",
        {"decaySteps": 100},
        "spec.training.optimizer.decaySteps",
        "plus `training.optimizer.warmupSteps: 0` must be at most `training.steps: 20`; got 100, nearest: 20",
    ),
    ("spec.training.sequence_length", 8, "spec.training.sequence_length", "write `sequenceLength`"),
    ("spec.training.epochs", 8, "spec.training.epochs", "did you mean `spec.training.steps`?"),
    ("spec.training.optimizer", "adamw", "spec.training.optimizer", "its fields are beta1, beta2, "),
    ("spec.workers.env", [{"name": "A", "value": 1}], "spec.workers.env[0].value", 'write "1"'),
    ("spec.model.layres", 3, "spec.model.layres", "did you mean `layers`?"),
    ("spec.model", {"preset": "llama-3-8"}, "spec.model", "did you mean `llama-3-8b`"),
    ("spec.model.heads", 5, "spec.model.hiddenSize", "`model.heads: 5`, .*; got 64, nearest: 60, 70"),
    ("spec.replicas", 3, "spec.training.globalBatchSize", "`replicas: 3`, .*; got 8, nearest: 6, 9"),
    ("spec.parallelism", {"tensor": 2}, "spec.parallelism.tensor", "`model.vocabSize: 257`, .*; got 2, nearest: 1"),
    ("spec.data.source", "PythonStdLib", "spec.data.source", "did you mean `PythonStdlib`?"),
    ("spec.parallelism", {"schedule": "OneFOneB"}, "spec.parallelism.schedule", "unknown value `OneFOneB`"),
    ("spec.suspend", "yes", "spec.suspend", 'must be true or false, got a string ("yes")'),
    ("specs", {}, "specs", "did you mean `spec`?"),
]


@pytest.mark.parametrize(
    ("path", "value", "field", "message"), MISTAKES, ids=[f"{one[0]}={one[1]!r}"[:48] for one in MISTAKES]
)
def test_a_mistake_is_named_with_field_and_fix(path: str, value: Any, field: str, message: str) -> None:
    problems = check_manifest(changed(path, value))
    assert [problem.field for problem in problems] == [field]
    if ".*" in message:
        start, end = message.split(".*")
        assert start in problems[0].message
        assert problems[0].message.endswith(end)
    else:
        assert message in problems[0].message


def test_a_command_in_one_string_is_divided_into_words() -> None:
    job = changed("spec.runtime", {"command": "python 'my file.py' --lr 1"})
    problem = next(problem for problem in check_manifest(job) if problem.field == "spec.runtime.command")
    assert problem.message.endswith(': write ["python", "my file.py", "--lr", "1"]')


@pytest.mark.parametrize(("length", "values"), [(2048, "; got 1024, nearest: 2048"), (8192, "; got 1024")])
def test_rotary_positions_are_no_fix_of_a_short_table(length: int, values: str) -> None:
    job = changed("spec.model", {"preset": "gpt2"})
    job["spec"]["training"]["sequenceLength"] = length
    (problem,) = check_manifest(job)
    assert problem.field == "spec.model.positions"
    assert problem.message.endswith(f"because each position of a sequence needs a row{values}")


def test_a_pattern_that_is_no_expression_is_named_with_its_field() -> None:
    job = changed("spec.runtime", {"command": ["python", "t.py"], "progress": {"patterns": ["step (?P<step>"]}})
    (problem,) = check_manifest(job)
    assert problem.field == "spec.runtime.progress.patterns"
    assert problem.message.startswith("pattern 0 (`step (?P<step>`) is not a regular expression: ")


def test_numbers_of_a_preset_are_shown_and_the_value_that_works_for_all_rules_of_a_field() -> None:
    job = changed("spec.model", {"preset": "llama-3-8b"})
    job["spec"]["parallelism"] = {"tensor": 64}
    messages = [problem.message for problem in check_manifest(job) if problem.field == "spec.parallelism.tensor"]
    assert any("`model.heads: 32`" in message for message in messages)
    assert all(message.endswith("; got 64, nearest: 8") for message in messages)


def patterns(schema: Any) -> list[str]:
    """All patterns of a schema."""
    if isinstance(schema, list):
        return [found for part in schema for found in patterns(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    return own + [found for part in schema.values() for found in patterns(part)]


def test_patterns_of_the_schema_are_said_in_words() -> None:
    """A pattern without words would be shown as a regular expression."""
    without = [one for one in patterns(spec_schema()) if one not in FORMS and not CHOICE.fullmatch(one)]
    assert without == [], "add words to `FORMS`"


def test_all_mistakes_of_a_job_are_listed() -> None:
    job = changed("spec.replicas", "2")
    job["metadata"]["name"] = "my_job"
    job["spec"]["training"]["stepz"] = 1
    fields = [problem.field for problem in check_manifest(job)]
    assert sorted(fields) == ["metadata.name", "spec.replicas", "spec.training.stepz"]


def validate(*words: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["validate", *map(str, words)], input=stdin)


def test_every_example_is_valid() -> None:
    files = sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("examples/*/job.yaml")])
    result = validate(*files)
    assert result.exit_code == 0, result.output
    assert f"{ROOT}/examples/ten-line.yaml: ParallelTrainingJob ten-line: valid\n" in result.output
    assert "/stdlib-lm.yaml: PersistentVolumeClaim stdlib-lm-checkpoints: not checked\n" in result.output


def test_exit_codes_text_and_json(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump_all([GOOD, changed("spec.replicas", "2")]))
    result = validate(bad)
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        f"{bad}: ParallelTrainingJob train: valid",
        f'{bad}: ParallelTrainingJob train: spec.replicas: must be an integer, got a string ("2"): write 2',
    ]
    found = json.loads(validate("-o", "json", bad).output)
    assert [one["valid"] for one in found] == [True, False]
    assert found[1]["problems"] == [
        {"field": "spec.replicas", "message": 'must be an integer, got a string ("2"): write 2'}
    ]
    assert validate("-f", bad).output == result.output
    assert validate(bad, "-f", bad, "--filename", bad).output == 3 * result.output
    assert validate().exit_code == 2
    assert validate(tmp_path / "no.yaml").exit_code == 1
    assert "No such file or directory" in validate(tmp_path / "no.yaml").output
    assert validate("-", stdin=yaml.safe_dump(GOOD)).output == "(standard input): ParallelTrainingJob train: valid\n"


def test_a_likely_mistake_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(changed("spec.training.lora", {"rank": 8})))
    result = validate(file)
    assert result.exit_code == 0
    valid, warning = result.output.splitlines()
    assert valid == f"{file}: ParallelTrainingJob train: valid"
    says = "trains adapters of random weights, because `training.initialWeights` is not set"
    assert warning.startswith(f"{file}: ParallelTrainingJob train: warning: spec.training.lora: {says}")
    (found,) = json.loads(validate("-o", "json", file).output)
    assert found["valid"]
    assert [one["field"] for one in found["warnings"]] == ["spec.training.lora"]


def test_what_an_earlier_version_stored_is_still_read() -> None:
    """A schema became stricter about names: the API server accepts unchanged values, and so does the operator."""
    stored = changed("spec.data", {"claimName": "Text"})
    stored["spec"]["workers"]["image"] = "worker latest"
    assert {problem.field for problem in check_manifest(stored)} == {"spec.data.claimName", "spec.workers.image"}
    spec = parse_spec(stored)
    assert (spec.data and spec.data.claim_name, spec.workers.image) == ("Text", "worker latest")
    assert check_spec(spec) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no object"),
        ("a: [", "not valid YAML"),
        ("kind: A\nkind: B\n", "key `kind` is there twice"),
        ("- 1", "must be a Kubernetes object"),
        ("kind: ConfigMap", "apiVersion: is missing"),
        ("{apiVersion: v1, kind: List, items: [{kind: ParallelTrainingJob}]}", "apiVersion: must be"),
    ],
)
def test_files_that_are_no_manifests(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    result = validate(file)
    assert result.exit_code == 1
    assert says in result.output


@pytest.mark.parametrize("path", ["spec.replicas", "metadata.name", "apiVersion"])
def test_plan_refuses_what_the_cluster_refuses(tmp_path: Path, path: str) -> None:
    file = tmp_path / "job.yaml"
    job = changed(path, {"spec.replicas": "2", "metadata.name": "my_job", "apiVersion": "meshwright.dev/v1"}[path])
    file.write_text(yaml.safe_dump(job))
    result = CliRunner().invoke(main, ["plan", "-f", str(file)])
    assert result.exit_code == 1
    assert f"{path}: must be" in result.output


def test_words_that_kubectl_reads_as_true_or_false_are_not_strings(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = (
        "apiVersion: meshwright.dev/v1alpha1\nkind: ParallelTrainingJob\nmetadata: {name: a}\nspec:\n"
        "  runtime: {command: [python, -n, yes.py]}\n"
        "  workers: {image: w, gpusPerWorker: 1, env: [{name: N, value: 'y'}, {name: NO, value: on}]}\n"
    )
    path.write_text(text)
    result = CliRunner().invoke(main, ["validate", str(path)])
    assert result.exit_code == 1
    for field, words in (("env[0].name", "n, no, off and false"), ("env[1].value", "y, yes, on and true")):
        assert f"spec.workers.{field}: must be a string, got true or false" in result.output
        assert f"or the word in the file in quotes: YAML reads {words} alike" in result.output
    path.write_text(text.replace(": N,", ": 'N',").replace("NO", "'NO'").replace(": on}", ": 'on'}"))
    assert CliRunner().invoke(main, ["validate", str(path)]).exit_code == 0


def test_numbers_dates_and_merges_are_those_of_kubectl(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "apiVersion: meshwright.dev/v1alpha1\nkind: ParallelTrainingJob\n"
        "metadata: {name: a, labels: {begun: 2026-01-02}}\nspec:\n"
        "  model: {layers: 2, hiddenSize: 64, intermediateSize: 192, heads: 4, vocabSize: 257}\n"
        "  data: {source: PythonStdlib}\n"
        "  training:\n"
        "    {steps: 2e1, globalBatchSize: 8, sequenceLength: 64, optimizer: {learningRate: 3e-4}}\n"
        "  workers: {<<: {image: w}, gpusPerWorker: 1, env: [{name: AT, value: 12:30:00}]}\n"
    )
    for command in ("validate", "plan"):
        result = CliRunner().invoke(main, [command, str(path)])
        assert result.exit_code == 0, result.output
