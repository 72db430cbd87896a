"""What Kubernetes takes in the manifests of the examples: the keys, types and values of the parts that they use.

Written down from the schemas of the custom resources, of which `SCHEMAS` names versions and releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Schema(NamedTuple):
    """What a custom resource takes.

    Attributes:
        checked: Which definition it is written down from, as the manifests say.
        fields: The keys that the examples use with the types of their values. A set holds all values, a list the type
            of all items, `MAP` one of all values.
        required: Keys that must be there, as paths.
    """

    checked: str
    fields: dict[str, Any]
    required: tuple[str, ...]


MAP = "*"
QUANTITY = (int, str)
METADATA = {"name": str, "namespace": str, "labels": {MAP: str}, "annotations": {MAP: str}}
CONTAINER = {
    "name": str, "image": str, "command": [str], "args": [str],
    "env": [{"name": str, "value": str}],
    "resources": {"limits": {MAP: QUANTITY}, "requests": {MAP: QUANTITY}},
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool, "subPath": str}],
}  # fmt: skip
POD_TEMPLATE = {
    "metadata": METADATA,
    "spec": {
        "restartPolicy": {"Always", "OnFailure", "Never"},
        "terminationGracePeriodSeconds": int,
        "subdomain": str,
        "nodeSelector": {MAP: str},
        "containers": [CONTAINER],
        "volumes": [
            {
                "name": str,
                "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
                "emptyDir": {"medium": str, "sizeLimit": QUANTITY},
            }
        ],
    },
}
POD_REQUIRED = ("spec.containers.name", "spec.volumes.name", "spec.volumes.persistentVolumeClaim.claimName")
CONTAINER_REQUIRED = ("env.name", "volumeMounts.name", "volumeMounts.mountPath")
REPLICAS = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": POD_TEMPLATE,
}


def _at(path: str, *keys: str) -> tuple[str, ...]:
    return tuple(f"{path}.{key}" for key in keys)


def _pod_required(path: str) -> tuple[str, ...]:
    return (*_at(path, *POD_REQUIRED), *_at(f"{path}.spec.containers", *CONTAINER_REQUIRED))


JOBSET_POD = "spec.replicatedJobs.template.spec.template"
SCHEMAS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): Schema(
        "JobSet's CRD: v1alpha2 of release 0.12.0",
        {
            "spec": {
                "network": {
                    "enableDNSHostnames": bool,
                    "subdomain": str,
                    "publishNotReadyAddresses": bool,
                },
                "failurePolicy": {
                    "maxRestarts": int,
                    "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
                },
                "replicatedJobs": [
                    {
                        "name": str,
                        "replicas": int,
                        "template": {
                            "metadata": METADATA,
                            "spec": {
                                "completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int,
                                "template": POD_TEMPLATE,
                            },
                        },
                    }
                ],
            }
        },
        (
            *_at("spec.replicatedJobs", "name", "template"),
            f"{JOBSET_POD}.spec.containers",
            JOBSET_POD,
            *_pod_required(JOBSET_POD),
        ),
    ),
    ("kubeflow.org/v1", "PyTorchJob"): Schema(
        "the operator's CRD: v1 of release 1.9.0",
        {
            "spec": {
                "nprocPerNode": str,
                "elasticPolicy": {"minReplicas": int, "maxReplicas": int, "maxRestarts": int, "nProcPerNode": int},
                "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int, "ttlSecondsAfterFinished": int},
                "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS},
            }
        },
        (
            "spec.pytorchReplicaSpecs",
            *_at("spec.pytorchReplicaSpecs.Master.template.spec", "containers"),
            *_pod_required("spec.pytorchReplicaSpecs.Master.template"),
            *_at("spec.pytorchReplicaSpecs.Worker.template.spec", "containers"),
            *_pod_required("spec.pytorchReplicaSpecs.Worker.template"),
        ),
    ),
}  # fmt: skip


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what Kubernetes would refuse, or drop, in a manifest."""
    schema = SCHEMAS[manifest["apiVersion"], manifest["kind"]]
    fields = {"apiVersion": str, "kind": str, "metadata": METADATA, **schema.fields}
    return [*_differences("", manifest, fields), *_missing(manifest, schema.required)]


def _differences(path: str, value: Any, expected: Any) -> Iterator[str]:
    if isinstance(expected, set):
        if value not in expected:
            yield f"{path} is {value!r}, not one of {sorted(expected)}"
    elif isinstance(expected, dict):
        if not isinstance(value, dict):
            yield f"{path} is {value!r}, not a mapping"
            return
        for key, each in value.items():
            if MAP not in expected and key not in expected:
                yield f"{path}.{key} is unknown"
            else:
                yield from _differences(f"{path}.{key}", each, expected.get(key, expected.get(MAP)))
    elif isinstance(expected, list):
        if not isinstance(value, list):
            yield f"{path} is {value!r}, not a list"
            return
        for each in value:
            yield from _differences(path, each, expected[0])
    elif not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        yield f"{path} is {value!r}, of another type"


def _missing(manifest: dict[str, Any], required: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of required keys that are missing in a mapping that is there."""
    for path in required:
        places: list[Any] = [manifest]
        *parents, key = path.split(".")
        for name in parents:
            found = [place[name] for place in places if name in place]
            places = [each for value in found for each in (value if isinstance(value, list) else [value])]
        if any(key not in place for place in places):
            yield f".{path} is missing"
