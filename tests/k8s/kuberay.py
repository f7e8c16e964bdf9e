"""Models how KubeRay 1.7 handles a RayService: refusals, commands and probes of containers."""

import re
import shlex
from copy import deepcopy
from typing import Any, Final

from tandem.tests.k8s.manifests import Document, Group, Manifests

METRICS_PORT: Final = 8080
"""Of Ray's agent on each node; KubeRay adds it to each container under the name metrics."""
AGENT_PORT: Final = 52365
MAX_SERVICE_NAME: Final = 47
MIN_AUTH_VERSION: Final = (2, 52, 0)

_QUALIFIED: Final = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?")
_DNS1035: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESOURCE_PARAMS: Final = ("num-cpus", "num-gpus", "memory", "resources")


def refusals(manifests: Manifests) -> list[str]:
    """Returns the reasons for which the operator would refuse the RayService."""
    spec, cluster = manifests.service["spec"], manifests.cluster
    name = manifests.service["metadata"]["name"]
    found = [] if _DNS1035.fullmatch(name) and len(name) <= MAX_SERVICE_NAME else [f"name: {name}"]
    for group in manifests.groups.values():
        found += _group_refusals(group)
    head = manifests.groups["head"]
    if spec.get("upgradeStrategy", {}).get("type") not in (None, "None", "NewCluster"):
        found.append("upgradeStrategy.type")  # incremental upgrades lead HTTP alone
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        found.append("rayClusterDeletionDelaySeconds")
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        found.append("headService.metadata.name")
    for variable in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"):
        if variable in head.environment:
            found.append(f"{variable} of the head")
    is_autoscaling = bool(cluster.get("enableInTreeAutoscaling"))
    if head.environment.get("RAY_enable_autoscaler_v2") in ("1", "true") and not is_autoscaling:
        found.append("RAY_enable_autoscaler_v2 without enableInTreeAutoscaling")
    if is_autoscaling and cluster.get("autoscalerOptions", {}).get("version") == "v2":
        for group in manifests.groups.values():
            if group.pod.get("restartPolicy", "Never") != "Never":
                found.append(f"{group.name}: restartPolicy with autoscaler v2")
    if cluster.get("authOptions", {}).get("mode") == "token":
        version = tuple(map(int, cluster.get("rayVersion", "0.0.0").split(".")))
        found += [] if version >= MIN_AUTH_VERSION else ["authOptions.mode: rayVersion"]
    return found


def _group_refusals(group: Group) -> list[str]:
    params = group.spec.get("rayStartParams", {})
    found = []
    if not group.pod.get("containers"):
        found.append(f"{group.name}: no container")
    if group.spec.get("resources") and any(params.get(name) for name in _RESOURCE_PARAMS):
        found.append(f"{group.name}: resources in rayStartParams, too")
    if "labels" in params:
        found.append(f"{group.name}: rayStartParams.labels")
    if group.spec.get("suspend"):
        found.append(f"{group.name}: suspend")
    for key, value in group.spec.get("labels", {}).items():
        if not _QUALIFIED.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            found.append(f"{group.name}: label {key}={value}")
    if group.name == "head" and (params.get("redis-password") or params.get("redis-username")):
        found.append("redis in rayStartParams")
    return found


def fault_tolerant(group: Group, options: Document | None) -> Group:
    """Returns a group with KubeRay's additions for gcsFaultToleranceOptions, if there are any."""
    if options is None:
        return group
    added: list[Document] = [{"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"}]
    spec = deepcopy(group.spec)
    if group.name == "head":
        spec["rayStartParams"]["redis-password"] = "$REDIS_PASSWORD"
        added = [
            {"name": "RAY_external_storage_namespace", "value": "uid"},
            {"name": "RAY_REDIS_ADDRESS", "value": options["redisAddress"]},
            {"name": "REDIS_PASSWORD", **options["redisPassword"]},
        ]
    spec["template"]["spec"]["containers"][0]["env"] += added
    return Group(group.name, spec)


def container_command(group: Group, head: str = "") -> list[str]:
    """Returns the command that KubeRay gives a pod's first container; `head`: its address."""
    params = dict(group.spec.get("rayStartParams", {}))
    params |= {"block": "true", "dashboard-agent-listen-port": str(AGENT_PORT)}
    params.setdefault("metrics-export-port", str(METRICS_PORT))
    if group.name != "head":
        params["address"] = f"{head}:6379"
    resources: dict[str, Any] = group.spec.get("resources", {})
    for name, param in (("CPU", "num-cpus"), ("GPU", "num-gpus")):
        if name in resources:
            params[param] = resources[name]
    if labels := group.spec.get("labels"):
        params["labels"] = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    flags = " ".join(
        f"--{name}"
        if value == "true"
        else f"--{name}={value if value.startswith('$') else shlex.quote(value)}"
        for name, value in sorted(params.items())
    )
    kind = "ray start --head" if group.name == "head" else "ray start"
    return ["/bin/bash", "-c", "--", f"ulimit -n 65536; {kind} {flags}"]


def liveness_command(group: Group) -> list[str]:
    """Returns the probe that KubeRay adds to a container without livenessProbe."""
    urls = [f"http://localhost:{AGENT_PORT}/api/local_raylet_healthz"]
    if group.name == "head":
        urls.append("http://localhost:8265/api/gcs_healthz")
    checks = [f"wget --tries 1 -T 2 -q -O- {url} | grep success" for url in urls]
    return ["bash", "-c", " && ".join(checks)]
