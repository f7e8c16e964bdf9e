"""Checks that the manifests agree: functions from manifests to complaints."""

import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, Final

from tandem.cluster.config import (
    STOP_MARGIN_SECONDS,
    PoolConfig,
    RouterConfig,
    TandemConfig,
    load_config,
)
from tandem.cluster.scaling.policy import ScalingPolicy
from tandem.cluster.serve.status import ANSWER_SECONDS
from tandem.cluster.service_url import FIND_SECONDS
from tandem.tests.k8s.kuberay import AGENT_PORT, METRICS_PORT
from tandem.tests.k8s.manifests import DOCKERFILE, ROOT, Group, Manifests

Rule = Callable[[Manifests], list[str]]

EPHEMERAL: Final = range(32768, 61000)
"""The kernel's default range of ports for outgoing connections."""
DRAIN_ANSWER_SECONDS: Final = FIND_SECONDS + ANSWER_SECONDS
"""How much longer than its --timeout `tandem drain` may take: to find the workers, and to wait for
their answers.
"""
MARGIN_SECONDS: Final = 10.0
GIB: Final = 2**30
UNPRIVILEGED: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""What Pod Security `restricted` demands of each container, beside the pod's own context."""
DEMO_MODELS: Final = [
    f"{home}/models/{name}"
    for home, name in re.findall(
        r"^RUN TANDEM_HOME=(\S+) tandem model get (\S+)$", DOCKERFILE.read_text(), re.MULTILINE
    )
]
"""Folders of the image's target demo."""


def config_of(manifests: Manifests) -> TandemConfig:
    return load_config(None, manifests.application["args"])


def sections(manifests: Manifests) -> Iterator[tuple[Group, str, RouterConfig | PoolConfig]]:
    """Yields each deployment with its part of the configuration and the groups where it may run."""
    config = config_of(manifests)
    for section, deployment in (
        (config.router, "Router"),
        (config.prefill, "PrefillPool"),
        (config.decode, "DecodePool"),
    ):
        for group in manifests.groups.values():
            if selects(section.labels, group.spec["labels"]):
                yield group, deployment, section


def worker_groups(manifests: Manifests) -> list[Group]:
    return [each for name, each in manifests.groups.items() if name not in ("head", "router")]


def ports_disagree(manifests: Manifests) -> list[str]:
    config, router = config_of(manifests), manifests.groups["router"]
    found = []
    listens = {
        "grpc": config.router.grpc_port,
        "http": config.router.http_port,
        "ops": config.router.ops_port,
    }
    for name, port in listens.items():
        if router.ports.get(name) != port:
            found.append(
                f"router listens on {port} for {name}, its pod has {router.ports.get(name)}"
            )
    if config.router.bind != "0.0.0.0":
        found.append("kubectl port-forward reaches loopback alone, which routers must bind")
    for service in manifests.of_kind("Service"):
        selected = [
            each
            for each in manifests.groups.values()
            if selects(service["spec"]["selector"], each.labels)
        ]
        for port in service["spec"]["ports"]:
            found += [
                f"{each.name} has no port {port['targetPort']}"
                for each in selected
                if port["targetPort"] not in each.ports
            ]
    for group in manifests.groups.values():
        params = group.spec["rayStartParams"]
        pinned = [
            int(value)
            for name, value in params.items()
            if name.endswith("-port") and "worker" not in name
        ]
        taken = [*group.ports.values(), *pinned, METRICS_PORT, AGENT_PORT]
        found += [
            f"{group.name}: port {port} twice"
            for port in {port for port in taken if taken.count(port) > 1}
        ]
        workers = range(int(params["min-worker-port"]), int(params["max-worker-port"]) + 1)
        found += [
            f"{group.name}: port {port} is one of Ray's workers"
            for port in taken
            if port in workers
        ]
        sysctls = {each["name"]: each["value"] for each in group.pod["securityContext"]["sysctls"]}
        reserved = re.findall(r"\d+", sysctls.get("net.ipv4.ip_local_reserved_ports", ""))
        loose = {port for port in taken if port in EPHEMERAL} - set(map(int, reserved))
        found += [f"{group.name}: port {port} may be taken by a connection" for port in loose]
        probe = group.container.get("readinessProbe", {}).get("httpGet")
        if (group.name == "router") != (probe is not None):
            found.append(f"{group.name}: readiness")
        elif probe and (probe["path"] != "/ready" or probe["port"] not in group.ports):
            found.append(f"{group.name}: its readinessProbe asks {probe}")
    return found


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def pod_labels(manifests: Manifests) -> list[dict[str, str]]:
    """Returns the labels of each kind of pod."""
    stateful = manifests.of_kind("StatefulSet")
    return [group.labels for group in manifests.groups.values()] + [
        each["spec"]["template"]["metadata"]["labels"] for each in stateful
    ]


def labels_disagree(manifests: Manifests) -> list[str]:
    found = []
    groups = manifests.groups.values()
    for group in groups:
        if not selects(group.spec["labels"], group.spec["template"]["metadata"]["labels"]):
            found.append(f"{group.name}: Ray's labels and the pod's differ")
    places = [(deployment, group.name) for group, deployment, _ in sections(manifests)]
    for deployment in ("Router", "PrefillPool", "DecodePool"):
        own = [name for each, name in places if each == deployment]
        if len(own) != 1 or (own == ["router"]) != (deployment == "Router"):
            found.append(f"{deployment} may run in the groups {own}")
    found += [
        f"{group.name}: no deployment runs there"
        for group in groups
        if group.name != "head" and group.name not in [name for _, name in places]
    ]
    pods = pod_labels(manifests)
    for document in manifests.documents:
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        selector = selector.get("matchLabels", selector) if selector else None
        if selector and not any(selects(selector, labels) for labels in pods):
            found.append(f"{document['kind']} {document['metadata']['name']} selects no pod")
    budgets = [
        each["spec"]["selector"]["matchLabels"] for each in manifests.of_kind("PodDisruptionBudget")
    ]
    for group in groups:
        if sum(selects(selector, group.labels) for selector in budgets) != 1:
            found.append(f"{group.name}: not in one PodDisruptionBudget")
    found += [
        f"{each['metadata']['name']}: Kubernetes takes only minAvailable for pods of a RayCluster"
        for each in manifests.of_kind("PodDisruptionBudget")
        if not isinstance(each["spec"].get("minAvailable"), int)
    ]
    return found


def router_services(manifests: Manifests) -> set[str]:
    """Returns the names of the Services that lead to the routers."""
    labels = manifests.groups["router"].labels
    return {
        each["metadata"]["name"]
        for each in manifests.of_kind("Service")
        if selects(each["spec"]["selector"], labels)
    }


def resources_disagree(manifests: Manifests) -> list[str]:
    config = config_of(manifests)
    found = []
    if manifests.groups["head"].spec["resources"] != {"CPU": "0"}:
        found.append("head: a replica could run there")
    overrides = {
        each["name"]: each["num_replicas"] for each in manifests.application["deployments"]
    }
    placed: dict[str, list[tuple[float, RouterConfig | PoolConfig]]] = {}
    for group, deployment, section in sections(manifests):
        per_pod = (overrides.get(deployment) or 0) / group.replicas
        placed.setdefault(group.name, []).append((per_pod, section))
        if per_pod < 1 or per_pod % 1:
            found.append(
                f"{deployment}: {overrides.get(deployment)} replicas for {group.replicas} pods"
            )
    if config.device == "cuda":  # beside weights whose size a manifest does not know
        found += [
            f"{role}.kv_cache_gb: may not fit; without it, a rank takes what its GPU has left"
            for role, pool in config.pools.items()
            if pool.kv_cache_gb is not None
        ]
    for name, replicas in placed.items():
        found += _resources_of(manifests.groups[name], replicas, config.device)
    return found


def _resources_of(
    group: Group, replicas: list[tuple[float, RouterConfig | PoolConfig]], device: str
) -> list[str]:
    """Complains about a group's pods, whose replicas are given as number and section."""
    found = []
    limits = group.container["resources"]["limits"]
    requests = group.container["resources"]["requests"]
    cpus = float(group.spec["resources"]["CPU"])
    gpus = int(group.spec["resources"].get("GPU", 0))
    # Of each replica: its number, its CPUs, its GPUs, and its GiB of KV cache in host memory.
    needs = [(number, *_needs(section, device)) for number, section in replicas]
    if {gpus} != {int(each.get("nvidia.com/gpu", 0)) for each in (limits, requests)}:
        found.append(
            f"{group.name}: Ray has {gpus} GPUs, the pod {limits.get('nvidia.com/gpu', 0)}"
        )
    if (needed := sum(number * own for number, _, own, _ in needs)) != gpus:
        found.append(f"{group.name}: its replicas need {needed:g} GPUs, and there are {gpus}")
    if cpus > float(requests["cpu"]):
        found.append(f"{group.name}: Ray has {cpus:g} CPUs, the pod {requests['cpu']}")
    left = cpus - sum(number * own for number, own, _, _ in needs)
    if not 0 <= left < min(own for _, own, _, _ in needs):
        found.append(f"{group.name}: {left:g} of {cpus:g} CPUs are left beside its replicas")
    if limits["memory"] != requests["memory"]:
        found.append(f"{group.name}: its memory is not its own")
    if sum(number * own for number, _, _, own in needs) * GIB > memory(limits["memory"]) / 2:
        found.append(f"{group.name}: the KV cache leaves less than half of the memory")
    if not group.spec["minReplicas"] <= group.replicas <= group.spec["maxReplicas"]:
        found.append(f"{group.name}: replicas")
    return found


def _needs(section: RouterConfig | PoolConfig, device: str) -> tuple[float, float, float]:
    """Returns CPUs, GPUs and GiB of KV cache in host memory of a replica."""
    if isinstance(section, RouterConfig):
        return section.num_cpus, 0.0, 0.0
    on_gpu = device == "cuda"
    kv_gb = section.kv_host_gb + (0.0 if on_gpu else section.kv_cache_gb or 1.0)
    return section.num_cpus * section.tp, section.tp * section.num_gpus * on_gpu, kv_gb * section.tp


def memory(text: str) -> int:
    return int(text.removesuffix("Gi")) * GIB


def times_disagree(manifests: Manifests) -> list[str]:
    """Complains unless each step of the end of a pod has its time within the next one's."""
    config = config_of(manifests)
    stop = config.grace_seconds + STOP_MARGIN_SECONDS
    found, longest = [], 0.0
    for group in manifests.groups.values():
        pre_stop = pre_stop_seconds(group)
        drain = float(group.environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] or 0)
        total = pre_stop + drain + MARGIN_SECONDS
        if total > group.pod["terminationGracePeriodSeconds"]:
            found.append(f"{group.name}: is killed before {total:g} seconds")
        if group.name != "head":
            longest = max(longest, pre_stop + drain)
            if drain < stop + MARGIN_SECONDS:
                found.append(
                    f"{group.name}: Ray ends it before its replicas have had {stop:g} seconds"
                )
    if pre_stop_seconds(manifests.groups["head"]) < longest:
        found.append(f"head: ends before the others, which take {longest:g} seconds")
    for group in worker_groups(manifests):
        if config.grace_seconds > pre_stop_seconds(group) - DRAIN_ANSWER_SECONDS:
            found.append(f"{group.name}: drains for less than grace_seconds")
    return found


def pre_stop_seconds(group: Group) -> float:
    command = " ".join(group.container["lifecycle"]["preStop"]["exec"]["command"])
    if slept := re.fullmatch(r"sleep (\d+)", command):
        return float(slept[1])
    drained = re.search(r"tandem drain .*--timeout (\d+)$", command)
    assert drained, command
    return float(drained[1]) + DRAIN_ANSWER_SECONDS


def versions_disagree(manifests: Manifests) -> list[str]:
    pinned = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = []
    if manifests.cluster["rayVersion"] != pinned["ray"]:
        found.append(
            f"rayVersion is {manifests.cluster['rayVersion']}, the image has Ray {pinned['ray']}"
        )
    images = {group.container["image"] for group in manifests.groups.values()}
    variant = "cuda" if config_of(manifests).device == "cuda" else "(cpu|demo)"
    if len(images) != 1 or not re.fullmatch(
        rf"tandem:{re.escape(version)}-{variant}", next(iter(images))
    ):
        found.append(f"images: {sorted(images)}")
    return found


def scaling_disagrees(manifests: Manifests) -> list[str]:
    """Complains unless a scaled pool has the application's policy and pods that follow."""
    policy = manifests.application.get("autoscaling_policy", {}).get("policy_function")
    found = []
    is_scaled = any(pool.autoscaling for pool in config_of(manifests).pools.values())
    for group, deployment, section in sections(manifests):
        if isinstance(section, RouterConfig) or section.autoscaling is None:
            if is_scaled and "replicas" not in section.model_fields_set:
                found.append(f"{deployment}: num_replicas is ignored, and args has no replicas")
            continue
        if policy != f"{ScalingPolicy.__module__}:{ScalingPolicy.__name__}":
            found.append(f"{deployment}: the policy of the application is {policy}")
        if not manifests.cluster.get("enableInTreeAutoscaling"):
            found.append(f"{deployment}: no pods follow it")
        if (
            not group.spec["minReplicas"]
            <= section.replicas
            <= section.max_replicas
            <= group.spec["maxReplicas"]
        ):
            found.append(
                f"{deployment}: {section.replicas} to {section.max_replicas} workers, other pods"
            )
    return found


def routes_need_plaintext(manifests: Manifests) -> list[str]:
    """Complains about routes to routers with TLS: a Gateway sends plaintext to its backends."""
    if config_of(manifests).router.tls is None:
        return []
    return [
        f"{kind} {route['metadata']['name']}: router.tls refuses the Gateway's plaintext"
        for kind in ("HTTPRoute", "GRPCRoute")
        for route in manifests.of_kind(kind)
    ]


def monitoring_disagrees(manifests: Manifests) -> list[str]:
    """Complains unless the head may reach the Prometheus and the Grafana that it is told of."""
    head, namespace = manifests.groups["head"], "kubernetes.io/metadata.name"
    policies = [each["spec"] for each in manifests.of_kind("NetworkPolicy")]
    policies = [
        each
        for each in policies
        if "Egress" in each["policyTypes"]
        and selects(each["podSelector"]["matchLabels"], head.labels)
    ]
    peers = [
        peer for each in policies for rule in each.get("egress", ()) for peer in rule.get("to", ())
    ]
    open_to = {
        peer.get("namespaceSelector", {}).get("matchLabels", {}).get(namespace) for peer in peers
    }
    told = [head.environment.get(name) for name in ("RAY_PROMETHEUS_HOST", "RAY_GRAFANA_HOST")]
    return [
        f"head: may not reach {url}"
        for url in told
        if url and policies and url.split(".")[1] not in open_to
    ]


def files_are_missing(manifests: Manifests) -> list[str]:
    """Complains about files in the arguments that neither the pods nor their image contain."""
    args = manifests.application["args"]
    found = []
    for path in paths_in(args):
        if path in DEMO_MODELS and all(
            each.container["image"].endswith("-demo") for each in manifests.groups.values()
        ):
            continue
        readers = (
            ("router",)
            if path.startswith(("/etc/tandem/keys", "/etc/tandem/tls"))
            else tuple(manifests.groups)
        )
        for name in readers:
            mounts = manifests.groups[name].mounts
            if not any(path.startswith(mount + "/") for mount in mounts):
                found.append(f"{name}: has no {path}")
    has_key = {"TANDEM_API_KEY" in group.environment for group in worker_groups(manifests)}
    if has_key != {args["auth"].get("keys_file") is not None}:
        found.append("preStop asks the status page, which needs a key where clients need one")
    for group in manifests.groups.values():
        command = " ".join(group.container["lifecycle"]["preStop"]["exec"]["command"])
        if "--identity" in command and f"--identity {args['identity_file']} " not in command:
            found.append(f"{group.name}: preStop has another identity")
    return found


def paths_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from paths_in(each)
    elif isinstance(value, str) and value.startswith("/"):
        yield value


def is_unsafe(manifests: Manifests) -> list[str]:
    """Complains about a pod with more rights than it needs."""
    found = []
    pods = [(name, group.pod) for name, group in manifests.groups.items()]
    pods += [
        (each["metadata"]["name"], each["spec"]["template"]["spec"])
        for each in manifests.of_kind("StatefulSet")
    ]
    for name, pod in pods:
        own = pod["securityContext"]
        if not own.get("runAsNonRoot") or own.get("seccompProfile") != {"type": "RuntimeDefault"}:
            found.append(f"{name}: its user")
        for container in pod["containers"]:
            context = container["securityContext"]
            if context != {**UNPRIVILEGED, "readOnlyRootFilesystem": True}:
                found.append(f"{name}: {context}")
        if pod.get("automountServiceAccountToken") and not (
            name == "head" and manifests.cluster.get("enableInTreeAutoscaling")
        ):
            found.append(f"{name}: has a token of the API server")
    if manifests.cluster.get("enableInTreeAutoscaling"):
        context = manifests.cluster["autoscalerOptions"].get("securityContext")
        if context != UNPRIVILEGED:
            found.append(f"autoscaler: {context}")
    return found


def is_open(manifests: Manifests) -> list[str]:
    """Complains about a Ray without token, pods open to all, and ports that no client needs."""
    found = []
    if manifests.cluster.get("authOptions", {}).get("mode") != "token":
        found.append("Ray runs code of whoever reaches it: authOptions.mode must be token")
    policies = [each["spec"] for each in manifests.of_kind("NetworkPolicy")]
    policies = [each for each in policies if "Ingress" in each["policyTypes"]]
    for group in manifests.groups.values():
        own = [
            each for each in policies if selects(each["podSelector"]["matchLabels"], group.labels)
        ]
        if not own:
            found.append(f"{group.name}: any pod may reach it")
        for rule in (rule for each in own for rule in each["ingress"]):
            from_all = any(
                peer.get("podSelector") is None and not any(peer.values()) for peer in rule["from"]
            )
            ports = {port["port"] for port in rule.get("ports", ())}
            if from_all and not ({"grpc", "http"} >= ports != set()):
                found.append(
                    f"{group.name}: any pod may reach its ports {sorted(ports) or 'of all kinds'}"
                )
    return found


RULES: Final[tuple[Rule, ...]] = (
    *(
        ports_disagree,
        labels_disagree,
        resources_disagree,
        times_disagree,
        versions_disagree,
        files_are_missing,
    ),
    *(scaling_disagrees, routes_need_plaintext, monitoring_disagrees, is_unsafe, is_open),
)
