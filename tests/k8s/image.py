"""Builds the image of k8s/Dockerfile with buildah, without a registry, and runs its model.

    debootstrap --variant=minbase bookworm ROOTFS
    python -m tandem.tests.k8s.image ROOTFS [OPTION...]

ROOTFS stands for the Dockerfile's base image. Every step runs as it is written; each OPTION is
passed to `buildah build`, such as a volume or a build argument for another package index. Then the
commands of COMMANDS run in the image as in a pod: by its user, with a root that cannot be written.
Needs root and 10 GB of disk; leaves nothing.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tandem.tests.k8s.manifests import DOCKERFILE, ROOT, render

IMAGE: Final = "localhost/tandem:demo"
MODEL: Final = render("cpu-demo").application["args"]["model"]
ASK: Final = """
import sys
from tandem import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    params = SamplingParams(temperature=0, max_tokens=8)
    print(llm.generate(["The capital of France is"], params)[0].outputs[0].text)
"""
COMMANDS: Final = (
    (["ray", "--version"], "ray, version"),
    (["wget", "--version"], "GNU Wget"),  # of KubeRay's probes
    (["tandem", "check", MODEL], "runs, by Tandem's own"),
    (["python", "-c", ASK, MODEL], "Paris"),
)
"""Commands, and a part of the output of each."""
UNWANTED: Final = "no C kernels"
POD: Final = """
mount --bind "$0" "$0" && cd "$0"
mount -t proc proc proc && mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs tmp && mount -t tmpfs -o mode=1777 tmpfs home/tandem
mount -o remount,bind,ro "$0"
user=$1 && shift
exec chroot --userspec="$user" . env --ignore-environment --chdir=/tmp HOME=/home/tandem "$@"
"""
"""Runs a command in a root that cannot be written but for /tmp and the home, as in the manifests.
"""


def main(rootfs: Path, options: list[str]) -> None:
    """Raises CalledProcessError if a step fails, SystemExit if a command prints something else."""
    with TemporaryDirectory(prefix="tandem-image-") as scratch, _storage(Path(scratch)) as buildah:
        _import(buildah, rootfs, Path(scratch) / "rootfs.tar")
        build = [
            "build",
            "--file",
            str(DOCKERFILE),
            "--ignorefile",
            f"{DOCKERFILE}.dockerignore",
            "--target",
            "demo",
        ]
        build += [
            "--format",
            "docker",
            "--isolation",
            "chroot",
            "--network",
            "host",
            "--pull=never",
            "--tag",
            IMAGE,
        ]
        _run(*buildah, *build, *options, str(ROOT))
        config = json.loads(_read(*buildah, "inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
        _run(*buildah, "from", "--pull=never", "--name", "tried", IMAGE)
        _try(Path(_read(*buildah, "mount", "tried").strip()), config)


@contextmanager
def _storage(folder: Path) -> Iterator[list[str]]:
    """Yields the beginning of commands of buildah that keep everything below `folder`."""
    buildah = ["buildah", "--root", str(folder / "root"), "--runroot", str(folder / "run")]
    try:
        yield buildah
    finally:
        _run(*buildah, "rm", "--all")
        _run(*buildah, "rmi", "--all", "--force")


def _import(buildah: list[str], rootfs: Path, archive: Path) -> None:
    """Makes the image of the first FROM out of a folder."""
    found = re.search(r"^FROM (debian:\S+) AS system$", DOCKERFILE.read_text(), re.MULTILINE)
    assert found
    _run(
        "tar",
        "--create",
        "--file",
        str(archive),
        "--exclude=./dev/*",
        "--exclude=./proc/*",
        "-C",
        str(rootfs),
        ".",
    )
    _run(*buildah, "from", "--name", "base", "scratch")
    _run(*buildah, "add", "--quiet", "base", str(archive), "/")
    archive.unlink()
    _run(*buildah, "commit", "--rm", "--quiet", "base", f"docker.io/library/{found[1]}")


def _try(root: Path, config: dict[str, Any]) -> None:
    for command, expected in COMMANDS:
        pod = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "--ipc",
            "sh",
            "-ec",
            POD,
            str(root),
            config["User"],
        ]
        done = subprocess.run(
            [*pod, *config["Env"], *command], capture_output=True, text=True, check=False
        )
        print(done.stdout, done.stderr, sep="", flush=True)
        if done.returncode != 0 or expected not in done.stdout or UNWANTED in done.stderr:
            raise SystemExit(f"{command[:2]} in the image: exit code {done.returncode}")


def _run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _read(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
