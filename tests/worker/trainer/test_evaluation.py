"""Which samples an evaluation takes, and when it says that it takes some of them several times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.api.data import DataSpec, MixturePart
from meshwright.api.training import EvaluationSpec, TrainingSpec
from meshwright_worker.data.mixture import open_stream
from meshwright_worker.data.sample_assignment import SampleAssignment
from meshwright_worker.trainer.evaluation import Evaluation


def evaluation(root: Path, samples: int, **data: Any) -> Evaluation:
    for name in ("a", "b"):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(10):
            (root / name / f"{number}.txt").write_text("x" * (79 if name == "a" else 159))
    spec = DataSpec(claim_name="v", held_out=0.5, **data)
    stream = open_stream(spec, str(root), 8, 0, held_out=True)
    training = TrainingSpec(steps=10, global_batch_size=8, sequence_length=8)
    return Evaluation(EvaluationSpec(samples=samples), training, spec, stream)


def test_an_evaluation_with_too_few_held_out_samples_says_so(tmp_path: Path) -> None:
    assert evaluation(tmp_path, 49, pattern="a/*").repeats() == ""
    (line,) = evaluation(tmp_path, 50, pattern="a/*").repeats().splitlines()
    assert "`training.evaluation.samples: 50` takes 50 samples of data, and `data.heldOut` leaves 49" in line
    assert evaluation(tmp_path, 50, pattern="a/*").repeats(corpora=2) == "", "each island evaluates 25"
    assert evaluation(tmp_path, 99, pattern="a/*").repeats(corpora=2) != ""


def test_a_mixture_names_the_corpus_that_is_too_small(tmp_path: Path) -> None:
    mixture = [MixturePart(path="a", weight=1), MixturePart(path="b", weight=1)]
    assert evaluation(tmp_path, 98, mixture=mixture).repeats() == ""
    assert (
        "takes 60 samples of data in a, and `data.heldOut` leaves 49"
        in evaluation(tmp_path, 120, mixture=mixture).repeats()
    )


@pytest.mark.parametrize("count", [1, 7, 8, 9])
@pytest.mark.parametrize("islands", [1, 2, 3])
def test_islands_share_the_samples_of_an_evaluation(count: int, islands: int) -> None:
    ends = [SampleAssignment(island, islands, separate_data=True).end_of_first(count) for island in range(islands)]
    assert sum(ends) == count
    assert max(ends) - min(ends) <= 1
    assert SampleAssignment(1, 2).end_of_first(count) == count, "the islands of one text have one numbering"
