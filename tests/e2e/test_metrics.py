"""What Prometheus would scrape while a job trains, and that it goes away with the job."""

import re

from meshwright.api import labels
from meshwright_local.kube.resources import JOBS
from tests.e2e.local_stack import NAMESPACE, endless, eventually


def series(text, name, *pairs):
    """The values of a metric's series that carry these labels."""
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return [float(value) for given, value in found if all(pair in given for pair in pairs)]


async def test_operator_and_workers_export_the_job(stage):
    await stage.apply(endless("metered"))
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
    await check_where_time_and_gpus_go(stage, worker, mine)
    await stage.delete("metered")
    assert await stage.client.find(JOBS, "metered", NAMESPACE) is None

    async def forgotten():
        return mine not in await stage.scrape(f"{stage.ports.metrics_url}/metrics")

    await eventually("the series of the deleted job are gone", forgotten)


async def check_where_time_and_gpus_go(stage, worker, mine):
    """The phases of steps on the worker, and on the operator the GPUs of the cluster and those of the job."""
    phases = {
        name: series(worker, "ptj_step_phase_seconds_total", 'rank="0"', f'phase="{name}"')[0]
        for name in ("data", "compute", "communication", "update", "checkpoint", "other")
    }
    assert phases["compute"] > 0
    assert phases["communication"] > 0
    steps = series(worker, "ptj_step_duration_seconds_sum", 'rank="0"')[0]
    assert abs(sum(phases.values()) - phases["checkpoint"] - steps) <= 0.02 * steps
    exposed = sum(series(worker, "ptj_exposed_communication_seconds_total", 'rank="0"'))
    assert abs(exposed - phases["communication"]) <= 1e-6 * steps
    assert series(worker, "ptj_memory_peak_bytes", 'rank="1"', 'kind="host"')[0] > 1 << 24

    async def compared():
        text = await stage.scrape(f"{stage.ports.metrics_url}/metrics")
        return bool(series(text, "ptj_job_straggler_ratio", mine)) and text

    operator = await eventually("ranks are compared", compared)
    assert series(operator, "ptj_job_straggler_ratio", mine)[0] >= 1.0
    assert series(operator, "ptj_job_slowest_rank", mine)[0] in range(4)
    assert series(operator, "ptj_gpus", 'state="allocated"')[0] >= 4
    assert series(operator, "ptj_job_gpu_seconds_total", mine, 'cause="Training"')[0] > 0
    assert series(operator, "ptj_job_gpu_seconds_total", mine, 'cause="Queued"') in ([], [0.0])
    namespace = f'namespace="{NAMESPACE}"'
    assert series(operator, "ptj_namespace_gpu_seconds_total", namespace, 'cause="Training"')[0] > 0
    address = (await stage.pod("metered", 1))["status"]["podIP"]

    async def scored():
        text = await stage.scrape(f"http://{address}:{labels.METRICS_PORT}/metrics")
        return series(text, "ptj_rank_straggler_ratio")

    ratios = await eventually("the agent knows the median", scored)
    assert len(ratios) == 2
    assert all(0.05 < ratio < 20 for ratio in ratios)
