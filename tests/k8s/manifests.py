"""Renders the manifests of k8s/ and gives access to their content."""

import os
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
K8S: Final = ROOT / "k8s"
DOCKERFILE: Final = K8S / "Dockerfile"
OVERLAYS: Final = tuple(sorted(path.name for path in (K8S / "overlays").iterdir()))
COMPONENTS: Final = tuple(sorted(path.name for path in (K8S / "components").iterdir()))
ARGS: Final[dict[str, dict[str, Any]]] = {
    "autoscaling": {
        "router": {"replicas": 2},
        "prefill": {"replicas": 2, "autoscaling": {"max_replicas": 4}},
        "decode": {"replicas": 2, "autoscaling": {"max_replicas": 4}},
    },
    "auth": {"auth": {"keys_file": "/etc/tandem/keys/keys.json"}},
    "tls": {
        "router": {
            "tls": {"certificate": "/etc/tandem/tls/tls.crt", "key": "/etc/tandem/tls/tls.key"}
        }
    },
}
"""The arguments that a component requires of an overlay, as in the component's comment."""
APPLICATION: Final[dict[str, dict[str, Any]]] = {
    "autoscaling": {
        "autoscaling_policy": {"policy_function": "tandem.cluster.scaling.policy:ScalingPolicy"}
    },
}
"""The same of the application."""

Document = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """A group of pods of the RayService."""

    name: str  # head, router, prefill or decode; or gpu for both pools
    spec: Document

    @property
    def pod(self) -> Document:
        found: Document = self.spec["template"]["spec"]
        return found

    @property
    def container(self) -> Document:
        found: Document = self.pod["containers"][0]
        return found

    @property
    def labels(self) -> dict[str, str]:
        """Of its pods."""
        return {**self.spec["template"]["metadata"]["labels"], **self.spec["labels"]}

    @property
    def replicas(self) -> int:
        return int(self.spec.get("replicas", 1))

    @property
    def ports(self) -> dict[str, int]:
        return {each["name"]: each["containerPort"] for each in self.container["ports"]}

    @property
    def environment(self) -> dict[str, str | None]:
        """As kubelet sets it; values are None where they come from somewhere else."""
        found: dict[str, str | None] = {}
        for each in self.container["env"]:
            value = each.get("value")
            for name, earlier in found.items():
                value = value and value.replace(f"$({name})", earlier or "")
            found[each["name"]] = value
        return found

    @property
    def mounts(self) -> dict[str, Document]:
        """The volume at each mount path."""
        volumes = {each["name"]: each for each in self.pod["volumes"]}
        return {each["mountPath"]: volumes[each["name"]] for each in self.container["volumeMounts"]}


@dataclass(frozen=True)
class Manifests:
    """Everything that `kubectl apply` would send."""

    documents: list[Document]

    def of_kind(self, kind: str) -> list[Document]:
        return [each for each in self.documents if each["kind"] == kind]

    @cached_property
    def service(self) -> Document:
        """The RayService."""
        (found,) = self.of_kind("RayService")
        return found

    @cached_property
    def cluster(self) -> Document:
        found: Document = self.service["spec"]["rayClusterConfig"]
        return found

    @cached_property
    def groups(self) -> dict[str, Group]:
        groups = {
            each["groupName"]: Group(each["groupName"], each)
            for each in self.cluster["workerGroupSpecs"]
        }
        return {"head": Group("head", self.cluster["headGroupSpec"])} | groups

    @cached_property
    def serve_config(self) -> Document:
        found: Document = yaml.safe_load(self.service["spec"]["serveConfigV2"])
        return found

    @property
    def application(self) -> Document:
        (found,) = self.serve_config["applications"]
        assert isinstance(found, dict)
        return found


def need(command: str, package: str) -> str:
    """Returns the path of a command; without it the test is skipped, but not in CI."""
    path = shutil.which(command)
    if path is None:
        reason = f"{command} is missing: apt-get install {package}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def kustomize(folder: Path) -> list[Document]:
    """Returns the rendered documents of a kustomization."""
    kubectl = need("kubectl", "kubernetes-client")
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if each]


def recipe() -> str:
    """Returns the overlay in docs/kubernetes.md that copies the overlay my-service."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (found,) = [
        each for each in re.findall(r"```yaml\n(.*?)```", text, re.S) if "nameSuffix" in each
    ]
    return textwrap.dedent(found)


@cache
def render(overlay: str, components: Sequence[str] = (), is_copy: bool = False) -> Manifests:
    """Returns an overlay with components and the arguments that they need, or its copy."""
    if not components and not is_copy:
        return Manifests(kustomize(K8S / "overlays" / overlay))
    with tempfile.TemporaryDirectory(prefix="tandem-k8s-") as scratch:
        shutil.copytree(K8S, Path(scratch) / "k8s")
        overlays = Path(scratch) / "k8s" / "overlays"
        lists = {
            "resources": [f"../{overlay}"],
            "components": [f"../../components/{name}" for name in components],
        }
        for name, text in (("my-service", yaml.safe_dump(lists)), ("my-copy", recipe())):
            (overlays / name).mkdir()
            (overlays / name / "kustomization.yaml").write_text(text)
        manifests = Manifests(kustomize(overlays / ("my-copy" if is_copy else "my-service")))
    args = manifests.application["args"]
    for name in components:
        if name == "tls" and "gateway" in components:
            continue  # TLS of clients ends at the Gateway
        for section, keys in ARGS.get(name, {}).items():
            args[section] = keys if section == "auth" else {**args[section], **keys}
        manifests.application.update(APPLICATION.get(name, {}))
    manifests.service["spec"]["serveConfigV2"] = yaml.safe_dump(manifests.serve_config)
    return manifests
