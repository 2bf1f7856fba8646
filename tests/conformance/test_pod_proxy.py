"""GET through `pods/proxy` reaches a port of the pod, without the caller's credentials. Of the embedded server alone:

a real one forwards to no loopback address.
"""

import aiohttp
import pytest
from aiohttp import web

from meshwright_local.apiserver.rest.pod_proxy import pod_of


@pytest.fixture
async def port():
    async def answer(request):
        kept = {name: request.headers.get(name, "") for name in ("Authorization", "Accept")}
        return web.json_response({"path": request.path, "query": request.query_string, **kept}, status=203)

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site._server.sockets[0].getsockname()[1]
    await runner.cleanup()


async def running(api, name, address):
    await api.call("POST", api.pods, api.pod(name))
    status = {"status": {"phase": "Running", "podIP": address}}
    await api.call("PATCH", f"{api.pods}/{name}/status", status, "application/merge-patch+json")


async def test_forwards_path_and_query_but_no_credentials(api, port):
    if not api.server.embedded:
        pytest.skip("a real server forwards to no loopback address")
    await running(api, "web", "127.0.0.1")
    status, answer = await api.call("GET", f"{api.pods}/web:{port}/proxy/metrics/x", name="[]")
    assert (status, answer["path"], answer["query"]) == (203, "/metrics/x", "name=[]")
    assert answer["Authorization"] == ""
    assert (await api.call("GET", f"{api.pods}/http:web:{port}/proxy"))[1]["path"] == "/"
    assert (await api.call("POST", f"{api.pods}/web:{port}/proxy/"))[0] == 405 or not api.server.embedded


async def test_pods_that_cannot_answer(api):
    await api.call("POST", api.pods, api.pod("pending"))
    assert (await api.call("GET", f"{api.pods}/nobody:80/proxy/"))[0] == 404
    assert (await api.call("GET", f"{api.pods}/pending:80/proxy/"))[0] == 400
    await running(api, "silent", "127.0.0.1")
    status, answer = await api.call("GET", f"{api.pods}/silent:1/proxy/")
    assert status == (503 if api.server.embedded else 400), answer  # a real server forwards to no loopback address


async def test_needs_its_own_right(api):
    user = {"Impersonate-User": "jane"}
    try:
        async with api.session.get(
            f"{api.server.url}{api.pods}/web:80/proxy/metrics", headers=user, ssl=api.context
        ) as response:
            answer = await response.json()
    except aiohttp.ClientError as error:
        pytest.fail(str(error))
    assert response.status == 403
    assert 'cannot get resource "pods/proxy"' in answer["message"]


def test_names_with_scheme_and_port():
    assert [pod_of(name) for name in ("web", "web:80", "https:web:80", "http:web:")] == ["web"] * 4
