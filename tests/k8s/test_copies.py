"""Tests a second service, made by the recipe in docs/kubernetes.md, beside the first.

Each of the two must have its own pods, Redis, routes and certificate.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from tandem.tests.k8s import checks
from tandem.tests.k8s.kuberay import fault_tolerant, refusals
from tandem.tests.k8s.manifests import COMPONENTS, Document, Manifests, render

ALL = ("gpu-mixed", tuple(name for name in COMPONENTS if name != "auth"))  # which it has already
CASES: tuple[tuple[str, tuple[str, ...]], ...] = (("cpu-demo", ()), ("gpu", ("gcs-ft",)), ALL)


def selectors(part: Any) -> Iterator[dict[str, str]]:
    """Yields the labels of each selector of pods in a part of a document."""
    if isinstance(part, list):
        for each in part:
            yield from selectors(each)
    elif isinstance(part, dict):
        for key, value in part.items():
            if key in ("selector", "podSelector"):
                yield value.get("matchLabels", value)
            else:
                yield from selectors(value)


def ids(manifests: Manifests) -> set[str]:
    return {f"{each['kind']} {each['metadata']['name']}" for each in manifests.documents}


def services_in_use(manifests: Manifests) -> Iterator[str]:
    """Yields the Services that the head and the routes name."""
    options = manifests.cluster.get("gcsFaultToleranceOptions")
    head = fault_tolerant(manifests.groups["head"], options)
    if address := head.environment.get("RAY_REDIS_ADDRESS"):
        yield address.removesuffix(":6379")
    for kind in ("HTTPRoute", "GRPCRoute"):
        for route in manifests.of_kind(kind):
            for rule in route["spec"]["rules"]:
                yield from (backend["name"] for backend in rule["backendRefs"])


def secrets_in_use(manifests: Manifests) -> set[str]:
    volumes = manifests.groups["router"].pod["volumes"]
    return {each["secret"]["secretName"] for each in volumes if "secret" in each}


def mixed(one: Manifests, other: Manifests) -> list[str]:
    """Complains about each object of a service that belongs to another one or leads there."""
    found = [f"{each}: in both" for each in sorted(ids(one) & ids(other))]
    pods = checks.pod_labels(other)
    for document in one.documents:
        for selector in selectors(document.get("spec")):
            if any(checks.selects(selector, labels) for labels in pods):
                name = document["metadata"]["name"]
                found.append(f"{document['kind']} {name} selects others' pods by {selector}")
    names = {each["metadata"]["name"] for each in one.of_kind("Service")}
    found += [f"{each}: no Service" for each in services_in_use(one) if each not in names]
    for certificate in one.of_kind("Certificate"):
        secret = certificate["spec"]["secretName"]
        if secret in secrets_in_use(other) or secret not in secrets_in_use(one):
            found.append(f"Certificate: {secret} is not the Secret of its own routers")
        missing = checks.router_services(one) - set(certificate["spec"]["dnsNames"])
        found += [f"Certificate: not for {each}" for each in sorted(missing)]
    return found


@pytest.mark.parametrize(("overlay", "components"), CASES)
def test_a_copy_and_the_first_service_do_not_mix(overlay: str, components: tuple[str, ...]) -> None:
    first, copy = render(overlay, components), render(overlay, components, is_copy=True)
    assert len(first.documents) == len(copy.documents)
    assert mixed(first, copy) == []
    assert mixed(copy, first) == []
    assert refusals(copy) == []
    assert [each for rule in checks.RULES for each in rule(copy)] == []


def policy_peer(manifests: Manifests) -> Document:
    """Returns the pods that the policy of Redis admits."""
    (found,) = [
        each
        for each in manifests.of_kind("NetworkPolicy")
        if each["metadata"]["name"].startswith("tandem-redis")
    ]
    labels: Document = found["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    return labels


def spec(manifests: Manifests, kind: str) -> Document:
    found: Document = manifests.of_kind(kind)[0]["spec"]
    return found


NAME = "app.kubernetes.io/name"
CONTROLS: list[tuple[str, Callable[[Manifests], object]]] = [
    ("in both", lambda m: m.service["metadata"].update(name="tandem")),
    ("Service", lambda m: spec(m, "Service")["selector"].pop(NAME)),
    ("Budget", lambda m: spec(m, "PodDisruptionBudget")["selector"]["matchLabels"].pop(NAME)),
    ("NetworkPolicy tandem-redis", lambda m: policy_peer(m).update({NAME: "tandem"})),
    ("PodMonitor", lambda m: spec(m, "PodMonitor")["selector"].update(matchLabels={})),
    ("StatefulSet", lambda m: spec(m, "StatefulSet")["selector"].update(matchLabels={})),
    (
        "tandem-redis: no Service",
        lambda m: m.cluster["gcsFaultToleranceOptions"].update(redisAddress="tandem-redis:6379"),
    ),
    (
        "tandem: no Service",
        lambda m: spec(m, "HTTPRoute")["rules"][0]["backendRefs"][0].update(name="tandem"),
    ),
    ("Secret", lambda m: spec(m, "Certificate").update(secretName="tandem-tls")),
    ("not for tandem-green", lambda m: spec(m, "Certificate").update(dnsNames=["tandem"])),
    (
        "not for tandem-routers-green",
        lambda m: spec(m, "Certificate")["dnsNames"].remove("tandem-routers-green"),
    ),
]


@pytest.mark.parametrize(("word", "change"), CONTROLS)
def test_the_check_complains(word: str, change: Callable[[Manifests], object]) -> None:
    first = render(*ALL)
    copy = Manifests(deepcopy(render(*ALL, is_copy=True).documents))
    change(copy)
    assert word in "\n".join(mixed(copy, first))
