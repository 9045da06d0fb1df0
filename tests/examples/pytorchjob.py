"""JSON schema of a Kubeflow PyTorchJob.

The names and types are those of kubeflow.org/v1 in
manifests/base/crds/kubeflow.org_pytorchjobs.yaml of kubeflow/training-operator (commit ee38ae8a,
Apache-2.0), with the values named in its descriptions. Kubernetes silently drops unknown names, so
this schema forbids them. Pod templates have Kubernetes' own schema and are any object here.
"""

from typing import Any

INTEGER, TEXT, FLAG = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has no other than the given properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


ELASTIC_POLICY = closed(
    maxReplicas=INTEGER,
    maxRestarts=INTEGER,
    metrics={"type": "array"},
    minReplicas=INTEGER,
    nProcPerNode=INTEGER,
    rdzvBackend=TEXT,
    rdzvConf={"type": "array", "items": closed(key=TEXT, value=TEXT)},
    rdzvHost=TEXT,
    rdzvId=TEXT,
    rdzvPort=INTEGER,
    standalone=FLAG,
)

RUN_POLICY = closed(
    activeDeadlineSeconds=INTEGER,
    backoffLimit=INTEGER,
    cleanPodPolicy={"enum": ["All", "Running", "None"]},
    managedBy=TEXT,
    schedulingPolicy=closed(
        minAvailable=INTEGER,
        minResources={"type": "object"},
        priorityClass=TEXT,
        queue=TEXT,
        scheduleTimeoutSeconds=INTEGER,
    ),
    suspend=FLAG,
    ttlSecondsAfterFinished=INTEGER,
)

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
        elasticPolicy=ELASTIC_POLICY,
        nprocPerNode={"type": "string", "pattern": "^(auto|cpu|gpu|[1-9][0-9]*)$"},
        pytorchReplicaSpecs={
            "type": "object",
            "propertyNames": {"enum": ["Master", "Worker"]},
            "additionalProperties": REPLICA_SPEC,
            "minProperties": 1,
        },
        runPolicy=RUN_POLICY,
    ),
)
