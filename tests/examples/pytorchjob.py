"""JSON schema of a Kubeflow PyTorchJob, as far as examples/pytorchjob.yaml uses one.

The names and types are those of kubeflow.org/v1 in
manifests/base/crds/kubeflow.org_pytorchjobs.yaml of kubeflow/training-operator (commit ee38ae8a,
Apache-2.0), with the values named in its descriptions. Kubernetes silently drops unknown names, so
this schema forbids them. Pod templates have Kubernetes' own schema and are any object here.
"""

from typing import Any

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has no other than the given properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


REPLICA_SPEC = closed(
    "template",
    replicas=INTEGER,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template={"type": "object"},
)

SCHEMA = closed(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata={"type": "object", "required": ["name"]},
    spec=closed(
        "pytorchReplicaSpecs",
        elasticPolicy=closed(
            maxReplicas=INTEGER, maxRestarts=INTEGER, minReplicas=INTEGER, rdzvBackend=TEXT
        ),
        nprocPerNode={"type": "string", "pattern": "^(auto|cpu|gpu|[1-9][0-9]*)$"},
        pytorchReplicaSpecs={
            "type": "object",
            "propertyNames": {"enum": ["Master", "Worker"]},
            "additionalProperties": REPLICA_SPEC,
            "minProperties": 1,
        },
        runPolicy=closed(cleanPodPolicy={"enum": ["All", "Running", "None"]}),
    ),
)
