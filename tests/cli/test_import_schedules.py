"""Learning-rate schedules in the files of other frameworks: read, written, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from meshwright.api.training import OptimizerSpec
from meshwright_cli.main import main
from tests.cli.test_import import JOB, TITAN, imported

STEPS = 500
NAMES = {"megatron-lm": "train.sh", "torchtitan": "titan.sh", "deepspeed": "ds.json", "nanotron": "nanotron.yaml"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "linear": {"decay": "Linear"},
    "root": {"decay": "SquareRoot"},
    "constant": {"decay": "Constant"},
    "inverse": {"decay": "InverseSquareRoot"},
    "stable-cosine": {"decaySteps": 70},
    "stable-linear": {"decay": "Linear", "decaySteps": 70},
    "stable-root": {"decay": "SquareRoot", "decaySteps": 70},
}


def plan_for(framework: str, path: Path, optimizer: dict[str, Any]) -> dict[str, Any]:
    """What `meshwright plan --for` prints about a job with a schedule."""
    spec: dict[str, Any] = {**JOB["spec"]} if isinstance(JOB["spec"], dict) else {}
    spec["training"] = {**spec["training"], "activationCheckpointing": "Full", "optimizer": optimizer}
    if framework == "torchtitan":
        spec |= {"model": {"preset": "llama-3.1-8b"}, "parallelism": {**spec["parallelism"], "zeroStage": 3}}
    if framework == "deepspeed":
        spec |= {"replicas": 16, "parallelism": {"tensor": 1, "pipeline": 1, "zeroStage": 1}}
    path.write_text(yaml.safe_dump({**JOB, "spec": spec}))
    result = CliRunner().invoke(main, ["plan", "-f", str(path), "--for", framework, "-o", "json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def optimizer_of(schedule: dict[str, Any], warm_up: int = 10) -> dict[str, Any]:
    return {"learningRate": 0.001, "warmupSteps": warm_up, **schedule}


def flags(found: dict[str, Any]) -> dict[str, str]:
    words = found["command"]
    return {one: other for one, other in zip(words, words[1:], strict=False) if one.startswith("--")}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_megatron_writes_every_schedule_and_reads_it_back(tmp_path: Path, schedule: str) -> None:
    stated = optimizer_of(SCHEDULES[schedule])
    found = plan_for("megatron-lm", tmp_path / "job.yaml", stated)
    assert not any("decay" in note for note in found["notes"])
    comments, spec = imported(tmp_path / "train.sh", " ".join(found["command"]), "--gpus", 16)
    assert not any("--lr" in comment for comment in comments)
    back = OptimizerSpec.model_validate(spec["training"]["optimizer"])
    assert rates_of(back) == rates_of(OptimizerSpec.model_validate(stated))


def rates_of(spec: OptimizerSpec) -> tuple[object, ...]:
    """What determines the rates."""
    start = spec.decay_start(STEPS) if spec.decay_or_default.has_end else None
    return spec.learning_rate, spec.min_learning_rate, spec.warmup_steps, spec.decay_or_default, start


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("cosine", "--lr-decay-style cosine"),
        ("inverse", "--lr-decay-style inverse-square-root"),
        ("root", "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 490"),
        ("stable-linear", "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 70"),
    ],
)
def test_flags_of_megatron(tmp_path: Path, schedule: str, words: str) -> None:
    found = plan_for("megatron-lm", tmp_path / "job.yaml", optimizer_of(SCHEDULES[schedule]))
    assert f" {words} --lr-warmup-iters 10 " in " ".join(found["command"])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warm_up", [0, 10])
def test_torchtitan_writes_what_ends_with_the_run(tmp_path: Path, schedule: str, warm_up: int) -> None:
    if schedule == "inverse":
        warm_up = 10
    stated = optimizer_of(SCHEDULES[schedule], warm_up)
    found = plan_for("torchtitan", tmp_path / "job.yaml", stated)
    notes = [note for note in found["notes"] if "decay" in note]
    written = flags(found)
    assert written["--lr_scheduler.warmup_steps"] == str(warm_up)
    if schedule == "inverse":
        assert notes == [
            "no equivalent: spec.training.optimizer.decay InverseSquareRoot: set the schedule in the framework"
        ]
        assert "--lr_scheduler.decay_ratio" not in written
        return
    assert notes == []
    section = {name.removeprefix("--lr_scheduler."): value for name, value in written.items() if "lr_scheduler" in name}
    lines = [f"{name} = {json.dumps(value) if name == 'decay_type' else value}" for name, value in section.items()]
    text = TITAN.replace("steps = 1000", f"steps = {STEPS}").replace("lr = 3e-4", "lr = 0.001")
    comments, spec = imported(tmp_path / "titan.toml", text + "\n".join(["[lr_scheduler]", *lines]), "--gpus", 32)
    assert not any("lr_scheduler" in comment for comment in comments)
    back = OptimizerSpec.model_validate(spec["training"]["optimizer"])
    assert rates_of(back) == rates_of(OptimizerSpec.model_validate(stated))


def test_torchtitans_own_defaults_and_what_it_shortens(tmp_path: Path) -> None:
    _, spec = imported(tmp_path / "a.toml", TITAN, "--gpus", 32)
    assert spec["training"]["optimizer"] == {"learningRate": 3e-4, "warmupSteps": 200, "decay": "Linear"}
    longer = f'{TITAN}\n[lr_scheduler]\ndecay_ratio = 0.9\ndecay_type = "sqrt"\nlr_min = 0.5\n'
    _, spec = imported(tmp_path / "b.toml", longer, "--gpus", 32)
    assert spec["training"]["optimizer"] == {
        "learningRate": 3e-4,
        "minLearningRate": 1.5e-4,
        "warmupSteps": 200,
        "decay": "SquareRoot",
    }
    comments, spec = imported(tmp_path / "c.toml", f'{TITAN}\n[lr_scheduler]\ndecay_type = "step"\n', "--gpus", 32)
    assert "no equivalent: lr_scheduler.decay_type" in comments
    assert "decay" not in spec["training"]["optimizer"]


@pytest.mark.parametrize(
    ("schedule", "warm_up", "floor", "kind", "notes"),
    [
        ("cosine", 10, 1e-4, "WarmupCosineLR", []),
        ("cosine", 0, 1e-4, "WarmupCosineLR", []),
        ("linear", 10, 0.0, "WarmupDecayLR", []),
        ("linear", 10, 1e-4, "WarmupDecayLR", ["the warm-up of WarmupDecayLR begins at minLearningRate, not at 0"]),
        ("linear", 0, 0.0, "WarmupDecayLR", ["WarmupDecayLR warms up for at least 2 steps"]),
        ("constant", 10, 0.0, "WarmupLR", []),
        ("constant", 0, 0.0, None, []),
        ("root", 10, 0.0, None, ["decay SquareRoot"]),
        ("inverse", 10, 0.0, None, ["decay InverseSquareRoot"]),
        ("stable-linear", 10, 0.0, None, ["decay Linear and decaySteps 70"]),
        ("stable-cosine", 10, 0.0, None, ["decaySteps 70"]),
    ],
)
def test_schedulers_of_deepspeed(
    tmp_path: Path, schedule: str, warm_up: int, floor: float, kind: str | None, notes: list[str]
) -> None:
    stated = {**optimizer_of(SCHEDULES[schedule], warm_up), "minLearningRate": floor}
    found = plan_for("deepspeed", tmp_path / "job.yaml", stated)
    config = found["files"]["ds_config.json"]
    scheduler = json.loads(config).get("scheduler")
    assert (scheduler["type"] if scheduler else None) == kind
    told = [note for note in found["notes"] if "ecay" in note]
    assert len(told) == len(notes)
    assert all(note in one for note, one in zip(notes, told, strict=True))
    if kind is None:
        return
    assert scheduler["params"]["warmup_type"] == "linear", "its default is a logarithmic curve"
    comments, spec = imported(tmp_path / "ds.json", config)
    assert not any("scheduler" in comment or "logarithmic" in comment for comment in comments)
    back, own = OptimizerSpec.model_validate(spec["training"]["optimizer"]), OptimizerSpec.model_validate(stated)
    expected = rates_of(own.model_copy(update={"warmup_steps": max(1, warm_up)}) if kind == "WarmupDecayLR" else own)
    assert rates_of(back) == expected


def test_what_a_job_has_not_of_deepspeeds_schedulers_is_named(tmp_path: Path) -> None:
    params = {"warmup_num_steps": 5, "warmup_min_lr": 1e-5, "warmup_max_lr": 2e-4}
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    config["scheduler"] = {"type": "WarmupLR", "params": params}
    comments, spec = imported(tmp_path / "ds.json", json.dumps(config), "--gpus", 1)
    assert "no equivalent: scheduler.params.warmup_min_lr" in comments
    assert "the warm-up of WarmupLR is logarithmic, and that of a job linear" in comments
    optimizer = spec["training"]["optimizer"]
    assert (optimizer["learningRate"], optimizer["warmupSteps"], optimizer["decay"]) == (2e-4, 5, "Constant")
    config["scheduler"] = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}
    comments, spec = imported(tmp_path / "ds.json", json.dumps(config), "--gpus", 1)
    assert {"no equivalent: scheduler.type", "no equivalent: scheduler.params.cycle_min_lr"} <= set(comments)
    assert "decay" not in spec["training"]["optimizer"]


@pytest.mark.parametrize(
    ("schedule", "written"),
    [
        ("cosine", {"lr_decay_style": "cosine", "lr_decay_steps": 490}),
        ("root", {"lr_decay_style": "1-sqrt", "lr_decay_steps": 490}),
        ("constant", {"lr_decay_style": "linear", "lr_decay_steps": 1, "lr_decay_starting_step": 500}),
        ("stable-linear", {"lr_decay_style": "linear", "lr_decay_steps": 70, "lr_decay_starting_step": 430}),
        ("inverse", {}),
    ],
)
def test_keys_of_nanotron(tmp_path: Path, schedule: str, written: dict[str, object]) -> None:
    found = plan_for("nanotron", tmp_path / "job.yaml", optimizer_of(SCHEDULES[schedule]))
    section = yaml.safe_load(found["files"]["nanotron.yaml"])["optimizer"]["learning_rate_scheduler"]
    assert {name: value for name, value in section.items() if "decay" in name and name != "min_decay_lr"} == written
    assert any("InverseSquareRoot" in note for note in found["notes"]) == (schedule == "inverse")


@pytest.mark.parametrize(
    ("arguments", "optimizer", "missing"),
    [
        ("", {"decay": "Linear"}, []),
        ("--lr-decay-style constant", {"decay": "Constant"}, []),
        ("--lr-decay-style inverse-square-root", {"decay": "InverseSquareRoot", "warmupSteps": 1}, []),
        ("--lr-decay-style cosine --lr-decay-iters 100", {}, []),
        ("--lr-decay-style cosine --lr-decay-iters 90", {}, ["--lr-decay-iters"]),
        (
            "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 20 --lr-warmup-iters 5",
            {"decay": "SquareRoot", "decaySteps": 20, "warmupSteps": 5},
            [],
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-style exponential --lr-wsd-decay-iters 20",
            {"decaySteps": 20},
            ["--lr-decay-style", "--lr-wsd-decay-style"],
        ),
    ],
)
def test_schedules_of_megatrons_scripts(
    tmp_path: Path, arguments: str, optimizer: dict[str, object], missing: list[str]
) -> None:
    text = f"torchrun pretrain_gpt.py --num-layers 2 --train-iters 100 --adam-beta2 0.99 {arguments}"
    comments, spec = imported(tmp_path / "train.sh", text)
    found = {name: spec["training"]["optimizer"].get(name) for name in ("decay", "decaySteps", "warmupSteps")}
    assert {name: value for name, value in found.items() if value is not None} == optimizer
    named = [comment.removeprefix("no equivalent: ") for comment in comments if "--lr" in comment]
    assert named == missing
