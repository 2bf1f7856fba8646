"""The chart: what it renders, what it refuses. Rendering needs `helm` on the PATH, or its path in HELM."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from meshwright.api import labels
from meshwright.crd.chart_schema import DOCUMENTS, SCHEMA_FILE, with_documents
from meshwright.crd.definition import custom_resource_definition
from meshwright.planner.topology.site import parse_fabric
from meshwright_operator import settings
from meshwright_operator.feature_gates import FeatureGates
from tests.e2e.prometheus import JOB_NAME, WITHOUT_CLAIMED_LABELS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "meshwright"
HELM = os.environ.get("HELM") or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm on the PATH and none named by HELM")


def helm(*arguments):
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def render(*sets):
    """Every rendered object by (kind, name)."""
    flags = [part for pair in sets for part in ("--set", pair)]
    result = helm("template", "mw", str(CHART), "--namespace", "ops", "--kube-version", "1.31.0", *flags)
    assert result.returncode == 0, result.stderr
    objects = [item for item in yaml.safe_load_all(result.stdout) if item]
    return {(item["kind"], item["metadata"]["name"]): item for item in objects}


def rules(role):
    """(group, resource, verb) triples, with names where they are limited."""
    return {
        (group, resource, verb, *rule.get("resourceNames", []))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def grants(group, resource, *verbs):
    return {(group, resource, verb) for verb in verbs}


JOB_RULES = (
    grants("meshwright.dev", "paralleltrainingjobs", "get", "list", "watch", "delete")
    | grants("meshwright.dev", "paralleltrainingjobs/status", "patch")
    | grants("meshwright.dev", "paralleltrainingjobs/finalizers", "update")
    | grants("", "pods", "get", "list", "watch", "create", "patch", "delete")
    | grants("", "services", "create", "get")
    | grants("", "secrets", "create")
    | grants("", "events", "create", "patch", "list")
    | grants("", "persistentvolumeclaims", "get", "list")
    | grants("resource.k8s.io", "resourceclaims", "get")
    | grants("resource.k8s.io", "resourceclaimtemplates", "get")
    | grants("resource.nvidia.com", "computedomains", "create", "get")
)
DEVICES = ("resourceslices", "deviceclasses", "resourceclaims")
CLUSTER_RULES = (
    grants("", "nodes", "list", "watch")
    | grants("", "pods", "list")
    | {right for one in DEVICES for right in grants("resource.k8s.io", one, "list", "watch")}
)


def test_the_crd_in_the_chart_is_the_generated_file():
    linked = CHART / "files" / "meshwright.dev_paralleltrainingjobs.yaml"
    assert linked.is_symlink()
    assert yaml.safe_load(linked.read_text()) == custom_resource_definition()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        *((f"dashboards/{board}.json", f"dashboards/{board}.json") for board in ("fleet", "job", "operator")),
        ("meshwright.rules.yaml", "dashboards/alerts/meshwright.rules.yaml"),
    ],
)
def test_dashboards_and_rules_in_the_chart_are_the_generated_files(name, source):
    linked = CHART / "files" / name
    assert linked.is_symlink()
    assert linked.resolve() == CHART.parents[1] / source


def test_every_value_is_in_the_schema_and_the_other_way_round():
    def compare(values, schema, path):
        properties = schema.get("properties")
        if properties is None or schema.get("additionalProperties") is not False:
            return
        assert set(values) == set(properties) - {"global"}, path
        for name, value in values.items():
            if isinstance(value, dict) and name not in DOCUMENTS:
                compare(value, properties[name], f"{path}.{name}")

    compare(
        yaml.safe_load((CHART / "values.yaml").read_text()),
        json.loads((CHART / "values.schema.json").read_text()),
        "values",
    )


@needs_helm
def test_lint():
    result = helm("lint", "--strict", str(CHART))
    assert result.returncode == 0, result.stdout + result.stderr


@needs_helm
def test_rendered_crd_differs_by_the_keep_annotation_alone():
    crd = render()["CustomResourceDefinition", "paralleltrainingjobs.meshwright.dev"]
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == custom_resource_definition()
    free = render("crds.keep=false")["CustomResourceDefinition", "paralleltrainingjobs.meshwright.dev"]
    assert free == custom_resource_definition()
    assert not [kind for kind, _ in render("crds.enabled=false") if kind == "CustomResourceDefinition"]


@needs_helm
def test_cluster_wide_rights_are_exactly_what_the_operator_uses():
    found = render()
    assert rules(found["ClusterRole", "ops-mw-meshwright"]) == JOB_RULES | CLUSTER_RULES
    lease = grants("coordination.k8s.io", "leases", "create") | {
        ("coordination.k8s.io", "leases", verb, "mw-meshwright") for verb in ("get", "update")
    }
    assert rules(found["Role", "mw-meshwright-lease"]) == lease
    own = grants("", "secrets", "create") | {("", "secrets", v, "mw-meshwright-credentials") for v in ("get", "update")}
    assert rules(found["Role", "mw-meshwright-credentials"]) == own
    assert parsed(found).credentials_secret == "mw-meshwright-credentials"


@needs_helm
def test_named_namespaces_get_a_role_each():
    found = render("watchNamespaces={red,blue}")
    assert rules(found["ClusterRole", "ops-mw-meshwright"]) == CLUSTER_RULES
    result = helm(
        "template", "mw", str(CHART), "-n", "ops", "--kube-version", "1.31.0", "--set", "watchNamespaces={red,blue}"
    )
    roles = [item for item in yaml.safe_load_all(result.stdout) if item and item["kind"] == "Role"]
    by_namespace = {role["metadata"]["namespace"]: rules(role) for role in roles}
    assert by_namespace["red"] == by_namespace["blue"] == JOB_RULES
    assert parsed(found).namespaces == ("red", "blue")


@needs_helm
@pytest.mark.parametrize("sets", [(), ("watchNamespaces={red}",)])
def test_no_wildcard_and_no_secret_is_read_but_the_operators_own(sets):
    for (kind, name), item in render(*sets).items():
        if kind in ("Role", "ClusterRole"):
            for group, resource, verb, *names in rules(item):
                assert "*" not in (group, resource, verb), name
                own = names == ["mw-meshwright-credentials"] and kind == "Role"
                assert resource != "secrets" or verb == "create" or own, name


def parsed(found):
    """The operator's own reading of the arguments the chart gives it."""
    container = found["Deployment", "mw-meshwright"]["spec"]["template"]["spec"]["containers"][0]
    return settings.parse(container["args"], {})


@needs_helm
def test_the_operator_understands_its_arguments():
    read = parsed(render("operator.logLevel=debug", "operator.workers=3", "coordinator.port=7000"))
    assert read.coordinator_url == "https://mw-meshwright.ops.svc:7000"
    assert (read.coordinator_listen.port, read.metrics_listen.port) == (7000, 9471)
    assert (read.log_level, read.workers) == ("debug", 3)
    assert (read.lease_name, read.lease_namespace) == ("mw-meshwright", "ops")
    assert (read.tls, read.key_file, read.tls_ca_days) == ("managed", None, 365)
    assert read.tls_names == (
        "mw-meshwright.ops.svc",
        "mw-meshwright.ops",
        "mw-meshwright.ops.svc.cluster.local",
    )
    more = parsed(render("coordinator.tls.names={mw.example,10.0.0.1}", "coordinator.tls.clusterDomain=corp"))
    assert more.tls_names[2:] == ("mw-meshwright.ops.svc.corp", "mw.example", "10.0.0.1")
    assert read.agent_image == "meshwright-agent:0.1.0"
    assert parsed(render("agentImage.tag=edge")).agent_image == "meshwright-agent:edge"
    assert parsed(render("agentImage.repository=")).agent_image == ""
    plain = parsed(render("coordinator.tls.mode=disabled"))
    assert (plain.tls, plain.coordinator_url) == ("disabled", "http://mw-meshwright.ops.svc:9470")


@needs_helm
def test_the_pod_is_restricted():
    spec = render()["Deployment", "mw-meshwright"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"coordinator": 9470, "metrics": 9471}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


@needs_helm
@pytest.mark.parametrize(
    "sets",
    [(), ("coordinator.tls.mode=certManager", "coordinator.tls.issuer.name=ca"), ("coordinator.tls.mode=disabled",)],
)
def test_no_secret_is_rendered_and_every_rendering_is_the_same(sets):
    assert not [kind for kind, _ in render(*sets) if kind == "Secret"]
    assert render(*sets) == render(*sets)


def test_no_template_draws_at_random_or_asks_a_cluster():
    for path in (CHART / "templates").rglob("*.*"):
        for word in ("lookup", "rand", "genCA", "genSigned", "genSelfSigned", "genPrivateKey", "uuidv4", "now"):
            assert f"{word} " not in path.read_text().replace("{{-", "{{"), (path.name, word)


@needs_helm
@pytest.mark.parametrize(
    ("sets", "secret"),
    [
        (("coordinator.tls.mode=secret", "coordinator.tls.secretName=ours"), "ours"),
        (("coordinator.tls.mode=certManager", "coordinator.tls.issuer.name=ca"), "mw-meshwright-coordinator-tls"),
    ],
)
def test_certificates_that_others_issue_are_mounted(sets, secret):
    found = render(*sets)
    pod = found["Deployment", "mw-meshwright"]["spec"]["template"]["spec"]
    assert pod["volumes"][0] == {"name": "tls", "secret": {"secretName": secret, "defaultMode": 0o440}}
    mount = pod["containers"][0]["volumeMounts"][0]["mountPath"]
    read = parsed(found)
    assert read.tls == "files"
    for path, name in ((read.tls_cert_file, "tls.crt"), (read.tls_key_file, "tls.key"), (read.tls_ca_file, "ca.crt")):
        assert str(path) == f"{mount}/{name}"


@needs_helm
def test_cert_managers_certificate_has_the_names_of_the_service():
    assert not [kind for kind, _ in render() if kind == "Certificate"]
    sets = ("coordinator.tls.mode=certManager", "coordinator.tls.issuer.name=ca", "coordinator.tls.names={mw.example}")
    spec = render(*sets)["Certificate", "mw-meshwright-coordinator"]["spec"]
    assert spec["issuerRef"] == {"group": "cert-manager.io", "kind": "Issuer", "name": "ca"}
    assert spec["dnsNames"] == [
        "mw-meshwright.ops.svc",
        "mw-meshwright.ops",
        "mw-meshwright.ops.svc.cluster.local",
        "mw.example",
    ]


@needs_helm
def test_a_second_replica_is_ready_before_the_first_one_stops():
    found = render()
    spec = found["Deployment", "mw-meshwright"]["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    spread = spec["template"]["spec"]["topologySpreadConstraints"]
    assert {item["topologyKey"] for item in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    selector = spec["selector"]
    assert all(item["labelSelector"] == selector for item in spread)
    budget = found["PodDisruptionBudget", "mw-meshwright"]["spec"]
    assert budget == {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}
    assert not [kind for kind, _ in render("replicas=1") if kind == "PodDisruptionBudget"]
    assert found["Service", "mw-meshwright"]["spec"]["ipFamilyPolicy"] == "PreferDualStack"


@needs_helm
def test_network_policy_is_optional():
    assert not [kind for kind, _ in render() if kind == "NetworkPolicy"]
    policy = render("networkPolicy.enabled=true")["NetworkPolicy", "mw-meshwright"]
    worker_rule = policy["spec"]["ingress"][0]
    assert worker_rule["ports"] == [{"port": "coordinator"}]
    assert worker_rule["from"][0]["podSelector"]["matchExpressions"][0]["key"] == "meshwright.dev/job-name"


@needs_helm
def test_network_policies_of_jobs_are_the_operators_only_if_asked_for():
    on = ("networkPolicy.jobs.enabled=true", "networkPolicy.jobs.egress[0].to[0].ipBlock.cidr=10.20.0.0/16")
    assert parsed(render()).job_network_policies is None
    assert parsed(render("networkPolicy.enabled=true")).job_network_policies is None
    found = render(*on, "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring")
    added = grants("networking.k8s.io", "networkpolicies", "create", "get")
    assert rules(found["ClusterRole", "ops-mw-meshwright"]) == JOB_RULES | CLUSTER_RULES | added
    options = parsed(found).job_network_policies
    assert options.metrics_from == ({"namespaceSelector": {"matchLabels": {"name": "monitoring"}}},)
    assert options.egress == ({"to": [{"ipBlock": {"cidr": "10.20.0.0/16"}}]},)
    (peer,) = options.coordinator
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "ops"}}
    labels_of_pod = found["Deployment", "mw-meshwright"]["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= labels_of_pod.items()
    assert options.coordinator_port == 9470
    role = render(*on, "watchNamespaces={red}")
    assert rules(role["ClusterRole", "ops-mw-meshwright"]) == CLUSTER_RULES
    assert rules(role["Role", "ops-mw-meshwright"]) == JOB_RULES | added


@needs_helm
@pytest.mark.parametrize(
    ("url", "port"),
    [("https://mw.example:7443", 7443), ("https://mw.example", 443), ("https://[fd00::1]:8443", 8443)],
)
def test_a_coordinator_with_its_own_address_is_allowed_by_its_port(url, port):
    found = render("networkPolicy.jobs.enabled=true", f"coordinator.url={url}")
    options = parsed(found).job_network_policies
    assert (options.coordinator, options.coordinator_port) == ((), port)


MONITORING = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


@needs_helm
def test_monitoring_is_off_unless_one_value_turns_it_on():
    off, on = render(), render("monitoring.enabled=true")
    assert not MONITORING & {kind for kind, _ in off}
    assert {key: item for key, item in on.items() if key in off} == off
    added = {kind for kind, _ in on.keys() - off.keys()}
    assert added == MONITORING | {"ConfigMap"}
    assert len(on) == len(off) + 6


def _scrape_config(relabeling):
    """A relabeling of the Prometheus Operator, as Prometheus's own configuration has it."""
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return {names.get(name, name): value for name, value in relabeling.items()}


@needs_helm
def test_prometheus_finds_the_operator_and_its_workers_and_believes_the_labels_of_the_first_only():
    found = render("monitoring.enabled=true", "monitoring.labels.release=kps", "monitoring.scrape.interval=15s")
    monitor, service = found["ServiceMonitor", "mw-meshwright"], found["Service", "mw-meshwright"]
    assert monitor["metadata"]["labels"]["release"] == "kps"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {"port": "metrics", "path": "/metrics", "honorLabels": True, "interval": "15s"}
    assert "metrics" in {port["name"] for port in service["spec"]["ports"]}
    spec = found["PodMonitor", "mw-meshwright-workers"]["spec"]
    assert spec["namespaceSelector"] == {"any": True}
    (workers,) = spec["podMetricsEndpoints"]
    assert workers.items() >= {**endpoint, "honorLabels": False}.items()
    assert [_scrape_config(one) for one in workers["relabelings"]] == JOB_NAME
    assert [_scrape_config(one) for one in workers["metricRelabelings"]] == WITHOUT_CLAIMED_LABELS
    assert spec["selector"]["matchExpressions"] == [{"key": labels.LABEL_JOB, "operator": "Exists"}]
    named = render("monitoring.enabled=true", "watchNamespaces={red,blue}")["PodMonitor", "mw-meshwright-workers"]
    assert named["spec"]["namespaceSelector"] == {"matchNames": ["red", "blue"]}


@needs_helm
def test_alerts_lead_to_the_addresses_of_the_values():
    rules = CHART / "files" / "meshwright.rules.yaml"
    plain = render("monitoring.enabled=true")["PrometheusRule", "mw-meshwright"]["spec"]
    assert plain == yaml.safe_load(rules.read_text())
    addresses = ("monitoring.grafanaUrl=https://g.example/", "monitoring.rules.runbookUrl=https://d.example/runbooks")
    found = render("monitoring.enabled=true", *addresses)["PrometheusRule", "mw-meshwright"]["spec"]
    notes = [rule["annotations"] for group in found["groups"] for rule in group["rules"] if "alert" in rule]
    assert all(item["dashboard_url"].startswith("https://g.example/d/meshwright-") for item in notes)
    assert all(item["runbook_url"].startswith("https://d.example/runbooks/PTJ") for item in notes)


@needs_helm
def test_the_sidecar_of_grafana_finds_each_board():
    found = render(
        "monitoring.enabled=true",
        "monitoring.dashboards.namespace=grafana",
        "monitoring.dashboards.annotations.grafana_folder=Meshwright",
    )
    for board in ("fleet", "job", "operator"):
        item = found["ConfigMap", f"mw-meshwright-dashboard-{board}"]
        assert item["metadata"]["namespace"] == "grafana"
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert item["metadata"]["annotations"] == {"grafana_folder": "Meshwright"}
        (text,) = item["data"].values()
        assert json.loads(text) == json.loads((CHART / "files" / "dashboards" / f"{board}.json").read_text())


@needs_helm
@pytest.mark.parametrize("part", ["scrape", "rules", "dashboards"])
def test_each_part_of_monitoring_can_be_left_out(part):
    parts = {"scrape": {"ServiceMonitor", "PodMonitor"}, "rules": {"PrometheusRule"}, "dashboards": set()}
    found = {kind for kind, _ in render("monitoring.enabled=true", f"monitoring.{part}.enabled=false")}
    assert MONITORING & found == MONITORING - parts[part]


@needs_helm
@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("monitoring.enabled=sometimes", "monitoring.enabled"),
        ("monitoring.grafanaUrl=grafana", "grafanaUrl"),
        ("monitoring.scrape.interval=soon", "interval"),
        ("monitoring.dashboards.labels.number=1", "labels.number"),
        ("imagee.tag=x", "imagee"),
        ("image.digest=latest", "digest"),
        ("coordinator.port=0", "port"),
        ("coordinator.tls.mode=always", "mode"),
        ("coordinator.tls.mode=secret", "coordinator.tls.secretName is required"),
        ("coordinator.tls.mode=certManager", "coordinator.tls.issuer.name is required"),
        ("coordinator.port=9090,metrics.port=9090", "coordinator.port and metrics.port must differ"),
        ("replicas=0", "replicas"),
        ("operator.logLevel=loud", "logLevel"),
        ("watchNamespaces={Red}", "watchNamespaces"),
        ("podLabels.app\\.kubernetes\\.io/name=x", "podLabels"),
        ("imagePullSecrets[0].name=5", "imagePullSecrets"),
        # A null removes a default. Without these an argument would be empty, and the operator would not start.
        ("replicas=null", "replicas"),
        ("coordinator.port=null", "port"),
        ("coordinator.tls.mode=null", "mode"),
        ("coordinator.tls.issuer=null", "issuer"),
        ("coordinator.tls.clusterDomain=null", "clusterDomain"),
        ("metrics.port=null", "port"),
        ("operator.workers=null", "workers"),
        ("operator.leaseSeconds=null", "leaseSeconds"),
    ],
)
def test_bad_values_are_refused_by_name(value, word):
    result = helm("template", "mw", str(CHART), "--set", value)
    assert result.returncode != 0
    # Helm 4 names a field as a path.
    assert word in result.stderr or word.replace(".", "/") in result.stderr


@needs_helm
def test_large_numbers_and_odd_names_reach_the_operator_as_they_are():
    """Helm writes a million as `1e+06`, and YAML reads `123` as a number and `a # b` as `a`."""
    sets = ["operator.workers=1000000", "operator.maxConnectionsPerSource=2000000", "coordinator.tls.serverName=a # b"]
    found = render(*sets, "coordinator.tls.names={x: y}")
    arguments = found["Deployment", "mw-meshwright"]["spec"]["template"]["spec"]["containers"][0]["args"]
    for wanted in ("workers=1000000", "max-connections-per-source=2000000", "tls-server-name=a # b", "tls-name=x: y"):
        assert f"--{wanted}" in arguments
    flags = ["--set-string", "priorityClassName=123,coordinator.tls.mode=secret,coordinator.tls.secretName=456"]
    result = helm("template", "mw", str(CHART), *flags, "--show-only", "templates/deployment.yaml")
    pod = yaml.safe_load(result.stdout)["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "123"
    assert pod["volumes"][0]["secret"]["secretName"] == "456"


@needs_helm
def test_arguments_environment_and_volumes_of_the_user_come_after_those_of_the_chart():
    found = render(
        "operator.extraArgs={--log-level=debug}",
        "operator.extraEnv[0].name=HTTPS_PROXY",
        "operator.extraEnv[0].value=http://proxy:3128",
        "operator.extraVolumes[0].name=ca",
        "operator.extraVolumes[0].configMap.name=ca",
        "operator.extraVolumeMounts[0].name=ca",
        "operator.extraVolumeMounts[0].mountPath=/ca",
    )
    pod = found["Deployment", "mw-meshwright"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["env"] == [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]
    assert container["volumeMounts"][-1] == {"name": "ca", "mountPath": "/ca"}
    assert pod["volumes"][-1] == {"name": "ca", "configMap": {"name": "ca"}}
    assert container["args"][-1] == "--log-level=debug"
    assert parsed(found).log_level == "debug", "the last one counts"


@needs_helm
def test_feature_gates_are_those_of_the_values():
    assert parsed(render()).feature_gates == FeatureGates()
    read = parsed(render("featureGates.PlanCalibration=false"))
    assert read.feature_gates == FeatureGates((("PlanCalibration", False),))
    refused = helm("template", "mw", str(CHART), "--set", "featureGates.PlanCalibration=maybe")
    assert refused.returncode != 0
    assert "PlanCalibration" in refused.stderr


@needs_helm
def test_the_admission_policy_is_there_when_it_is_asked_for():
    name = "ops-mw-meshwright-job-creators"
    assert not [kind for kind, _ in render() if kind.startswith("ValidatingAdmission")]
    found = render("admissionPolicy.enabled=true")
    assert found["ValidatingAdmissionPolicyBinding", name]["spec"]["policyName"] == name
    assert ("ValidatingAdmissionPolicy", name) in found


@needs_helm
def test_the_pod_of_helm_test_is_not_behind_the_service():
    found = render()
    pod, service = found["Pod", "mw-meshwright-test"], found["Service", "mw-meshwright"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    labels, selector = pod["metadata"]["labels"], service["spec"]["selector"]
    assert any(labels.get(name) != value for name, value in selector.items())
    (container,) = pod["spec"]["containers"]
    assert container["command"][-1] == "http://mw-meshwright.ops.svc:9471"
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


CRDS = CHART.parent / "meshwright-crds"


def test_both_charts_have_the_same_definition_and_version():
    assert (CRDS / "files" / "meshwright.dev_paralleltrainingjobs.yaml").is_symlink()
    ours, theirs = (yaml.safe_load((chart / "Chart.yaml").read_text()) for chart in (CHART, CRDS))
    for field in ("version", "appVersion", "kubeVersion"):
        assert ours[field] == theirs[field], field


@needs_helm
def test_the_chart_of_the_definition():
    assert helm("lint", "--strict", str(CRDS)).returncode == 0

    def crd(*flags):
        result = helm("template", "c", str(CRDS), "--kube-version", "1.31.0", *flags)
        assert result.returncode == 0, result.stderr
        return yaml.safe_load(result.stdout)

    kept = crd("--set-string", "annotations.argocd\\.argoproj\\.io/sync-wave=-2", "--set-string", "annotations.a=b")
    assert kept["metadata"].pop("annotations") == {
        "argocd.argoproj.io/sync-wave": "-2", "a": "b", "helm.sh/resource-policy": "keep",
    }  # fmt: skip
    assert kept == custom_resource_definition()
    assert crd("--set", "keep=false") == custom_resource_definition()


def test_the_schema_of_the_fabric_is_that_of_the_operator():
    text = (ROOT / SCHEMA_FILE).read_text()
    assert with_documents(text) == text, "run `make generate`"


@needs_helm
def test_the_fabric_reaches_the_operator(tmp_path):
    example = yaml.safe_load((ROOT / "examples/fabric/h100-infiniband.yaml").read_text())
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"fabric": example}))
    result = helm("template", "mw", str(CHART), "-f", str(values))
    assert result.returncode == 0, result.stderr
    found = {one["metadata"]["name"]: one for one in yaml.safe_load_all(result.stdout) if one}
    assert parse_fabric(found["mw-meshwright-policy"]["data"]["fabric.yaml"]) == parse_fabric(yaml.safe_dump(example))
    assert parsed(render()).fabric_file == Path("/etc/meshwright-policy/fabric.yaml")
    values.write_text(yaml.safe_dump({"fabric": {"levels": {"rack": {"gigabytesPerSecond": "fast"}}}}))
    wrong = helm("template", "mw", str(CHART), "-f", str(values))
    assert wrong.returncode
    assert "gigabytesPerSecond" in wrong.stderr


@needs_helm
def test_values_that_an_older_chart_did_not_have_may_be_absent():
    """`helm upgrade --reuse-values` from 0.1.0 passes the values of that chart, without new defaults."""
    released = ROOT / "tests" / "compatibility" / "0.1.0" / "chart" / "values.yaml"
    old, new = yaml.safe_load(released.read_text()), yaml.safe_load((CHART / "values.yaml").read_text())
    later = [name for name in new if name not in old]
    later += [
        f"{name}.{part}"
        for name in new
        if isinstance(old.get(name), dict)
        for part in new[name]
        if part not in old[name]
    ]
    assert {"admissionPolicy", "networkPolicy.jobs", "fabric"} <= set(later)
    found = render(*(f"{name}=null" for name in later))
    documents = found["ConfigMap", "mw-meshwright-policy"]["data"]
    assert [yaml.safe_load(documents[name]) for name in ("fabric.yaml", "profiles.yaml")] == [{}, {}]


@needs_helm
def test_no_name_is_too_long_for_a_service():
    result = helm("template", "r" * 53, str(CHART), "--kube-version", "1.31.0")
    services = [one for one in yaml.safe_load_all(result.stdout) if one and one["kind"] == "Service"]
    assert [len(one["metadata"]["name"]) for one in services] == [63]


@needs_helm
@pytest.mark.parametrize(
    ("sets", "warned"),
    [
        (["image.repository=registry.example.com/operator"], []),
        (["coordinator.tls.mode=disabled"], ["image.repository", "coordinator.tls.mode"]),
    ],
)
def test_the_notes_name_the_next_command_and_what_is_risky(sets, warned, tmp_path):
    # `helm template` prints no notes, and `helm install` asks a cluster for its version.
    chart = shutil.copytree(CHART, tmp_path / "chart")
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "_notes.tpl").write_text('{{ define "notes" }}' + notes + "{{ end }}")
    (chart / "templates" / "notes.yaml").write_text('{kind: Notes, text: {{ include "notes" . | quote }}}')
    flags = [part for pair in sets for part in ("--set", pair)]
    result = helm("template", "mw", str(chart), "--show-only", "templates/notes.yaml", *flags)
    assert result.returncode == 0, result.stderr
    text = yaml.safe_load(result.stdout)["text"]
    assert "rollout status -n default deployment/mw-meshwright" in text
    assert re.findall(r"WARNING: `(.*?)`", text) == warned


@needs_helm
def test_names_that_look_like_numbers_stay_strings():
    flags = ["--set-string", "watchNamespaces={10},serviceAccount.name=77", "--set", "monitoring.enabled=true"]
    result = helm("template", "1234", str(CHART), "--namespace", "1000", "--kube-version", "1.31.0", *flags)
    assert result.returncode == 0, result.stderr
    for item in filter(None, yaml.safe_load_all(result.stdout)):
        metadata = item["metadata"]
        assert isinstance(metadata.get("namespace", ""), str), item["kind"]
        assert all(isinstance(value, str) for value in metadata.get("labels", {}).values()), item["kind"]
        for subject in item.get("subjects", []):
            assert (subject["name"], subject["namespace"]) == ("77", "1000")
