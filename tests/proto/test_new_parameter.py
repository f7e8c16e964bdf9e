"""A sampling parameter is added by a row, the field of the message, and the code that computes with
it.

The package is copied and edited as docs/extending.md says, and a program in it finds the parameter
in every API.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

FIELD: Final = "  float toy_scale = 99;\n"
ROW: Final = (
    '    RequestParameter("sampling.toy_scale", "float", "Scales the toy.", bounds=(-1, 1)),\n'
)
ENGINE: Final = "    toy_scale: float = 0.0\n"  # what the sampler computes with

EDITS: Final = {
    "proto/inference.proto": (r"message SamplingParams \{\n", FIELD),
    "proto/parameters.py": (r"PARAMETERS: Final = \(\n", ROW),
    "workers/engine/plan.py": (r"class SamplingParams:\n    \"\"\"(?s:.*?)\"\"\"\n", ENGINE),
}

PROGRAM: Final = """
import asyncio
import grpc
import httpx
import typer.main
from google.rpc import error_details_pb2, status_pb2
from tandem.cluster.cli.client import generate as command
from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import InvalidArgument
from tandem.proto.parameters import markdown
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.client.client import AsyncClient
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.router.frontend.served_model import ServedModel
from tandem.workers.serve.submit import WorkerLimits, parse_submit

async def main():
    source = FakeTokenSource()
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)
    servers = await ApiServers.start(GenerationService([model], source))
    async with AsyncClient(servers.grpc_address) as client, httpx.AsyncClient(timeout=60) as http:
        await client.generate("hi", toy_scale=0.5)
        assert source.requests[-1].submit.sampling.toy_scale == 0.5
        try:
            await client.generate("hi", toy_scale=1.5)
        except InvalidArgument as error:
            assert (error.field, error.message) == (
                "sampling.toy_scale", "sampling.toy_scale: must be from -1 to 1")
        else:
            raise AssertionError("gRPC does not check it")
        url = f"http://{servers.http_address}"
        for path, prompt in (("completions", {"prompt": "hi"}), ("chat/completions", {"messages": [
                {"role": "user", "content": "x"}]})):
            answer = await http.post(f"{url}/v1/{path}", json=prompt | {"toy_scale": 0.25})
            assert answer.status_code == 200
            assert source.requests[-1].submit.sampling.toy_scale == 0.25
            answer = await http.post(f"{url}/v1/{path}", json=prompt | {"toy_scale": -2})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "toy_scale")
            assert "from -1 to 1" in answer.json()["error"]["message"]
        schemas = (await http.get(f"{url}/openapi.json")).json()["components"]["schemas"]
        for body in ("CompletionBody", "ChatBody"):
            field = schemas[body]["properties"]["toy_scale"]
            assert (field["anyOf"][0]["maximum"], field["description"]) == (1, "Scales the toy.")
    await servers.stop(0)

asyncio.run(main())
limits = WorkerLimits(vocab_size=9, context_tokens=9, max_sequences=9, eos_ids=frozenset())
def submit(scale):
    sampling = inference_pb2.SamplingParams(toy_scale=scale)
    return worker_pb2.Submit(
        task=worker_pb2.TASK_COLOCATED, token_ids=[1], max_tokens=1, sampling=sampling
    )
assert parse_submit(submit(1), 1, limits).sampling.toy_scale == 1
try:
    parse_submit(submit(2), 1, limits)
except InvalidArgument as error:
    assert error.field == "sampling.toy_scale"
else:
    raise AssertionError("the worker does not check it")
app = typer.Typer()
app.command()(command)
parameters = typer.main.get_command(app).params
assert "--toy-scale" in [option for parameter in parameters for option in parameter.opts]
assert "`toy_scale`" in markdown()
print("found everywhere")
"""


def test_a_parameter_is_a_row_a_field_and_the_code_that_uses_it(tmp_path: Path) -> None:
    package = tmp_path / "tandem"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "build", "k8s")
    shutil.copytree(ROOT, package, ignore=ignored)
    (package / "tests" / "router").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "router" / "fake_source.py", package / "tests" / "router")
    for name, (place, added) in EDITS.items():
        text = (package / name).read_text()
        found = re.search(place, text)
        assert found, f"{name} has no {place}"
        (package / name).write_text(text[: found.end()] + added + text[found.end() :])
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(
        [sys.executable, "proto/generate.py"], cwd=package, env=environment, check=True, timeout=120
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "found everywhere\n"), done.stderr[-2000:]
