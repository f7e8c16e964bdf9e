"""Tests `tandem serve` with a Ray of its own: services from start to stop, and their ends by
signals and faults.
"""

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs
import psutil
import pytest

from tandem.proto.addresses import in_brackets, why_not_bound
from tandem.router.client.client import AsyncClient, Client
from tandem.tests.metrics_page import scrape_until
from tandem.tests.service import ACTIVITY
from tandem.tests.waits import WAIT

OURS = ("RAY_ADDRESS", "RAY_AUTH_MODE")  # what a user's environment does not have
TANDEM = [sys.executable, "-c", "from tandem.cluster.cli.main import main; main()"]
RAY_LOG_LINE = re.compile(r"\[\d{4}-\d\d-\d\d [^]]* [IWE] \d+ \d+\] ")
SCRATCH = re.compile(rf"{re.escape(tempfile.gettempdir())}/tandem-\w+")
READY = re.compile(
    r"^tandem ready grpc=(127\.0\.0\.1:\d+) http=(127\.0\.0\.1:\d+) ops=(127\.0\.0\.1:\d+)\n$"
)


def run(*args: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    command = [*TANDEM, *args]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=WAIT, env=environment
    )


class Serving:
    """Runs `tandem serve` as a process of its own."""

    ops_address = ""  # once it is ready

    def __init__(self, *args: str, **variables: str) -> None:
        environment = {
            name: value for name, value in os.environ.items() if name not in OURS
        } | variables
        command = [*TANDEM, "serve", "--grpc-port", "0", "--http-port", "0", *args]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # a process group of its own, as a shell would give it
        )

    def wait_ready(self) -> tuple[str, str]:
        """Waits for the ready line; returns the gRPC and the HTTP address."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        ready = READY.match(line)
        assert ready, (line, self.process.communicate()[1])
        self.ops_address = ready[3]
        return ready[1], ready[2]

    def stop(self, signum: signal.Signals) -> str:
        """Sends the signal, SIGINT to the whole group as a terminal does, and waits until
        everything has ended; returns the rest of stdout.
        """
        return self.wait_ended(self.signal(signum))

    def signal(self, signum: signal.Signals) -> list[psutil.Process]:
        """Sends the signal; returns the processes that have to end."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        if signum == signal.SIGINT:
            os.killpg(self.process.pid, signum)
        else:
            self.process.send_signal(signum)
        return family

    def wait_ended(self, family: list[psutil.Process]) -> str:
        """Waits until everything has ended; returns the rest of stdout."""
        out, _ = self.process.communicate(timeout=WAIT)
        _, alive = psutil.wait_procs(family, timeout=WAIT)
        assert not alive, alive
        return out


@pytest.fixture
def serving(tiny_model: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*args: str, **variables: str) -> Serving:
        started.append(Serving(str(tiny_model), "--dtype", "float32", *args, **variables))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.stop(signal.SIGTERM)


def share_kernels(home: Path) -> None:
    """Lets a user of another home have the kernels that are there: two workers on cores that they
    share would compile them for most of a minute.
    """
    kernels = platformdirs.user_cache_path("tandem") / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    link = home / ".cache" / "tandem" / "kernels"
    link.parent.mkdir(parents=True)
    link.symlink_to(kernels)


def check_token_of_ray(service: Serving, home: Path) -> None:
    """Fails unless the service's Ray is in token mode, with a token of its own that no argument or
    variable has.
    """
    family = psutil.Process(service.process.pid).children(recursive=True)
    (gcs_server,) = (process for process in family if process.name() == "gcs_server")
    environment = gcs_server.environ()
    path = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert (environment["RAY_AUTH_MODE"], stat.S_IMODE(path.stat().st_mode)) == ("token", 0o600)
    assert SCRATCH.match(str(path))
    assert not (home / ".ray").exists()
    token = path.read_text()
    for process in family:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            assert not any(
                token in text for text in (*process.cmdline(), *process.environ().values())
            )
    (raylet,) = (process for process in family if process.name() == "raylet")
    (address,) = {
        word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--gcs-address=")
    }
    (home / "auth_token").write_text("0" * len(token))
    stranger = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home / "auth_token")}
    joins = [sys.executable, "-c", f"import ray; ray.init('{address}', log_to_driver=False)"]
    joined = subprocess.run(
        joins, capture_output=True, text=True, timeout=WAIT, env=os.environ | stranger
    )
    assert joined.returncode != 0
    assert "AuthenticationError" in joined.stderr, joined.stderr


def test_a_service_from_start_to_stop(
    serving: Callable[..., Serving], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placed by resources that a local Ray offers because they are asked for."""
    share_kernels(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "placed.yaml"
    path.write_text(
        "model: ignored\n"
        "router: {num_cpus: 4, resources: {front: 1}}\n"
        "prefill: {num_cpus: 4, resources: {p: 0.5}}\n"
        "decode: {num_cpus: 4, block_size: 32}\n"
    )
    service = serving("--config", str(path), "--served-model-name", "tiny")
    grpc_address, http_address = service.wait_ready()
    check_token_of_ray(service, tmp_path)

    generated = run(
        "generate", "The quick brown", "--url", grpc_address, "--max-tokens", "8", "--timeline"
    )
    assert generated.returncode == 0, generated.stderr
    assert len(generated.stdout.strip()) > 0
    assert "Where the time went" in generated.stderr
    chat = run("chat", "--url", grpc_address, "--max-tokens", "4", stdin="Hello?\nAnd again?\n")
    cut_off = "cut off at 4 tokens; use --max-tokens\n"
    assert (chat.returncode, chat.stderr) == (0, cut_off * 2)
    assert chat.stdout.count("\n") >= 2
    with urllib.request.urlopen(f"http://{http_address}/v1/models", timeout=WAIT) as answer:
        assert [each["id"] for each in json.load(answer)["data"]] == ["tiny"]
    assert service.process.stderr is not None
    status_url = re.search(r"status page: (\S+)", service.process.stderr.readline())
    assert status_url
    workers: dict[str, Any] = {}
    deadline = time.monotonic() + WAIT
    while {role: worker["state"] for role, worker in workers.items()} != {
        "prefill": "ready",
        "decode": "ready",
    }:
        assert time.monotonic() < deadline, (
            workers
        )  # one that a busy machine keeps from answering is silent
        status = run("status", "--url", status_url[1], "--json")
        workers = {worker["role"]: worker for worker in json.loads(status.stdout)["workers"]}
    for worker in workers.values():
        load = worker["load"]
        assert worker["integrity_ok"]
        assert not any(worker[name] for name in worker if name in ACTIVITY)
        assert load["free_blocks"] + load["cached_blocks"] == load["total_blocks"] > 0
    drained = run("drain", "all", "--url", status_url[1])
    assert (drained.returncode, drained.stderr) == (0, "")
    assert sorted(drained.stdout.splitlines()) == sorted(
        f"{each['id']}: 0 requests left" for each in workers.values()
    )
    status = run("status", "--url", status_url[1], "--json")
    assert {worker["state"] for worker in json.loads(status.stdout)["workers"]} == {"draining"}

    out = service.stop(signal.SIGINT)
    assert (service.process.returncode, out) == (0, "")


def code_of(url: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=WAIT
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def check_hidden(service: Serving, keys: list[str]) -> None:
    """Fails if a process or a file of the service shows one of the keys.

    The variables at the start of a process stay in its /proc entry, which only its user reads.
    """
    main = psutil.Process(service.process.pid)
    children = main.children(recursive=True)
    shown = [text for process in (main, *children) for text in process.cmdline()]
    shown += [text for process in children for text in process.environ().values()]
    scratch = {match[0] for text in shown if (match := SCRATCH.search(text))}
    assert scratch
    for folder in scratch:
        files = (file for file in Path(folder).rglob("*") if file.is_file())
        shown += [file.read_text(errors="replace") for file in files]
    assert not [key for key in keys if any(key in text for text in shown)]


def check_keys(urls: Iterable[str], keys: Collection[str]) -> None:
    """Fails unless every URL needs one of the keys."""
    for url in urls:
        assert [code_of(url), code_of(url, "wrong")] == [401, 401]
        assert {code_of(url, key) for key in keys} == {200}


async def test_given_keys_are_shown_nowhere_and_streams_end_after_sigterm(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    """One service for both: it has two routers and runs one stream at a time."""
    keys = ["sk-canary-seven", "sk-canary-eight"]
    template = tmp_path / "shout.jinja"
    template.write_text("{{ messages[0].content | upper }}")
    path = tmp_path / "one.yaml"
    path.write_text(
        "model: ignored\ngrace_seconds: 60\ndecode: {max_sequences: 1}\nrouter: "
        "{max_queue_seconds: 3600}\n"
    )
    service = serving(
        *("--api-key", keys[0], f"--api-key={keys[1]}", "--prefill", "0", "--config", str(path)),
        *("--routers", "2", "--dashboard", "--chat-template", str(template)),
    )
    assert service.process.stdout is not None
    assert service.process.stderr is not None
    line = service.process.stdout.readline()
    ready = re.search(r" grpc=(\S+),\S+ http=(\S+),(\S+) ops=(\S+),\S+$", line)
    assert ready, (line, service.process.communicate()[1])
    grpc_address, *http_addresses, ops_address = ready.groups()
    note = service.process.stderr.readline()
    status_url = re.search(r"status page: (\S+)", service.process.stderr.readline())
    assert status_url
    assert note.startswith("warning: --api-key: ")
    check_keys((*(f"http://{each}/v1/models" for each in http_addresses), status_url[1]), keys)
    check_hidden(service, keys)
    check_template(http_addresses[0], keys[0])
    await check_end(service, grpc_address, ops_address, keys[0])


def check_template(http_address: str, key: str) -> None:
    """Fails unless a chat gets the template that shouts."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    request = urllib.request.Request(
        f"http://{http_address}/tokenize",
        body,
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        assert len(json.load(answer)["tokens"]) <= 2  # "HI"


async def check_end(service: Serving, grpc_address: str, ops_address: str, key: str) -> None:
    """Fails unless streams end after SIGTERM and requests that wait are refused.

    There is time enough for one stream, and on a fast machine for all. Those that are cut:
    test_runtime.py.
    """
    async with AsyncClient(grpc_address, api_key=key, max_retries=0) as client:
        asked = [
            asyncio.create_task(
                client.generate([number, 6, 7], max_tokens=2000, ignore_eos=True, timeout=2 * WAIT)
            )
            for number in range(3, 12)
        ]
        await scrape_until(lambda page: page.value("vllm:num_requests_waiting") == 8, ops_address)
        family = service.signal(signal.SIGTERM)
        ended = await asyncio.gather(*asked, return_exceptions=True)
    assert (service.wait_ended(family), service.process.returncode) == ("", 0)
    refused = [each for each in ended if isinstance(each, BaseException)]
    answers = [each for each in ended if not isinstance(each, BaseException)]
    assert {len(answer.choices[0].token_ids) for answer in answers} == {2000}
    # Workers may be gone before the router knows that it stops, too.
    reasons = {"the service is stopping", "no worker is ready"}
    assert {getattr(each, "message", repr(each)) for each in refused} <= reasons


@pytest.mark.parametrize("victim", ["gcs_server", pytest.param("raylet", marks=pytest.mark.soak)])
def test_the_end_of_ray_in_an_awkward_environment_is_told_in_a_line_and_leaves_nothing(
    serving: Callable[..., Serving],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victim: str,
) -> None:
    """Proxies that nothing answers at, an empty RAY_ADDRESS, a long TMPDIR, no home and no
    compiler; on ::1 if there is IPv6, with two ranks. The key of this service comes from the
    environment, and is shown nowhere.
    """
    folder = tmp_path / ("temporary-" * 6)
    folder.mkdir()
    (tmp_path / "home").write_text("")
    key = "sk-canary-nine"
    variables = {
        "RAY_ADDRESS": "",
        "TMPDIR": str(folder),
        "TANDEM_HOME": str(tmp_path / "home"),
        "CC": "false",
        "TANDEM_API_KEY": key,
    }
    host = "127.0.0.1" if why_not_bound("::1", 0) else "::1"
    with monkeypatch.context() as patch:
        set_dead_proxies(patch)
        service = serving("--host", host, "--prefill-tp", "2", **variables)
        assert service.process.stdout is not None
        line = service.process.stdout.readline()
        ready = re.fullmatch(r"tandem ready grpc=(\S+) http=(\S+) ops=\S+\n", line)
        assert ready, (line, service.process.communicate()[1])
        grpc_address, http_address = ready.groups()
        patch.setenv("TANDEM_API_KEY", key)
        generated = run(
            *("generate", "The quick brown", "--url", grpc_address, "--max-tokens", "4"),
            *("--model", str(tiny_model)),
        )
    assert generated.returncode == 0, generated.stderr
    assert grpc_address.startswith(f"{in_brackets(host)}:")
    url = f"http://{http_address}/v1/models/{tiny_model}"
    check_keys([url], [key])
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        assert json.load(answer)["root"] == tiny_model.name
    check_hidden(service, [key])
    family = psutil.Process(service.process.pid).children(recursive=True)
    (scratch,) = {
        found[0] for child in family for word in child.cmdline() if (found := SCRATCH.search(word))
    }
    with (
        Client(grpc_address, api_key=key) as client,
        client.stream([5, 6, 7], max_tokens=1000, ignore_eos=True) as stream,
    ):
        tokens = len(next(stream).token_ids)
        next(child for child in family if child.name() == victim).kill()
        tokens += sum(len(delta.token_ids) for delta in stream)
    assert tokens == 1000
    _, err = service.process.communicate(timeout=WAIT)
    assert service.process.returncode == 1
    ours = [
        line for line in err.splitlines() if not RAY_LOG_LINE.match(line)
    ]  # Ray's own client may log as it ends
    assert ours[0].startswith("calls need the key in TANDEM_API_KEY")
    assert ours[1].startswith("`tandem drain` will not work: ")  # without a home
    assert re.match(rf"status page: http://{re.escape(in_brackets(host))}:\d+/tandem", ours[2])
    assert ours[4:] == [f"error: Ray has ended: its {victim} process is gone"]  # after the console
    _, alive = psutil.wait_procs(family, timeout=WAIT)
    assert not alive, alive
    assert not Path(scratch).exists()
    assert not list(folder.iterdir())


def set_dead_proxies(patch: pytest.MonkeyPatch) -> None:
    """Sets proxies that nothing answers at, for every address."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        patch.setenv(name, "http://127.0.0.1:9")
        patch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        patch.delenv(name, raising=False)


def test_ctrl_c_during_the_start_leaves_nothing_behind(serving: Callable[..., Serving]) -> None:
    service = serving()
    me = psutil.Process(service.process.pid)
    for _ in range(1200):
        if any("raylet" in child.name() for child in me.children(recursive=True)):
            break
        with pytest.raises(subprocess.TimeoutExpired):  # still starting
            service.process.wait(timeout=0.05)
    out = service.stop(signal.SIGINT)
    assert (service.process.returncode, out) == (0, "")


def test_an_address_where_nobody_listens_is_named(tiny_model: Path) -> None:
    done = run("serve", str(tiny_model), "--address", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: address: no Ray cluster answers at 127.0.0.1:1" in done.stderr


def test_a_taken_port_is_named(serving: Callable[..., Serving]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = serving("--grpc-port", str(port))
        out, err = service.process.communicate(timeout=WAIT)
    assert (service.process.returncode, out) == (1, "")
    assert (
        f"error: router.grpc_port: 127.0.0.1:{port} cannot be bound; is it taken? Then choose "
        "another one (--grpc-port, 0 for a free one)\n"
    ) in err
