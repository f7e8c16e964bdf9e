"""Tests the manifests of k8s/: each overlay and component renders, is valid, and its parts agree.

Kubernetes, KubeRay, Serve and Tandem must accept it. Each check must complain about a wrong
control.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tandem.cluster.config import load_config
from tandem.proto.errors import InvalidArgument
from tandem.proto.metrics import METRICS
from tandem.tests.k8s import checks
from tandem.tests.k8s.kuberay import container_command, refusals
from tandem.tests.k8s.manifests import (
    ARGS,
    COMPONENTS,
    DOCKERFILE,
    K8S,
    OVERLAYS,
    ROOT,
    Document,
    Manifests,
    need,
    render,
)
from tandem.tests.k8s.schemas import complaints, unknown_keys
from tandem.tests.prometheus import dashboard_expressions

Change = Callable[[Manifests], object]

CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((overlay, ()) for overlay in OVERLAYS),
    *(("cpu-demo", (component,)) for component in COMPONENTS),
    ("gpu-mixed", tuple(name for name in COMPONENTS if name != "auth")),  # which it has already
)


def changed(change: Change, overlay: str = "cpu-demo", *components: str) -> Manifests:
    """Returns changed manifests; writes changes of the parsed Serve configuration back as text."""
    manifests = Manifests(deepcopy(render(overlay, components).documents))
    change(manifests)
    manifests.service["spec"]["serveConfigV2"] = yaml.safe_dump(manifests.serve_config)
    return manifests


def wrong(manifests: Manifests) -> list[str]:
    return [each for rule in checks.RULES for each in rule(manifests)]


@pytest.mark.parametrize(("overlay", "components"), CASES)
def test_it_is_what_kubernetes_kuberay_and_serve_take(
    overlay: str, components: tuple[str, ...]
) -> None:
    manifests = render(overlay, components)
    assert [each for document in manifests.documents for each in complaints(document)] == []
    assert refusals(manifests) == []
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests.documents]
    assert len(set(names)) == len(names)
    assert serve_complaints(manifests) == []


@pytest.mark.parametrize(("overlay", "components"), CASES)
def test_its_parts_agree(overlay: str, components: tuple[str, ...]) -> None:
    assert wrong(render(overlay, components)) == []


def serve_complaints(manifests: Manifests) -> list[str]:
    given = manifests.serve_config
    found = unknown_keys(given, ServeDeploySchema.model_validate(given))
    try:
        load_config(None, manifests.application["args"])
    except InvalidArgument as error:
        found += error.message.splitlines()
    deployments = {each["name"] for each in manifests.application["deployments"]}
    return found + sorted(deployments ^ {"Router", "PrefillPool", "DecodePool"})


def container(manifests: Manifests, name: str) -> Document:
    return manifests.groups[name].container


def args(manifests: Manifests) -> Document:
    found: Document = manifests.application["args"]
    return found


def first(manifests: Manifests, kind: str) -> Document:
    return manifests.of_kind(kind)[0]


SCHEMA_CONTROLS: list[tuple[str, Change, tuple[str, ...]]] = [
    ("replica", lambda m: m.cluster["workerGroupSpecs"][0].update(replica=2), ()),
    ("rayVersions", lambda m: m.cluster.update(rayVersions="2.60.0"), ()),
    ("groupName", lambda m: m.cluster["workerGroupSpecs"][0].pop("groupName"), ()),
    ("imagePullPolice", lambda m: container(m, "decode").update(imagePullPolice="Always"), ()),
    ("containerPort", lambda m: container(m, "router")["ports"][0].pop("containerPort"), ()),
    (
        "targetPorts",
        lambda m: first(m, "Service")["spec"]["ports"][0].update(targetPorts="grpc"),
        (),
    ),
    (
        "minAvailables",
        lambda m: first(m, "PodDisruptionBudget")["spec"].update(minAvailables=1),
        (),
    ),
    (
        "podSelectors",
        lambda m: first(m, "NetworkPolicy")["spec"].update(podSelectors={}),
        ("network-policy",),
    ),
    (
        "serviceNames",
        lambda m: first(m, "StatefulSet")["spec"].update(serviceNames="x"),
        ("gcs-ft",),
    ),
    (
        "redisAddres",
        lambda m: m.cluster["gcsFaultToleranceOptions"].update(redisAddres="x"),
        ("gcs-ft",),
    ),
    ("mode", lambda m: m.cluster["authOptions"].update(mode="password"), ("auth",)),
    ("enable", lambda m: m.cluster["tlsOptions"].update(enable=True), ("tls",)),
    ("dnsName", lambda m: first(m, "Certificate")["spec"].update(dnsName=["x"]), ("tls",)),
    ("versions", lambda m: m.cluster["autoscalerOptions"].update(versions="v2"), ("autoscaling",)),
    ("selectors", lambda m: first(m, "PodMonitor")["spec"].update(selectors={}), ("monitoring",)),
    (
        "exprs",
        lambda m: first(m, "PrometheusRule")["spec"]["groups"][0]["rules"][0].update(exprs="1"),
        ("monitoring",),
    ),
    (
        "backendRef",
        lambda m: first(m, "HTTPRoute")["spec"]["rules"][0].update(backendRef=[]),
        ("gateway",),
    ),
    (
        "backendRef",
        lambda m: first(m, "GRPCRoute")["spec"]["rules"][0].update(backendRef=[]),
        ("gateway",),
    ),
]


@pytest.mark.parametrize(("word", "change", "components"), SCHEMA_CONTROLS)
def test_the_schemas_refuse(word: str, change: Change, components: tuple[str, ...]) -> None:
    found = [
        each
        for document in changed(change, "cpu-demo", *components).documents
        for each in complaints(document)
    ]
    assert word in "\n".join(found)


OPERATOR_CONTROLS: list[tuple[str, Change]] = [
    ("name", lambda m: m.service["metadata"].update(name="t" * 48)),
    ("name", lambda m: m.service["metadata"].update(name="1tandem")),
    ("no container", lambda m: m.groups["decode"].pod.update(containers=[])),
    ("resources in", lambda m: m.groups["decode"].spec["rayStartParams"].update({"num-cpus": "2"})),
    ("labels", lambda m: m.groups["decode"].spec["rayStartParams"].update(labels="a=b")),
    ("label", lambda m: m.groups["decode"].spec["labels"].update({"a/b/c": "d"})),
    ("label", lambda m: m.groups["decode"].spec["labels"].update({"a": "-d"})),
    ("suspend", lambda m: m.groups["decode"].spec.update(suspend=True)),
    (
        "RAY_REDIS_ADDRESS",
        lambda m: container(m, "head")["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "x"}),
    ),
    (
        "RAY_enable",
        lambda m: container(m, "head")["env"].append(
            {"name": "RAY_enable_autoscaler_v2", "value": "1"}
        ),
    ),
    ("redis", lambda m: m.groups["head"].spec["rayStartParams"].update({"redis-password": "x"})),
    (
        "upgrade",
        lambda m: m.service["spec"]["upgradeStrategy"].update(
            type="NewClusterWithIncrementalUpgrade"
        ),
    ),
    ("Delay", lambda m: m.service["spec"].update(rayClusterDeletionDelaySeconds=-1)),
    (
        "headService",
        lambda m: m.cluster["headGroupSpec"].update(headService={"metadata": {"name": "x"}}),
    ),
    ("authOptions", lambda m: m.cluster.update(authOptions={"mode": "token"}, rayVersion="2.51.0")),
    (
        "restartPolicy",
        lambda m: (
            m.cluster.update(enableInTreeAutoscaling=True, autoscalerOptions={"version": "v2"}),
            m.groups["decode"].pod.update(restartPolicy="Always"),
        ),
    ),
]


@pytest.mark.parametrize(("word", "change"), OPERATOR_CONTROLS)
def test_the_operator_refuses(word: str, change: Change) -> None:
    manifests = Manifests(deepcopy(render("cpu-demo").documents))
    change(manifests)
    assert word in "\n".join(refusals(manifests))


SERVE_CONTROLS: list[tuple[str, Change]] = [
    ("http_option", lambda m: m.serve_config.update(http_option={})),
    ("http_options.prt", lambda m: m.serve_config["http_options"].update(prt=1)),
    ("applications.arg", lambda m: m.application.update(arg={})),
    ("num_replica", lambda m: m.application["deployments"][0].update(num_replica=2)),
    ("grace_second: unknown key", lambda m: args(m).update(grace_second=1)),
    ("decode.tp", lambda m: args(m)["decode"].update(tp=0)),
    ("Pool", lambda m: m.application["deployments"].append({"name": "Pool"})),
]


@pytest.mark.parametrize(("word", "change"), SERVE_CONTROLS)
def test_serve_and_the_service_refuse(word: str, change: Change) -> None:
    assert word in "\n".join(serve_complaints(changed(change)))


def set_(target: Document, **values: Any) -> None:
    target.update(values)


def policy(manifests: Manifests, name: str) -> Document:
    (found,) = [
        each for each in manifests.of_kind("NetworkPolicy") if each["metadata"]["name"] == name
    ]
    return found


def without_policies(manifests: Manifests) -> None:
    manifests.documents[:] = [
        each for each in manifests.documents if each["kind"] != "NetworkPolicy"
    ]


ANY_POD: dict[str, Any] = {"namespaceSelector": {}}

CONTROLS: list[tuple[checks.Rule, str, Change]] = [
    (checks.ports_disagree, "cpu-demo", lambda m: set_(args(m)["router"], grpc_port=8083)),
    (checks.ports_disagree, "cpu-demo", lambda m: args(m)["router"].pop("bind")),
    (
        checks.ports_disagree,
        "cpu-demo",
        lambda m: set_(first(m, "Service")["spec"]["ports"][0], targetPort="rpc"),
    ),
    (
        checks.ports_disagree,
        "cpu-demo",
        lambda m: m.groups["decode"].pod["securityContext"].update(sysctls=[]),
    ),
    (checks.ports_disagree, "cpu-demo", lambda m: container(m, "router").pop("readinessProbe")),
    (
        checks.ports_disagree,
        "cpu-demo",
        lambda m: container(m, "router")["ports"][3].update(containerPort=8080),
    ),
    (
        checks.ports_disagree,
        "cpu-demo",
        lambda m: container(m, "decode")["ports"][0].update(containerPort=10500),
    ),
    (checks.labels_disagree, "cpu-demo", lambda m: args(m)["decode"].pop("labels")),
    (
        checks.labels_disagree,
        "cpu-demo",
        lambda m: set_(args(m)["decode"], labels={"tandem.dev/role": "prefill"}),
    ),
    (
        checks.labels_disagree,
        "cpu-demo",
        lambda m: m.groups["router"].spec["template"]["metadata"].update(labels={}),
    ),
    (
        checks.labels_disagree,
        "cpu-demo",
        lambda m: first(m, "Service")["spec"].update(selector={"role": "router"}),
    ),
    (
        checks.labels_disagree,
        "cpu-demo",
        lambda m: m.documents.remove(first(m, "PodDisruptionBudget")),
    ),
    (
        checks.labels_disagree,
        "cpu-demo",
        lambda m: first(m, "PodDisruptionBudget")["spec"].update(minAvailable="50%"),
    ),
    (checks.resources_disagree, "cpu-demo", lambda m: set_(args(m)["decode"], num_cpus=3)),
    (checks.resources_disagree, "cpu-demo", lambda m: set_(args(m)["decode"], num_cpus=1)),
    (checks.resources_disagree, "cpu-demo", lambda m: set_(args(m)["decode"], kv_cache_gb=4)),
    (
        checks.resources_disagree,
        "cpu-demo",
        lambda m: m.groups["head"].spec["resources"].update(CPU="1"),
    ),
    (checks.resources_disagree, "cpu-demo", lambda m: m.groups["decode"].spec.update(replicas=2)),
    (
        checks.resources_disagree,
        "cpu-demo",
        lambda m: container(m, "decode")["resources"]["requests"].update(cpu="1"),
    ),
    (checks.resources_disagree, "gpu-mixed", lambda m: set_(args(m)["prefill"], tp=2)),
    (checks.resources_disagree, "gpu-mixed", lambda m: set_(args(m)["decode"], kv_cache_gb=60)),
    (
        checks.resources_disagree,
        "gpu-mixed",
        lambda m: m.groups["decode"].spec["resources"].update(GPU="1"),
    ),
    (
        checks.resources_disagree,
        "gpu",
        lambda m: container(m, "gpu")["resources"]["limits"].pop("nvidia.com/gpu"),
    ),
    (checks.resources_disagree, "gpu", lambda m: set_(args(m)["prefill"], num_gpus=0.5)),
    (
        checks.resources_disagree,
        "gpu",
        lambda m: set_(m.application["deployments"][1], num_replicas=5),
    ),
    (checks.times_disagree, "cpu-demo", lambda m: set_(args(m), grace_seconds=64)),
    (
        checks.times_disagree,
        "cpu-demo",
        lambda m: m.groups["router"].pod.update(terminationGracePeriodSeconds=60),
    ),
    (
        checks.times_disagree,
        "cpu-demo",
        lambda m: set_(container(m, "decode")["env"][2], value="70"),
    ),
    (
        checks.times_disagree,
        "cpu-demo",
        lambda m: set_(
            container(m, "head")["lifecycle"]["preStop"]["exec"], command=["sleep", "150"]
        ),
    ),
    (
        checks.times_disagree,
        "cpu-demo",
        lambda m: set_(
            container(m, "decode")["lifecycle"]["preStop"]["exec"], command=["sleep", "5"]
        ),
    ),
    (checks.versions_disagree, "cpu-demo", lambda m: m.cluster.update(rayVersion="2.59.0")),
    (
        checks.versions_disagree,
        "cpu-demo",
        lambda m: set_(container(m, "decode"), image="tandem:0.1.0-cpu"),
    ),
    (checks.versions_disagree, "gpu", lambda m: set_(args(m), device="cpu")),
    (checks.files_are_missing, "cpu-demo", lambda m: set_(args(m), identity_file="/etc/identity")),
    (
        checks.files_are_missing,
        "cpu-demo",
        lambda m: set_(args(m), model="/opt/tandem/models/other"),
    ),
    (
        checks.files_are_missing,
        "gpu",
        lambda m: set_(args(m), model="/opt/tandem/models/smollm2-135m-instruct"),
    ),
    (
        checks.files_are_missing,
        "gpu",
        lambda m: set_(args(m), auth={"keys_file": "/etc/tandem/keys.json"}),
    ),
    (checks.files_are_missing, "gpu", lambda m: set_(args(m), auth={"allow_anonymous": True})),
    (
        checks.scaling_disagrees,
        "cpu-demo+autoscaling",
        lambda m: m.application.pop("autoscaling_policy"),
    ),
    (
        checks.scaling_disagrees,
        "cpu-demo+autoscaling",
        lambda m: m.cluster.update(enableInTreeAutoscaling=False),
    ),
    (
        checks.scaling_disagrees,
        "cpu-demo+autoscaling",
        lambda m: m.groups["decode"].spec.update(maxReplicas=1),
    ),
    (
        checks.scaling_disagrees,
        "cpu-demo+autoscaling",
        lambda m: args(m)["router"].pop("replicas"),
    ),
    (
        checks.routes_need_plaintext,
        "cpu-demo+gateway+tls",
        lambda m: args(m)["router"].update(ARGS["tls"]["router"]),
    ),
    (
        checks.monitoring_disagrees,
        "cpu-demo+monitoring+network-policy",
        lambda m: set_(container(m, "head")["env"][1], value="http://grafana.elsewhere.svc"),
    ),
    (
        checks.is_unsafe,
        "cpu-demo",
        lambda m: m.groups["decode"].pod["securityContext"].update(runAsNonRoot=False),
    ),
    (
        checks.is_unsafe,
        "cpu-demo",
        lambda m: container(m, "decode")["securityContext"].pop("capabilities"),
    ),
    (
        checks.is_unsafe,
        "cpu-demo",
        lambda m: m.groups["head"].pod.update(automountServiceAccountToken=True),
    ),
    (
        checks.is_unsafe,
        "cpu-demo+autoscaling",
        lambda m: m.cluster["autoscalerOptions"].pop("securityContext"),
    ),
    (checks.is_open, "cpu-demo", lambda m: m.cluster.pop("authOptions")),
    (checks.is_open, "gpu", without_policies),
    (
        checks.is_open,
        "cpu-demo",
        lambda m: policy(m, "tandem-pods")["spec"]["ingress"][0].update({"from": [ANY_POD]}),
    ),
    (
        checks.is_open,
        "gpu-mixed",
        lambda m: policy(m, "tandem-clients")["spec"]["ingress"][0].pop("ports"),
    ),
]


@pytest.mark.parametrize(("rule", "overlay", "change"), CONTROLS)
def test_the_check_complains(rule: checks.Rule, overlay: str, change: Change) -> None:
    assert rule(changed(change, *overlay.split("+")))


def test_every_check_has_a_control() -> None:
    assert {rule for rule, *_ in CONTROLS} == set(checks.RULES)


def test_the_certificate_and_the_known_hosts_have_all_names_of_the_routers() -> None:
    manifests = render("cpu-demo", ("tls",))
    names = {
        f"{name}{domain}"
        for name in checks.router_services(manifests)
        for domain in ("", ".default", ".default.svc", ".default.svc.cluster.local")
    }
    assert set(first(manifests, "Certificate")["spec"]["dnsNames"]) == names
    assert set(args(manifests)["router"]["host_names"]) == names


def test_a_pod_gets_the_command_of_kuberay() -> None:
    groups = render("gpu-mixed").groups
    (*shell, head), (*_, prefill) = (
        container_command(groups["head"]),
        container_command(groups["prefill"], "10.0.0.1"),
    )
    assert shell == ["/bin/bash", "-c", "--"]
    assert head.startswith(
        "ulimit -n 65536; ray start --head --block --dashboard-agent-grpc-port=6383 "
    )
    assert "--num-cpus=0" in head
    for flag in (
        "--address=10.0.0.1:6379",
        "--num-cpus=16",
        "--num-gpus=4",
        "--labels=tandem.dev/role=prefill",
    ):
        assert flag in prefill


def unknown_metrics(rules: Document) -> set[str]:
    """Returns the metrics in rules that nothing serves."""
    return unknown_in(rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"])


def unknown_in(expressions: Iterable[str]) -> set[str]:
    """Returns the metrics in expressions that nothing serves. Ray serves workers' as ray_NAME."""
    known = {
        metric.name if metric.source == "router" else f"ray_{metric.name}" for metric in METRICS
    }
    used = {
        name for each in expressions for name in re.findall(r"(?:vllm:|(?:ray_)?tandem_)\w+", each)
    }
    assert used
    return {name for name in used if re.sub(r"_(bucket|sum|count)$", "", name) not in known}


def test_the_rules_name_metrics_that_there_are() -> None:
    rules = first(render("cpu-demo", ("monitoring",)), "PrometheusRule")
    assert unknown_metrics(rules) == set()
    control = deepcopy(rules)
    control["spec"]["groups"][0]["rules"][0]["expr"] = (
        "absent(tandem_unbalanced)"  # which is Ray's to serve
    )
    assert unknown_metrics(control) == {"tandem_unbalanced"}


def promtool(rules: Document, folder: Path) -> str:
    """Returns the errors that Prometheus's own check finds in the rules."""
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(rules["spec"]))
    command = [need("promtool", "prometheus"), "check", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stderr


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    rules = first(render("cpu-demo", ("monitoring",)), "PrometheusRule")
    assert promtool(rules, tmp_path) == ""
    for key, value, complaint in (
        ("expr", "absent(tandem_ready == )", "could not parse expression"),
        ("for", "1 minute", "not a valid duration"),
        ("annotations", {"summary": "{{ $labels.instance"}, "unclosed action"),
    ):
        control = deepcopy(rules)
        control["spec"]["groups"][0]["rules"][0][key] = value
        assert complaint in promtool(control, tmp_path)


def test_grafana_finds_the_dashboard() -> None:
    (found,) = (
        each
        for each in render("cpu-demo", ("monitoring",)).of_kind("ConfigMap")
        if "grafana_dashboard" in each["metadata"]["labels"]
    )
    (text,) = found["data"].values()
    assert json.loads(text) == json.loads(
        (K8S / "components" / "monitoring" / "tandem-dashboard.json").read_text()
    )


def test_the_dashboard_names_metrics_that_there_are_and_no_sum_that_ray_estimates() -> None:
    expressions = dashboard_expressions("m")
    assert unknown_in(expressions) == set()
    assert not [each for each in expressions if re.search(r"ray_tandem_\w+_sum\b", each)]


def hadolint(dockerfile: Path) -> str:
    command = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [command, dockerfile], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


def test_the_dockerfile_is_clean(tmp_path: Path) -> None:
    assert hadolint(DOCKERFILE) == ""
    control = tmp_path / "Dockerfile"
    control.write_text(DOCKERFILE.read_text() + "RUN cd /opt && sudo ls\n")
    assert "DL3003" in hadolint(control)


def test_the_image_has_the_pinned_versions_a_user_of_its_own_and_each_package() -> None:
    text = DOCKERFILE.read_text()
    assert '--constraint constraints.txt ".[otel]"' in text
    assert "USER 1000:1000" in text.partition("AS runtime")[2].partition("AS demo")[0]
    assert text.rstrip().endswith("USER 1000:1000")
    kept = {
        line[1:]
        for line in (K8S / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"proto"}
    assert packages - {"tests"} <= kept
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.parametrize("torch_index", ["", "https://download.pytorch.org/whl/cpu"])
def test_only_the_image_for_gpus_has_the_library_of_their_metrics(
    torch_index: str, tmp_path: Path
) -> None:
    """Runs the step that installs, with stand-ins for its commands."""
    step = re.search(r"^RUN (python3\.11 -m venv .*?[^\\])$", DOCKERFILE.read_text(), re.M | re.S)
    assert step
    for command in ("python3.11", "pip"):
        path = tmp_path / command
        path.write_text('#!/bin/sh\necho "$@"\n')
        path.chmod(0o755)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", step[1]],
        env={"PATH": f"{tmp_path}:/bin", "TORCH_INDEX": torch_index},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (" nvidia-ml-py==" in done.stdout) == (not torch_index)


def test_what_is_missing_fails_in_ci_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install kubernetes-client"):
        need("kubectl", "kubernetes-client")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="kubectl is missing"):
        need("kubectl", "kubernetes-client")
