"""`tandem watermark`, the HTTP endpoint and both clients: the same answer, and never the key."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.proto.errors import InvalidArgument, NotFound
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.client.client import AsyncClient, Client
from tandem.router.frontend.served_model import ServedModel
from tandem.router.watermark.key import read_watermark_key
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.tests.waits import WAIT
from tandem.tests.watermarks import RULES

TEXT = "The river rises in the mountains and runs to the sea. " * 3


def invoke(*args: str, stdin: str = "") -> str:
    """What a command writes; raises what it raises."""
    done = CliRunner().invoke(app, ["watermark", *args], input=stdin, catch_exceptions=False)
    return done.stdout


@pytest.mark.io
async def test_every_way_to_detect_gives_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64, watermark=RULES)
    expected = RULES.detect(list(TEXT.encode()))
    figures: dict[str, Any] = {
        "z": expected.z,
        "p": expected.p,
        "num_tokens": expected.num_tokens,
        "num_green": expected.num_green,
    }
    assert 0 < expected.num_tokens < len(TEXT) / 2  # repeated, so scored once
    file = tmp_path / "text"
    file.write_text(TEXT)
    servers = await ApiServers.start(GenerationService([model], FakeTokenSource()))
    try:
        target = ("--url", servers.grpc_address)
        answers = [
            await asyncio.to_thread(invoke, "detect", str(file), "--json", *target),
            await asyncio.to_thread(invoke, "detect", "-", "--json", *target, stdin=TEXT),
            await asyncio.to_thread(invoke, "detect", "--json", *target, stdin=TEXT),
        ]
        url = f"http://{servers.http_address}/v1/watermark/detect"
        async with httpx.AsyncClient(timeout=WAIT) as http:
            for prompt in (TEXT, list(TEXT.encode())):
                answer = await http.post(url, json={"model": "tiny", "prompt": prompt})
                assert answer.status_code == 200
                answers.append(answer.text)
        assert [json.loads(answer) for answer in answers] == [figures] * 5
        shown = await asyncio.to_thread(invoke, "detect", str(file), *target)
        assert f"scored tokens  {expected.num_tokens}\n" in shown
        async with AsyncClient(servers.grpc_address) as client:
            found = await client.detect_watermark(TEXT)
        assert (found.z, found.p, found.num_tokens) == (expected.z, expected.p, expected.num_tokens)

        def use_client() -> None:
            with Client(servers.grpc_address) as client:
                assert client.detect_watermark(list(TEXT.encode()), model="tiny") == found

        await asyncio.to_thread(use_client)
        everything = "".join([*answers, shown, caplog.text])
        for form in (RULES.key.hex(), str(RULES.key), str(list(RULES.key))):
            assert form not in everything
        with pytest.raises(InvalidArgument, match="file: /no/such: No such file"):
            await asyncio.to_thread(invoke, "detect", "/no/such", *target)
    finally:
        await servers.stop(0)


@pytest.mark.io
async def test_a_service_without_a_key_says_so() -> None:
    model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=64)
    servers = await ApiServers.start(GenerationService([model], FakeTokenSource()))
    try:
        async with AsyncClient(servers.grpc_address) as client:
            with pytest.raises(NotFound, match="no key for a watermark"):
                await client.detect_watermark(TEXT)
    finally:
        await servers.stop(0)


def test_key_writes_a_file_that_a_service_reads(tmp_path: Path) -> None:
    file = tmp_path / "watermark.key"
    assert invoke("key", str(file)) == ""
    assert len(read_watermark_key(file)) == 16
    with pytest.raises(InvalidArgument, match="File exists"):
        invoke("key", str(file))


def test_serve_checks_the_key_before_anything_starts(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("nothing")
    with pytest.raises(InvalidArgument, match="is no key of a watermark"):
        CliRunner().invoke(
            app, ["serve", "m", "--watermark-key", str(wrong)], catch_exceptions=False
        )
