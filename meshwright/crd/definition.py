"""The CustomResourceDefinition of ParallelTrainingJob."""

from __future__ import annotations

import copy
import functools
from typing import Any

from meshwright.api import labels
from meshwright.api.objects import MAX_JOB_NAME
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.crd.rule_placement import add_rule, fill_defaults
from meshwright.crd.structural_schema import Schema, structural_schema
from meshwright.rules.edits import IMMUTABLE
from meshwright.rules.validation import SPEC_RULES
from meshwright.schedules.schedule import registered

SELECTABLE = (".spec.suspend", ".spec.priorityClassName", ".spec.managedBy", ".spec.model.preset")
"""Fields by which the API server filters: `kubectl get ptj --field-selector spec.suspend=true`."""

_NAME_RULE = {
    "rule": f"size(self.metadata.name) <= {MAX_JOB_NAME} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    "message": f"`metadata.name` must be at most {MAX_JOB_NAME} characters, start with a letter and contain only "
    "lower-case letters, digits and `-`, because names of pods and hosts are derived from it",
}


def custom_resource_definition() -> dict[str, Any]:
    """The CRD as the API server takes it.

    Raises:
        SchemaError: a model of the API has no structural form.
    """
    schedules = tuple(kind.order.value for kind in registered())
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": labels.DEFINITION},
        "spec": {
            "group": labels.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": labels.KIND,
                "listKind": f"{labels.KIND}List",
                "plural": labels.PLURAL,
                "singular": labels.SINGULAR,
                "shortNames": [labels.SHORT_NAME],
                "categories": [labels.CATEGORY],
            },
            "versions": [
                {
                    "name": labels.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": copy.deepcopy(_root_schema(schedules))},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": _printer_columns(),
                    "selectableFields": [{"jsonPath": path} for path in SELECTABLE],
                }
            ],
        },
    }


@functools.cache
def _root_schema(schedules: tuple[str, ...]) -> Schema:
    spec = structural_schema(ParallelTrainingJobSpec)
    spec["properties"]["parallelism"]["properties"]["schedule"]["enum"] = list(schedules)
    for rule in SPEC_RULES:
        # Without a reason the API server uses FieldValueInvalid. To state it would take 5 KiB.
        add_rule(spec, rule.cel, {"message": rule.message, "fieldPath": f".{rule.field}"})
    fill_defaults(spec)
    status = structural_schema(ParallelTrainingJobStatus, defaults=False)
    # The one default, so that a new job is never mistaken for one that the operator has observed.
    status["default"] = {"observedGeneration": -1}
    return {
        "type": "object",
        "description": "A parallel training run of one model over many GPUs.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this representation of the object."},
            "kind": {"type": "string", "description": "Kind of the object."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": [
            _NAME_RULE,
            *(
                {
                    "rule": immutable.cel,
                    "message": immutable.message,
                    "fieldPath": f".spec.{immutable.field}",
                    "reason": "FieldValueForbidden",
                }
                for immutable in IMMUTABLE
            ),
        ],
    }


def _printer_columns() -> list[dict[str, Any]]:
    ready = '.status.conditions[?(@.type=="Ready")]'
    columns = [
        ("Ready", "string", ".status.readyRanks", 0, "Ranks that train, of all."),
        ("Status", "string", f"{ready}.reason", 0, "Reason of the Ready condition."),
        ("Plan", "string", ".status.plan.summary", 0, "Parallel degrees in effect."),
        ("Step", "integer", ".status.step", 0, "Last finished step."),
        ("Of", "integer", ".status.totalSteps", 0, "Steps of the run."),
        ("Loss", "string", ".status.loss", 0, "Mean loss per token of that step."),
        ("Restarts", "integer", ".status.restartCount", 0, "Restarts of all causes."),
        ("Ckpt-Age", "date", ".status.checkpoint.time", 1, "Age of the newest durable checkpoint."),
        ("Age", "date", ".metadata.creationTimestamp", 0, "Age of the job."),
        ("Tokens/s", "integer", ".status.tokensPerSecond", 1, "Recent throughput of the whole job."),
        ("ETA-Seconds", "integer", ".status.etaSeconds", 1, "Estimated time to the last step."),
        ("Message", "string", f"{ready}.message", 0, "Message of the Ready condition."),
    ]
    return [
        {"name": name, "type": kind, "jsonPath": path, "priority": priority, "description": text}
        for name, kind, path, priority, text in columns
    ]
