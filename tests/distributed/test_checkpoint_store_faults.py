"""An object store that answers every write with 500 while ranks train, and later works again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.api.checkpoint import StoreSpec
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.store import open_store
from meshwright_worker.rank.task import Outcome
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.storage_cases import train_on_failing_store
from tests.s3_server import server
from tests.worker.checkpoint.fault_proxy import FaultProxy

__all__ = ["server"]

pytest.importorskip("s3fs", reason="pip install s3fs 'moto[server]'")
pytest.importorskip("moto.server", reason="pip install s3fs 'moto[server]'")
pytestmark = pytest.mark.long
URI = "s3://checkpoints/faults"


class Unavailable(FaultProxy):
    """Answers writes with 500 until a file exists. The start of the ranks needs reads."""

    def __init__(self, target: str, until: Path) -> None:
        super().__init__(target)
        self._until = until

    def _serve(self, request: Any) -> None:
        writes = request.command in ("PUT", "POST")
        self.share, self.kinds = float(writes and not self._until.exists()), ("500",)
        super()._serve(request)


def test_training_goes_on_without_the_store_and_saves_there_again(
    pool: RankPool, tmp_path: Path, text: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    repaired = tmp_path / "repaired"
    volume = tmp_path / "volume"
    volume.mkdir()
    with Unavailable(server, repaired) as proxy:
        store = StoreSpec(endpoint=proxy.url, region="us-east-1")
        run = small_run(data=2, steps=40, every=4)
        assert run.checkpoint is not None
        checkpoint = run.checkpoint.model_copy(update={"uri": URI, "store": store})
        run = run.model_copy(update={"checkpoint": checkpoint})
        (outcome, zero), (_, one) = pool.run(
            train_on_failing_store, run, URI, ["touch", str(repaired)], checkpoint_dir=volume, data_dir=text
        )
        assert outcome is Outcome.COMPLETE
        assert [report.step for report in one.reports] == list(range(1, 41))
        assert open_store(URI, 0, store).steps()[0] == 40
    assert CheckpointDirectory(volume).steps()[0] == 40
    assert any(f"{URI}/step-" in tier.error and "cannot be written" in tier.error for tier in zero.tiers)
    assert zero.tiers[-1].error == ""
