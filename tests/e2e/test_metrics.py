"""What Prometheus would scrape while a job trains, and that it goes away with the job."""

import re

from meshwright.api import labels
from meshwright_local.kube.resources import JOBS
from tests.e2e.local_stack import NAMESPACE, eventually, tiny


def series(text, name, *pairs):
    """The values of a metric's series that carry these labels."""
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return [float(value) for given, value in found if all(pair in given for pair in pairs)]


async def test_operator_and_workers_export_the_job(stage):
    await stage.apply(tiny("metered", training={"steps": 100000}))
    await stage.trained("metered", 5)
    mine = 'job_name="metered"'
    await stage.until("metered", lambda s: s.ready_ranks == "4/4", "4/4 ranks")
    operator = await stage.scrape(f"{stage.ports.metrics_url}/metrics")
    assert series(operator, "ptj_leader") == [1.0]
    assert sum(series(operator, "ptj_jobs")) >= 1
    assert series(operator, "ptj_job_info", mine) == [1.0]
    assert sum(series(operator, "ptj_job_ranks", mine, 'state="training"')) == 4.0
    assert sum(series(operator, "ptj_api_requests_total")) > 0
    assert sum(series(operator, "ptj_reconcile_duration_seconds_count")) > 0
    address = (await stage.pod("metered", 0))["status"]["podIP"]
    worker = await stage.scrape(f"http://{address}:{labels.METRICS_PORT}/metrics")
    assert series(worker, "ptj_rank_up") == [1.0, 1.0]
    assert series(worker, "ptj_step", 'rank="0"')[0] >= 5
    assert 0 < series(worker, "ptj_loss")[0] < 10
    assert series(worker, "ptj_tokens_total")[0] >= 5 * 8 * 32
    await stage.delete("metered")
    assert await stage.client.find(JOBS, "metered", NAMESPACE) is None

    async def forgotten():
        return mine not in await stage.scrape(f"{stage.ports.metrics_url}/metrics")

    await eventually("the series of the deleted job are gone", forgotten)
