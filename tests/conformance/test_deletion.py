"""Deleting: finalizers, owners, collections, namespaces."""

MERGE = "application/merge-patch+json"


async def owned(api, name, owner, **reference):
    references = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            **reference,
        }
    ]
    return (await api.call("POST", api.maps, api.config_map(name, ownerReferences=references)))[1]


async def test_finalizers_hold_an_object(api):
    await api.call("POST", api.maps, api.config_map("f", finalizers=["example.com/x"]))
    code, obj = await api.call("DELETE", f"{api.maps}/f")
    assert (code, obj["kind"]) == (200, "ConfigMap")
    assert obj["metadata"]["deletionTimestamp"]
    assert (await api.call("GET", f"{api.maps}/f"))[0] == 200
    await api.call("PATCH", f"{api.maps}/f", {"metadata": {"finalizers": None}}, MERGE)
    assert (await api.call("GET", f"{api.maps}/f"))[0] == 404


async def test_delete_answers_with_a_status(api):
    _, obj = await api.call("POST", api.maps, api.config_map("c"))
    code, status = await api.call("DELETE", f"{api.maps}/c")
    assert (code, status["status"]) == (200, "Success")
    assert status["details"]["uid"] == obj["metadata"]["uid"]
    assert (await api.call("DELETE", f"{api.maps}/c"))[0] == 404


async def test_preconditions(api):
    _, obj = await api.call("POST", api.maps, api.config_map("c"))
    for wrong in ({"uid": "wrong"}, {"resourceVersion": "1"}):
        code, status = await api.call("DELETE", f"{api.maps}/c", {"preconditions": wrong})
        assert (code, status["reason"]) == (409, "Conflict")
    right = {"uid": obj["metadata"]["uid"], "resourceVersion": obj["metadata"]["resourceVersion"]}
    assert (await api.call("DELETE", f"{api.maps}/c", {"preconditions": right}))[0] == 200


async def test_dry_run(api):
    await api.call("POST", api.maps, api.config_map("c"))
    assert (await api.call("DELETE", f"{api.maps}/c", dryRun="All"))[0] == 200
    assert (await api.call("GET", f"{api.maps}/c"))[0] == 200


async def test_bad_options(api):
    await api.call("POST", api.maps, api.config_map("c"))
    assert (await api.call("DELETE", f"{api.maps}/c", propagationPolicy="Sideways"))[0] == 422
    assert (await api.call("DELETE", f"{api.maps}/c", {"dryRun": ["Some"]}))[0] == 422
    both = {"orphanDependents": True, "propagationPolicy": "Orphan"}
    assert (await api.call("DELETE", f"{api.maps}/c", both))[0] == 422
    assert (await api.call("DELETE", f"{api.maps}/c", {"gracePeriodSeconds": "soon"}))[0] == 400


async def test_dependents_go_with_their_owner(api):
    _, owner = await api.call("POST", api.maps, api.config_map("owner"))
    await owned(api, "owned", owner)
    await api.call("DELETE", f"{api.maps}/owner")
    assert await api.until_gone(f"{api.maps}/owned")


async def test_foreground_waits_for_dependents(api):
    _, owner = await api.call("POST", api.maps, api.config_map("owner"))
    child = await owned(api, "owned", owner, blockOwnerDeletion=True)
    finalizers = {"metadata": {"finalizers": ["example.com/x"]}}
    await api.call("PATCH", f"{api.maps}/{child['metadata']['name']}", finalizers, MERGE)
    code, obj = await api.call("DELETE", f"{api.maps}/owner", propagationPolicy="Foreground")
    assert (code, obj["metadata"]["finalizers"]) == (200, ["foregroundDeletion"])
    while not (await api.call("GET", f"{api.maps}/owned"))[1]["metadata"].get("deletionTimestamp"):
        pass
    assert (await api.call("GET", f"{api.maps}/owner"))[0] == 200
    await api.call("PATCH", f"{api.maps}/owned", {"metadata": {"finalizers": None}}, MERGE)
    assert await api.until_gone(f"{api.maps}/owner")


async def test_orphans_stay(api):
    _, owner = await api.call("POST", api.maps, api.config_map("owner"))
    await owned(api, "owned", owner)
    await api.call("DELETE", f"{api.maps}/owner", {"propagationPolicy": "Orphan"})
    assert await api.until_gone(f"{api.maps}/owner")
    code, child = await api.call("GET", f"{api.maps}/owned")
    assert code == 200
    assert not child["metadata"].get("ownerReferences")


async def test_collections(api):
    for index in range(3):
        await api.call("POST", api.maps, api.config_map(f"pg{index}", {"pg": "1"}))
    await api.call("POST", api.maps, api.config_map("stays"))
    assert (await api.call("DELETE", api.maps, labelSelector="pg=1"))[0] == 200
    assert (await api.call("GET", api.maps, labelSelector="pg=1"))[1]["items"] == []
    assert (await api.call("GET", f"{api.maps}/stays"))[0] == 200


async def test_namespaces_are_emptied_first(api):
    await api.call("POST", api.maps, api.config_map("f", finalizers=["example.com/x"]))
    path = f"/api/v1/namespaces/{api.namespace}"
    code, space = await api.call("DELETE", path)
    assert (code, space["status"]["phase"]) == (200, "Terminating")
    code, status = await api.call("POST", api.maps, api.config_map("late"))
    assert (code, status["details"]["causes"][0]["reason"]) == (403, "NamespaceTerminating")
    assert (await api.call("GET", path))[0] == 200
    await api.call("PATCH", f"{api.maps}/f", {"metadata": {"finalizers": None}}, MERGE)
    assert await api.until_gone(path, 30)
    assert (await api.call("GET", f"{api.maps}/f"))[0] == 404


async def test_some_namespaces_are_for_ever(api):
    code, _ = await api.call("DELETE", "/api/v1/namespaces/kube-system")
    assert code == 403
