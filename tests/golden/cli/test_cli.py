"""The command line: help, flags, JSON and text, exit codes. Commands run in an empty folder, with relative paths."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from meshwright_cli.main import main
from meshwright_operator.settings import Address, parse
from tests.golden.files import RECORD, ROOT, check, check_sample
from tests.golden.planner.clusters import CLUSTERS
from tests.golden.planner.jobs import job

EXAMPLES = Path(__file__).parents[3] / "examples"
TEXT = {"reasons", "reason", "change", "sentence", "summary", "notes", "warnings", "pending"}
"""Fields of `meshwright plan -o json` that hold sentences."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below a group with its path, groups too."""
    context = click.Context(group, help_option_names=["-h", "--help"])
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


def test_help() -> None:
    paths = [(), *(path for path, _ in commands(main))]
    shown = [f"$ meshwright {' '.join((*path, '--help'))}\n{_output(*path, '--help')[1]}" for path in paths]
    check("cli/help.txt", "\n".join(shown))


def test_flags() -> None:
    found = {" ".join(path): [_parameter(one) for one in command.params] for path, command in commands(main)}
    check("cli/flags.jsonl", found)


def _parameter(one: click.Parameter) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": one.type.name}
    if isinstance(one.type, click.Choice):
        kind["choices"] = [str(choice) for choice in one.type.choices]
    if isinstance(one.type, (click.IntRange, click.FloatRange)):
        kind |= {"min": one.type.min, "max": one.type.max}
    if isinstance(one.type, click.Path):
        kind |= {"exists": one.type.exists, "files": one.type.file_okay, "folders": one.type.dir_okay}
    default = one.to_info_dict()["default"]
    if callable(default):  # computed on the machine: what help says of it
        default = getattr(one, "show_default", None)
    return {
        "names": [*one.opts, *one.secondary_opts] if isinstance(one, click.Option) else "argument",
        "default": str(default) if isinstance(default, Path) else default,
        "required": one.required,
        "multiple": one.multiple,
        "flag": isinstance(one, click.Option) and one.is_flag,
        "environment": one.envvar,
        **kind,
    }


def test_flags_of_the_operator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parsers: list[argparse.ArgumentParser] = []
    original: Callable[..., Any] = argparse.ArgumentParser.parse_args

    def spied(self: argparse.ArgumentParser, *words: Any) -> Any:
        parsers.append(self)
        return original(self, *words)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", spied)
    with pytest.raises(SystemExit) as left:
        parse(["--help"], {})
    assert left.value.code == 0
    check("cli/operator-help.txt", capsys.readouterr().out)
    flags = {
        " ".join(action.option_strings): {
            "default": _default(action.default),
            "type": action.type.__name__ if action.type in (int, float) else "text",
            "choices": list(action.choices) if action.choices is not None else None,
            "required": action.required,
        }
        for action in parsers[0]._actions
    }
    check("cli/operator-flags.jsonl", flags)


def _default(value: Any) -> Any:
    """A default as somebody would type it."""
    if value is None or isinstance(value, (str, int, float, list)):
        return value
    return f"{value.host}:{value.port}" if isinstance(value, Address) else str(value)


@pytest.mark.parametrize("program", ["generate", "export"])
def test_help_of_the_workers_programs(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"meshwright_worker.{program}").main()
    assert ended.value.code == 0
    check(f"cli/worker-{program}-help.txt", capsys.readouterr().out)


def _output(*words: str) -> tuple[int, str]:
    """(exit code, stdout and stderr) of a command; the folder it runs in is called FOLDER."""
    result = CliRunner().invoke(main, list(words), terminal_width=80, prog_name="meshwright")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    errors = "".join(f"stderr: {line}\n" for line in result.stderr.splitlines())
    return result.exit_code, re.sub(re.escape(str(Path.cwd())), "FOLDER", result.stdout + errors)


def _transcript(calls: list[tuple[str, ...]]) -> tuple[dict[str, Any], str]:
    """(exit code by command, what was typed and printed)."""
    codes, shown = {}, []
    for words in calls:
        code, output = _output(*words)
        codes[" ".join(words)] = code
        shown.append(f"$ meshwright {' '.join(words)}\n{output}")
    return codes, "\n".join(shown)


def test_version_and_what_is_typed_wrong() -> None:
    assert re.fullmatch(r"meshwright \S+ \(Python \S+\)\n", _output("version")[1])
    wrong = [
        ("trane",),
        ("plan",),
        ("plan", "-f", "none.yaml"),
        ("plan", "-f", "none.yaml", "--objective", "fast"),
        ("plan", "-f", "none.yaml", "--gpus", "0"),
        ("plan", "-f", "none.yaml", "-o", "xml"),
        ("model", "none"),
        ("data", "show", "none"),
        ("data", "verify", "none"),
        ("data", "tokenize", "none", "target"),
        ("data", "tokenize", "none", "target", "--format", "Tokens"),
        ("local", "status", "--directory", "none"),
        ("local", "kubeconfig", "--directory", "none"),
        ("local", "down", "--directory", "none"),
        ("local", "node", "fail", "n", "--directory", "none"),
    ]
    codes, shown = _transcript(wrong)
    check("cli/wrong.json", codes)
    check("cli/wrong.txt", shown)


MODELS: dict[str, Any] = {
    "llama": {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 192, "vocab_size": 320,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "gpt2": {
        "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    },
    "qwen2": {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "mixtral": {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy",
        "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    },
    "mistral with a window": {
        "model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096,
    },
    "unknown": {"model_type": "rwkv"},
    "incomplete": {"model_type": "llama", "num_hidden_layers": 2},
    "a list": [],
}  # fmt: skip


def test_model() -> None:
    found: dict[str, Any] = {}
    shown = []
    for name, config in MODELS.items():
        Path("config.json").write_text(json.dumps(config))
        code, output = _output("model", "config.json")
        found[name] = {"exit": code, "fields": yaml.safe_load(output) if code == 0 else None}
        shown.append(f"# {name}\n{output}")
    check("cli/model.jsonl", found)
    check("cli/model.txt", "\n".join(shown))


def test_data() -> None:
    Path("text").mkdir()
    Path("text/a.txt").write_text("the quick brown fox\n")
    Path("text/b.txt").write_text("naïve café")
    Path("lines").mkdir()
    Path("lines/a.jsonl").write_text('{"body": "hello"}\n{"body": "world"}\n')
    Path("lines/b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "zipped"}\n{"other": 1}\nbroken\n', mtime=0))
    lines = ("--format", "JSONLines", "--field", "body")
    codes, shown = _transcript(
        [
            ("data", "tokenize", "text", "one"),
            ("data", "tokenize", "text", "one"),
            ("data", "tokenize", "text", "two", "--pattern", "*.txt", "--shard-tokens", "8"),
            ("data", "tokenize", "text", "none", "--pattern", "*.md"),
            ("data", "tokenize", "text", "none", "--tokenizer", "BPE"),
            ("data", "tokenize", "lines", "three", *lines, "--pattern", "*.jsonl"),
            ("data", "tokenize", "lines", "broken", *lines),
            ("data", "tokenize", "lines", "four", *lines, "--skip-corrupt"),
            *(("data", "verify", name) for name in ("one", "two", "three", "four", "text")),
            *(("data", "show", name) for name in ("one", "two", "three", "four", "text")),
            ("data", "show", "two", "--start", "6", "--count", "7"),
            ("data", "show", "two", "--start", "600"),
        ]
    )
    two = next(path for path in sorted(Path("two").iterdir()) if path.suffix == ".tokens")
    two.write_bytes(b"x" + two.read_bytes()[1:])
    damaged, said = _transcript([("data", "verify", "two")])
    files = {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for name in ("one", "two", "three", "four")
        for path in sorted(Path(name).iterdir())
    }
    printed = {name: json.loads(_output("data", "show", name, "-o", "json")[1]) for name in ("one", "three", "four")}
    check("cli/data.jsonl", {"exit": codes, "damaged": damaged, "files": files, "json": printed})
    check("cli/data.txt", f"{shown}\n{said}")


PLANS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "assumed": (job("llama-3-8b"), None, ()),
    "assumed GPUs": (job("gpt2", training={"sequenceLength": 1024}), None, ("--gpus", "20", "--gpu", "A100-SXM4-80GB")),
    "what if": (job("llama-3-8b", replicas=4, parallelism={"zeroStage": 2}), "4 h100 nodes", ("--what-if",)),
    "all": (job("llama-3-8b", parallelism={"pipeline": 4}), "h100 racks", ("--every-technique", "--objective", "cost")),
    "holes": (job("llama-3-8b", replicas=4, workers={"gpusPerWorker": 4}), "h100 holes", ("--objective", "robust")),
    "domains": (job("deepseek-v2-lite", replicas=4, workers={"gpusPerWorker": 4}), "nvl72 holes", ()),
    "spares": (job("llama-3-8b", recovery={"spareNodes": 40}), "h100 racks", ()),
    "full": (job("llama-3-8b"), "full", ()),
    "strange": (job("llama-3-8b"), "strange", ()),
    "unknown GPUs": (job("llama-3-8b"), "unknown gpus with memory", ()),
    "unknown GPU": (job("llama-3-8b"), None, ("--gpu", "Abacus")),
    "GPUs and nodes": (job("llama-3-8b"), "full", ("--gpus", "8")),
    "too many GPUs": (job("llama-3-8b"), None, ("--gpus", "1000000")),
    "refused": (job("llama-3-8b", parallelism={"tensor": 3}), "full", ()),
    "no fit": (job("llama-3.1-405b"), "1 h100 node", ()),
    "bad nodes": (job("llama-3-8b"), [{"name": "a", "gpus": 4, "free": 8}], ()),
    "not nodes": (job("llama-3-8b"), "hello", ()),
    "two jobs": ([job("gpt2"), job("gpt2")], "full", ()),
    "no job": ({"kind": "ConfigMap"}, "full", ()),
}


def _planned(words: tuple[str, ...]) -> tuple[int, Any, str]:
    """(exit code, JSON, text) of `meshwright plan` with these words."""
    code, text = _output("plan", *words)
    printed = CliRunner().invoke(main, ["plan", *words, "-o", "json"])
    assert printed.exit_code == code
    return code, json.loads(printed.stdout) if printed.stdout else None, text


def _split(value: Any, sentences: list[Any]) -> Any:
    """The value with every field that holds sentences emptied; they are added to `sentences` in order."""
    if isinstance(value, dict):
        found = {}
        for key, one in value.items():
            if key in TEXT:
                sentences.append(one)
            found[key] = "..." if key in TEXT else _split(one, sentences)
        return found
    return [_split(one, sentences) for one in value] if isinstance(value, list) else value


@pytest.mark.long
def test_plan() -> None:
    found, texts, shown = _plans(PLANS)
    check("cli/plan.jsonl", found)
    check("cli/plan-text.jsonl", texts)
    check("cli/plan.txt", "\n".join(shown))


def test_a_sample_of_the_plans() -> None:
    found, texts, shown = _plans(["full"])
    check_sample("cli/plan.jsonl", found)
    check_sample("cli/plan-text.jsonl", texts)
    recorded = (ROOT / "cli" / "plan.txt").read_text(encoding="utf-8")
    assert os.environ.get(RECORD) == "1" or shown[0] in recorded


def _plans(names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What `meshwright plan` decides, its sentences, and the text that it prints, for these `PLANS`."""
    found: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    shown = []
    for name in names:
        jobs, cluster, flags = PLANS[name]
        documents = jobs if isinstance(jobs, list) else [jobs]
        Path("job.yaml").write_text(yaml.safe_dump_all(documents))
        words: tuple[str, ...] = ("-f", "job.yaml", *flags)
        if cluster is not None:
            known = isinstance(cluster, str) and cluster in CLUSTERS
            Path("nodes.yaml").write_text(yaml.safe_dump(CLUSTERS[cluster] if known else cluster))
            words += ("--inventory", "nodes.yaml")
        code, document, text = _planned(words)
        texts[name] = []
        found[name] = {"exit": code, "json": _split(document, texts[name])}
        shown.append(f"# {name}\n$ meshwright plan {' '.join(words)}\n{text}")
    return found, texts, shown


def test_plans_of_the_examples() -> None:
    found: dict[str, Any] = {}
    shown = []
    for path in sorted(EXAMPLES.glob("*.yaml")):
        Path(path.name).write_text(path.read_text())
        code, document, text = _planned(("-f", path.name, "--gpus", "32"))
        found[path.name] = {"exit": code, "json": _split(document, [])}
        shown.append(f"$ meshwright plan -f {path.name} --gpus 32\n{text}")
    check("cli/examples.jsonl", found)
    check("cli/examples.txt", "\n".join(shown))
