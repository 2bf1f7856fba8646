"""The rules of what happens in a container's life: probes, lifecycle hooks, and restarts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.api.objects import KubeObject, is_sidecar
from meshwright_local.apiserver.status_errors import (
    Cause,
    invalid_value,
    not_allowed,
    required,
    too_many,
    unsupported_value,
)

PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc", "sleep")
_HEADER_NAME = re.compile(r"[-A-Za-z0-9]+")
_POLICIES = ("Always", "Never", "OnFailure")
_MOST_RULES, _MOST_CODES = 20, 255


def life_causes(container: KubeObject, path: str, grace: int) -> Iterator[Cause]:
    """Return the errors of a container's hooks, probes and restart policy, in the order of a real API server."""
    if ".initContainers[" in path:
        yield from _restart_causes(container, path)
    if ".initContainers[" in path and not is_sidecar(container):
        for key in ("lifecycle", *PROBES):
            if container.get(key) is not None:
                yield not_allowed(f"{path}.{key}", "may not be set for init containers without restartPolicy=Always")
        return
    for key in ("postStart", "preStop"):
        hook = (container.get("lifecycle") or {}).get(key)
        if hook is not None:
            yield from _handler_causes(hook, f"{path}.lifecycle.{key}", grace)
    for key in PROBES:
        if container.get(key) is not None:
            yield from _probe_causes(container[key], f"{path}.{key}", readiness=key == "readinessProbe")
    if ".initContainers[" not in path:
        yield from _restart_causes(container, path)


def _probe_causes(probe: KubeObject, path: str, *, readiness: bool) -> Iterator[Cause]:
    yield from _handler_causes({key: value for key, value in probe.items() if key != "sleep"}, path, 0)
    for key in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"):
        if probe.get(key, 0) < 0:
            yield invalid_value(f"{path}.{key}", probe[key], "must be greater than or equal to 0")
    grace = probe.get("terminationGracePeriodSeconds")
    if grace is not None and grace <= 0:
        yield invalid_value(f"{path}.terminationGracePeriodSeconds", grace, "must be greater than 0")
    elif grace is not None and readiness:
        yield invalid_value(f"{path}.terminationGracePeriodSeconds", grace, "must not be set for readinessProbes")
    if not readiness and probe.get("successThreshold", 1) != 1:
        yield invalid_value(f"{path}.successThreshold", probe["successThreshold"], "must be 1")


def _handler_causes(handler: KubeObject, path: str, grace: int) -> Iterator[Cause]:
    kinds = [key for key in _HANDLERS if handler.get(key) is not None]
    if not kinds:
        yield required(path, "must specify a handler type")
    for key in kinds[1:]:
        yield not_allowed(f"{path}.{key}", "may not specify more than 1 handler type")
    for key in kinds[:1]:
        action, where = handler[key], f"{path}.{key}"
        if key == "exec" and not action.get("command"):
            yield required(f"{where}.command")
        if key in ("httpGet", "tcpSocket", "grpc"):
            yield from _port_causes(action.get("port", 0), f"{where}.port")
        if key == "httpGet":
            yield from _http_causes(action, where)
        if key == "sleep" and not 0 <= action.get("seconds", 0) <= grace:
            text = f"must be non-negative and less than terminationGracePeriodSeconds ({grace})"
            yield invalid_value(where, action.get("seconds", 0), text)


def _http_causes(action: KubeObject, path: str) -> Iterator[Cause]:
    if action.get("scheme", "HTTP") not in ("HTTP", "HTTPS"):
        yield unsupported_value(f"{path}.scheme", action["scheme"], ("HTTP", "HTTPS"))
    for header in action.get("httpHeaders") or ():
        if not _HEADER_NAME.fullmatch(header["name"]):
            text = (
                "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used "
                "for validation is '[-A-Za-z0-9]+')"
            )
            yield invalid_value(f"{path}.httpHeaders", header["name"], text)


def _port_causes(port: int | str, path: str) -> Iterator[Cause]:
    if isinstance(port, int):
        if not 0 < port < 65536:
            yield invalid_value(path, port, "must be between 1 and 65535, inclusive")
        return
    if len(port) > 15:
        yield invalid_value(path, port, "must be no more than 15 characters")
    if not re.fullmatch(r"[-a-z0-9]+", port):
        yield invalid_value(path, port, "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)")
    if not re.search("[a-z]", port):
        yield invalid_value(path, port, "must contain at least one letter (a-z)")
    if "--" in port:
        yield invalid_value(path, port, "must not contain consecutive hyphens")
    if port[:1] == "-" or port[-1:] == "-":
        yield invalid_value(path, port, "must not begin or end with a hyphen")


def _restart_causes(container: KubeObject, path: str) -> Iterator[Cause]:
    policy, rules = container.get("restartPolicy"), container.get("restartPolicyRules") or ()
    if policy is None and rules:
        yield required(f"{path}.restartPolicy", "must specify restartPolicy when restart rules are used")
        if ".initContainers[" in path:
            return
    elif policy is not None and policy not in _POLICIES:
        yield unsupported_value(f"{path}.restartPolicy", policy, _POLICIES)
    if len(rules) > _MOST_RULES:
        yield too_many(f"{path}.restartPolicyRules", len(rules), _MOST_RULES)
    for index, rule in enumerate(rules):
        where = f"{path}.restartPolicyRules[{index}]"
        if rule["action"] not in ("Restart", "RestartAllContainers"):
            yield unsupported_value(f"{where}.action", rule["action"], ("Restart", "RestartAllContainers"))
        codes = rule.get("exitCodes")
        if codes is None:
            yield required(f"{where}.exitCodes", "must be specified")
            continue
        if codes.get("operator") not in ("In", "NotIn"):
            yield unsupported_value(f"{where}.exitCodes.operator", codes.get("operator"), ("In", "NotIn"))
        if len(codes.get("values") or ()) > _MOST_CODES:
            yield too_many(f"{where}.exitCodes.values", len(codes["values"]), _MOST_CODES)
