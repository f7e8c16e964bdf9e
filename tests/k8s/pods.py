"""Runs pods of a RayService on this machine without Kubernetes, each in its own namespaces.

A pod has an IP address, a root that cannot be written, private /tmp and /dev/shm, the mounts,
variables, sysctls and user of its manifest, and the command that KubeRay gives it. Its probes and
its preStop run as kubelet runs them. The namespaces are of the kinds network, mount and PID. Needs
root, iproute2 and util-linux.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from tandem.tests.k8s.kuberay import container_command, fault_tolerant, liveness_command
from tandem.tests.k8s.manifests import ROOT, Group, Manifests, need

SCRIPT: Final = Path(__file__).parent / "pod.sh"
PROBE_SECONDS: Final = 10.0
END_SECONDS: Final = 10.0
USER: Final = "1000"

STARTING: Final = 16
"""The share of the cores of a starting pod, relative to a running one.

`ray start` gives its parts 30 seconds. On a node that is ten times as long as they need, but here
streams would use all the cores.
"""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class CoreShare:
    """A control group that gives a pod its share of the cores for any number of threads."""

    folder: Path

    @classmethod
    def make(cls, name: str) -> "CoreShare":
        version1 = Path("/sys/fs/cgroup/cpu")
        group = cls((version1 if version1.is_dir() else version1.parent) / name)
        group.folder.mkdir()
        return group

    def command(self) -> list[str]:
        """Returns the prefix of a command that runs in the group."""
        return ["sh", "-c", 'echo 0 > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]

    def set(self, share: int) -> None:
        """Sets the share, relative to 1."""
        for name, unit in (("cpu.shares", 1024), ("cpu.weight", 100)):
            if (self.folder / name).exists():
                (self.folder / name).write_text(str(share * unit))

    def remove(self) -> None:
        """Removes the group; all its processes must have ended. Raises TimeoutError."""
        ends = time.monotonic() + END_SECONDS
        while self.folder.exists():
            with suppress(OSError):  # the kernel takes its time to end processes
                self.folder.rmdir()
                return
            if time.monotonic() > ends:
                raise TimeoutError(f"{self.folder}: {(self.folder / 'cgroup.procs').read_text()}")
            time.sleep(0.05)


@dataclass(eq=False)
class Pod:
    """A pod that runs."""

    name: str
    group: Group
    ip: str
    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]
    log: Path
    cores: CoreShare
    is_starting: bool = True

    @property
    def init(self) -> psutil.Process:
        """The container's process, 1 in its own namespace."""
        (found,) = psutil.Process(self.process.pid).children()
        return found

    def execute(self, command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as `kubectl exec` does. Raises TimeoutExpired."""
        enter = [
            "nsenter",
            "--target",
            str(self.init.pid),
            "--net",
            "--mount",
            "--pid",
            "--root",
            "--wdns=/",
        ]
        enter += ["--setuid", USER, "--setgid", USER, "--"]
        return subprocess.run(
            [*enter, *command],
            env=dict(self.environment),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def is_ready(self) -> bool:
        """Asks the readinessProbe of the manifest."""
        probe = self.group.container["readinessProbe"]["httpGet"]
        try:
            url = f"http://{self.ip}:{self.group.ports[probe['port']]}{probe['path']}"
            with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as reply:
                return bool(200 <= reply.status < 400)
        except (urllib.error.URLError, OSError):
            return False

    def is_alive(self) -> bool:
        """Asks the livenessProbe that KubeRay adds; a container that still starts fails it."""
        with suppress(ValueError, psutil.NoSuchProcess, subprocess.TimeoutExpired):
            return self.execute(liveness_command(self.group), PROBE_SECONDS).returncode == 0
        return False

    def delete(self) -> subprocess.CompletedProcess[str]:
        """Ends the pod as kubelet does: preStop, SIGTERM, and SIGKILL at the end of its time.

        Returns the result of preStop. Raises TimeoutExpired if the pod had to be killed.
        """
        ends = time.monotonic() + self.group.pod["terminationGracePeriodSeconds"]
        before = self.execute(
            self.group.container["lifecycle"]["preStop"]["exec"]["command"], ends - time.monotonic()
        )
        self.init.send_signal(signal.SIGTERM)
        self.process.wait(ends - time.monotonic())
        return before

    def kill(self) -> None:
        """Ends everything in it at once."""
        with suppress(psutil.NoSuchProcess, ValueError):
            self.init.kill()
        self.process.kill()
        self.process.wait(END_SECONDS)


@dataclass(eq=False)
class PodNetwork:
    """A bridge on this machine, which stands for the cluster's network, and its pods."""

    scratch: Path
    models: Path  # the folder that pods have under /models
    identity: Path  # the file that is the Secret
    prefix: str  # of names, so that several networks can be at the same time
    subnet: str  # the first three numbers of the addresses
    pods: list[Pod] = field(default_factory=list)
    # Addresses by name, for pods that start from now on.
    hosts: dict[str, str] = field(default_factory=dict)
    # Values of variables that come from Secrets.
    secrets: dict[str, str] = field(default_factory=dict)
    num_started: int = 0

    @property
    def head(self) -> Pod:
        return next(pod for pod in self.pods if pod.group.name == "head")

    @property
    def gateway(self) -> str:
        """This machine's address on the network."""
        return f"{self.subnet}.1"

    def start(self, group: Group, ip: str = "") -> Pod:
        """Starts a pod of the group.

        With `ip` it gets the address of a removed pod, like a restarted container or a head behind
        its Service.
        """
        self.num_started += 1
        number = self.num_started
        name, ip = f"{self.prefix}{number}", ip or f"{self.subnet}.{number + 1}"
        self._connect(name, ip, group)
        environment = self._environment(group, ip)
        log = self.scratch / f"{group.name}-{number}.log"
        command = container_command(group, "" if group.name == "head" else self.head.ip)
        root = self.scratch / f"root-{number}"
        root.mkdir()
        cores = CoreShare.make(name)
        cores.set(STARTING)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *cores.command(),
                    *(
                        "ip",
                        "netns",
                        "exec",
                        name,
                        "unshare",
                        "--mount",
                        "--pid",
                        "--ipc",
                        "--fork",
                        "--kill-child",
                    ),
                    *(str(SCRIPT), str(root), *self._mounts(group), "--", *command),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        pod = Pod(
            name=name,
            group=group,
            ip=ip,
            process=process,
            environment=environment,
            log=log,
            cores=cores,
        )
        self.pods.append(pod)
        return pod

    def remove(self, pod: Pod) -> None:
        """Removes the remains of a pod that has ended."""
        pod.kill()
        self.pods.remove(pod)
        run("ip", "link", "delete", f"{pod.name}h")  # the kernel takes its time to end a namespace
        run("ip", "netns", "delete", pod.name)
        pod.cores.remove()

    def tend(self) -> None:
        """Restarts containers that have ended, as kubelet does: on a busy machine Ray gives up.

        Takes the greater share of the cores from started pods.
        """
        for pod in [pod for pod in self.pods if pod.process.poll() is not None]:
            self.remove(pod)
            self.start(pod.group, pod.ip)
        for pod in self.pods:
            if pod.is_starting and pod.is_alive():
                pod.is_starting = False
                pod.cores.set(1)

    def _connect(self, name: str, ip: str, group: Group) -> None:
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"{name}h", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"{name}h", "master", self.prefix, "up")
        for command in (
            f"link set lo up|link set eth0 up|address add {ip}/24 dev eth0|route add default via "
            f"{self.gateway}"
        ).split("|"):
            run("ip", "-n", name, *command.split())
        for each in group.pod["securityContext"]["sysctls"]:
            run("ip", "netns", "exec", name, "sysctl", "-qw", f"{each['name']}={each['value']}")

    def _environment(self, group: Group, ip: str) -> dict[str, str]:
        paths = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        given = {name: value for name, value in group.environment.items() if value is not None}
        given |= {name: value for name, value in self.secrets.items() if name in group.environment}
        if "POD_IP" in group.environment:
            given["POD_IP"] = ip
        head = "127.0.0.1" if group.name == "head" else self.head.ip
        return {
            "PATH": f"{sys.prefix}/bin:"
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/home/tandem",
            "PYTHONDONTWRITEBYTECODE": "1",
            "RAY_AUTH_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
            "RAY_IP": head,
            "RAY_PORT": "6379",
            "RAY_ADDRESS": f"{head}:6379",
            **paths,
            **given,
        }

    def _mounts(self, group: Group) -> Iterator[str]:
        for target, volume in group.mounts.items():
            if "emptyDir" in volume:
                yield from ("-w", target)
            elif "secret" in volume:
                yield from ("-m", str(self.identity.parent), target)
        for name, address in self.hosts.items():
            yield from ("-h", address, name)
        yield from ("-m", str(self.models), "/models")
        # Compiled kernels, as on a volume of docs/kubernetes.md: on cores that streams fill,
        # compiling takes minutes.
        kernels = self.scratch / "kernels"
        kernels.mkdir(exist_ok=True)
        kernels.chmod(0o777)
        yield from ("-s", str(kernels), "/home/tandem/.cache/tandem/kernels")
        # What the image would have: the interpreter, the packages and the code.
        code = [Path(each) for each in os.environ.get("PYTHONPATH", "").split(":") if each]
        for path in dict.fromkeys((Path(sys.base_prefix), Path(sys.prefix).resolve(), ROOT, *code)):
            if not str(path).startswith("/usr"):
                yield from ("-b", str(path))


@contextmanager
def pod_network(models: Path, identity: Path) -> Iterator[PodNetwork]:
    """Makes a network without pods; ends all that were started."""
    for command, package in (
        ("ip", "iproute2"),
        ("nsenter", "util-linux"),
        ("setpriv", "util-linux"),
    ):
        need(command, package)
    prefix = f"td{os.getpid()}"
    subnet = f"10.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
    run("ip", "link", "add", prefix, "type", "bridge")
    network = None
    try:
        run("ip", "address", "add", f"{subnet}.1/24", "dev", prefix)
        run("ip", "link", "set", prefix, "up")
        with tempfile.TemporaryDirectory(
            prefix="tandem-pods-", ignore_cleanup_errors=True
        ) as scratch:
            network = PodNetwork(
                scratch=Path(scratch),
                models=models,
                identity=identity,
                prefix=prefix,
                subnet=subnet,
            )
            try:
                yield network
            finally:
                for pod in reversed(list(network.pods)):
                    network.remove(pod)
    finally:
        run("ip", "link", "delete", prefix)


@contextmanager
def redis(network: PodNetwork, manifests: Manifests) -> Iterator[None]:
    """Runs the Redis of the component gcs-ft by its manifest's command; pods find it."""
    need("redis-server", "redis-server")
    (found,) = manifests.of_kind("StatefulSet")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    network.secrets["REDIS_PASSWORD"] = secrets.token_hex(16)
    head = fault_tolerant(manifests.groups["head"], manifests.cluster["gcsFaultToleranceOptions"])
    name, _, port = (head.environment["RAY_REDIS_ADDRESS"] or "").partition(":")
    network.hosts[name] = network.gateway
    folder = network.scratch / "redis"
    folder.mkdir()
    *shell, text = container["command"]
    command = f"{text.replace('/data', str(folder))} --bind {network.gateway} --port {port}"
    with (network.scratch / "redis.log").open("wb") as log:
        process = subprocess.Popen(
            [*shell, command], stdout=log, env=dict(os.environ) | network.secrets
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(END_SECONDS)


def logs(network: PodNetwork) -> str:
    """Returns the end of each pod's output, for messages of failures."""
    return "\n".join(
        f"--- {pod.log.name}\n{pod.log.read_text(errors='replace')[-2000:]}" for pod in network.pods
    )
