"""The reading and scoring of published runs: broken rows are skipped with a reason, the rest is scored."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

VTRAIN = {
    "gpu": "A100-SXM4-80GB",
    "gpus_per_node": 8,
    "inter_node_gbps": 800,
    "gpus": 64,
    "gbs": 512,
    "hidden": 3072,
    "heads": 32,
    "layers": 30,
    "seq": 2048,
    "tp": 1,
    "dp": 64,
    "pp": 1,
    "mbs": 8,
    "iter_s": 3.6,
}
SAILOR = {
    "model": "OPT-350M",
    "hidden": 1024,
    "layers": 24,
    "heads": 16,
    "seq": 2048,
    "vocab": 50272,
    "cluster": "clariden",
    "gpu": "GH-96",
    "gpus": 8,
    "pp": 2,
    "tp": 4,
    "dp": 1,
    "mbs": 8,
    "gbs": 32,
    "layers_per_stage_incl_embed_head": [12, 14],
    "iter_s": 0.657,
    "max_mem_bytes": 26942000000,
}
TITAN = {
    "gpu": "H100 96GB HBM2e (2.4 TB/s, 500 W)",
    "nic_gbps_per_gpu": 400,
    "zero": 3,
    "model": "8B",
    "gpus": 8,
    "fsdp": 8,
    "tp": 1,
    "lbs": 2,
    "seq": 8192,
    "recompute": "selective",
    "variant": "bf16 compile",
    "tok_s_per_gpu": 6667,
    "mem_gib": 77.0,
}


NANOTRON = {
    "gpu": "H100-SXM5-80GB",
    "model": "1.34B",
    "gpus": 512,
    "seq": 4096,
    "vocab": 131072,
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "ffn": 8192,
    "dp": 128,
    "tp": 2,
    "pp": 2,
    "mbs": 2,
    "grad_accum": 1,
    "gbs_seqs": 256,
    "zero": 1,
    "mfu_pct": 5.25,
    "mem_gb": 8.4,
}


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("planner_accuracy")


def run(accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, tables: list[dict[str, Any]]) -> Any:
    """The JSON that the benchmark writes for a data file."""
    data, out = folder / "runs.json", folder / "out.json"
    data.write_text(json.dumps({"tables": tables}))
    monkeypatch.setattr(sys, "argv", ["planner_accuracy.py", "--data", str(data), "--json", str(out)])
    accuracy.main()
    return json.loads(out.read_text())


def test_rows_are_scored_as_they_come(
    accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ["gpus", "gbs", "mbs", "hidden", "heads", "layers", "seq", "tp", "dp", "pp", "iter_ms"]
    single = {"id": "vtrain_single_node", "columns": columns, "data": [[2, 8, 4, 1024, 16, 20, 1024, 2, 1, 1, 143.8]]}
    rows = [VTRAIN, {**VTRAIN, "mbs": 4, "iter_s": 3.7}, without(VTRAIN, "hidden"), {**VTRAIN, "gbs": 1000}]
    tables = [
        {"id": "vtrain_multi_node", "rows": [*rows, without(VTRAIN, "gpu", "inter_node_gbps", "gpus_per_node")]},
        single,
        {"id": "sailor_validation", "rows": [SAILOR, {**SAILOR, "cluster": "mit"}]},
        {"id": "torchtitan_202412_h100", "rows": [TITAN, without(TITAN, "mem_gib"), {**TITAN, "model": "9B"}]},
        {"id": "planner_reported_accuracy", "rows": [{"planner": "Alpa"}]},
        {"id": "something_new", "rows": [{}]},
    ]
    found = run(accuracy, monkeypatch, tmp_path, tables)
    counts = {name: table["rows"] for name, table in found["tables"].items()}
    assert counts == {
        "vtrain_multi_node": 3,
        "vtrain_single_node": 1,
        "sailor_validation": 1,
        "torchtitan_202412_h100": 2,
    }
    assert found["tables"]["vtrain_multi_node"]["choices"] == 1
    for key in ("memory_error_mean", "time_error_lomo_vtrain", "time_error_mean"):
        assert 0.0 <= found[key] < 0.3
    assert 0.0 <= found["memory_underestimate_max"] < 0.1
    said = capsys.readouterr().out
    assert "skipped 2 rows of vtrain_multi_node: batch 1000 does not divide by 512, missing 'hidden'" in said
    assert "unknown model '9B'" in said
    assert "table something_new is not known" in said


def test_a_table_alone_leaves_the_other_figures_empty(
    accuracy: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = run(accuracy, monkeypatch, tmp_path, [{"id": "vtrain_multi_node", "rows": [VTRAIN]}])
    assert found["memory_error_mean"] is None
    assert found["memory_underestimate_max"] is None
    assert found["time_error_mean"] is None
    assert found["regret_mean"] is None


def test_a_model_is_estimated_with_constants_that_never_saw_it(accuracy: ModuleType) -> None:
    published = importlib.import_module("_published")
    case = published.vtrain_multi(VTRAIN)
    held_out = {case.pair: {case.model: [2.0, 1.0, 1.0], "other": [9.0, 1.0, 1.0]}}
    assert accuracy.constants_of(case, held_out).compute == 2.0
    new = published.vtrain_multi({**VTRAIN, "hidden": 4096})
    shipped = accuracy.constants_for(*case.pair.split("/"))
    assert accuracy.constants_of(new, held_out) == shipped


def test_what_ships_is_what_the_fit_found(accuracy: ModuleType) -> None:
    # Every pair whose held-out constants are committed ships constants of its own, within the spread of the held-out.
    held_out = json.loads((BENCHMARKS / "planner_constants.json").read_text())
    for pair, models in held_out.items():
        gpu, runtime = pair.split("/")
        shipped = accuracy.constants_for(gpu, runtime)
        low, high = (bound(values[0] for values in models.values()) for bound in (min, max))
        assert 0.9 * low <= shipped.compute <= 1.1 * high


def test_regret_is_measured_time_of_the_pick(accuracy: ModuleType) -> None:
    published = importlib.import_module("_published")
    rows = [VTRAIN, {**VTRAIN, "tp": 2, "dp": 32, "iter_s": 4.0}, {**VTRAIN, "tp": 4, "dp": 16, "iter_s": 3.0}]
    cases = [published.vtrain_multi(row) for row in rows]
    guesses = {id(case): guess for case, guess in zip(cases, (1.0, 2.0, 3.0), strict=True)}
    assert accuracy._regret(cases, guesses) == {"regret": pytest.approx(0.2), "choices": 1.0}


def test_nanotron_gives_a_stage_the_layer_that_exceeds_its_part(accuracy: ModuleType) -> None:
    # A head of 131,072 x 2,048 weighs as much as four layers: ten would be half, and the eleventh still belongs to it.
    published = importlib.import_module("_published_llama")
    case = published.nanotron(NANOTRON)
    assert case.strategy.layer_split == (11, 5)
    assert case.work.model.tie_embeddings
    wide = {**NANOTRON, "layers": 32, "hidden": 4096, "ffn": 14336, "dp": 2, "tp": 1, "pp": 4}
    case = published.nanotron(wide)
    assert case.strategy.layer_split == (9, 9, 8, 6)
    assert not case.work.model.tie_embeddings
    assert published.nanotron({**NANOTRON, "pp": 1, "dp": 256}).strategy.layer_split is None


def test_memory_is_that_of_the_stage_that_was_measured(accuracy: ModuleType) -> None:
    # The last stage would need its logits too; only the first one's memory was written down.
    published = importlib.import_module("_published_llama")
    case = published.nanotron(NANOTRON)
    assert case.stage == 0
    assert accuracy.memory_of(case) == pytest.approx(case.memory, rel=0.02)
    assert accuracy.memory_of(replace(case, stage=None)) > 1.2 * case.memory
