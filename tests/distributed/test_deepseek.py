"""A DeepSeek-V3 in small: the same model from a preset, from fields and from a published configuration, trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.api.model import ModelSpec
from meshwright.models.huggingface.reader import architecture_from_config
from meshwright.models.huggingface.registry import config_from_architecture
from meshwright.models.presets import resolve
from meshwright.protocol.run_config import NativeRun
from tests.distributed.cases import train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

FIELDS: dict[str, Any] = {
    "layers": 4,
    "hiddenSize": 128,
    "intermediateSize": 384,
    "heads": 4,
    "vocabSize": 320,
    "normEpsilon": 1e-6,
    "headSize": 32,
    "latent": {"kvRank": 64, "ropeSize": 16, "queryRank": 48},
    "mixture": {
        "experts": 16,
        "perToken": 4,
        "intermediateSize": 64,
        "sharedIntermediateSize": 64,
        "denseLayers": 1,
        "router": "Sigmoid",
        "groups": 4,
        "groupsPerToken": 2,
        "scaling": 2.5,
        "balancing": "Bias",
        "auxiliaryWeight": 0.0001,
    },
}


def run_of(layout: dict[str, Any]) -> NativeRun:
    run = small_run(**layout, steps=2)
    return run.model_copy(update={"architecture": resolve(ModelSpec(preset="tiny-deepseek"))})


def test_preset_fields_and_published_configuration_are_one_model() -> None:
    preset = resolve(ModelSpec(preset="tiny-deepseek")).model_copy(update={"name": ""})
    assert resolve(ModelSpec.model_validate(FIELDS)) == preset
    assert architecture_from_config(config_from_architecture(preset)) == preset


@pytest.mark.parametrize(
    "layout",
    mostly_long(
        [{"tensor": 2, "data": 2, "expert": 2}, {"pipeline": 2, "data": 2, "expert": 2, "zero": 2}],
        lambda layout: "pipeline" in layout,
    ),
    ids=str,
)
def test_the_worker_trains_it_in_every_dimension(pool: RankPool, text: Path, layout: dict[str, Any]) -> None:
    ((_, alone),) = pool.run(train_fully, run_of({}), data_dir=text)
    want = [report.loss for report in alone.reports]
    for _, recorder in pool.run(train_fully, run_of(layout), data_dir=text):
        assert [report.loss for report in recorder.reports] == pytest.approx(want, rel=1e-5)
        for got, wanted in zip(recorder.reports, alone.reports, strict=True):
            assert [load.layer for load in got.experts] == [1, 2, 3]
            assert [load.imbalance for load in got.experts] == pytest.approx(
                [load.imbalance for load in wanted.experts], rel=1e-6
            )
