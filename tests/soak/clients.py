"""Runs clients that others wrote, as they are, against a service of the demo model.

    python -m tandem.tests.soak.clients [instructor langchain-openai litellm llm lm-eval guidellm
    aiperf]

Each client is installed from PyPI into an environment of its own under
~/.cache/tandem-peers/clients, which is kept, and runs there, in a process of its own, with this
file's function of its name. What it brings back is checked. Prints a line for each with its
version, and what it said where it failed; ends with 1 if one did.
"""

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from types import GenericAlias
from typing import Any, Final, NamedTuple

HOME: Final = Path.home() / ".cache" / "tandem-peers" / "clients"
_CONSTRAINTS: Final = Path(__file__).resolve().parents[2] / "constraints.txt"
_MODEL: Final = "smollm2-135m-instruct"
_TANDEM: Final = (sys.executable, "-c", "from tandem.cluster.cli.main import main; main()")
_SECONDS: Final = 900.0  # for one client
# Of instructor's modes those in which tools may be called, or JSON is asked for in words.
_UNBOUND_MODES: Final = (
    "PARALLEL_TOOLS",
    "JSON_O1",
    "MD_JSON",
    "ANTHROPIC_JSON",
    "ANTHROPIC_PARALLEL_TOOLS",
)
_QUESTION: Final = "What is the name of the capital of France?"
_PERSON: Final = "Jason is 25 years old."
_SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


class Service(NamedTuple):
    """Where the client finds the service, and its model's tokenizer."""

    url: str
    folder: str


def check_paris(text: str) -> None:
    assert "Paris" in text, f"the answer was {text!r}"


def instructor(service: Service) -> str:
    """Every mode that OpenAI's and Anthropic's APIs have."""
    package, pydantic = import_module("instructor"), import_module("pydantic")
    person = pydantic.create_model("Person", name=(str, ...), age=(int, ...))
    openai = import_module("openai").OpenAI(base_url=f"{service.url}/v1", api_key="none")
    anthropic = import_module("anthropic").Anthropic(base_url=service.url, api_key="none")
    messages = [{"role": "user", "content": f'As {{"name": "Ada", "age": 36}}: {_PERSON}'}]
    given: dict[str, Any] = {"model": _MODEL, "messages": messages, "max_retries": 3}
    modes = "FUNCTIONS TOOLS TOOLS_STRICT PARALLEL_TOOLS JSON JSON_O1 MD_JSON JSON_SCHEMA"
    names = f"{modes} RESPONSES_TOOLS RESPONSES_TOOLS_WITH_INBUILT_TOOLS".split()
    for name in names:
        limit = "max_output_tokens" if name.startswith("RESPONSES") else "max_tokens"
        asked = given | {limit: 200, "temperature": 0}
        client = package.from_openai(openai, mode=getattr(package.Mode, name))
        _extract(name, client.chat.completions.create, person, asked)
    for part in package.from_openai(openai).chat.completions.create_partial(
        person, **given, max_tokens=200
    ):
        found = part
    assert isinstance(found.age, int)
    anthropic_names = ("ANTHROPIC_TOOLS", "ANTHROPIC_JSON", "ANTHROPIC_PARALLEL_TOOLS")
    # Version 2 of Anthropic's package has no argument `temperature`, which the API has, and no
    # `output_format`, which instructor's JSON_SCHEMA gives it.
    asked = given | {"max_tokens": 200, "extra_body": {"temperature": 0}}
    for name in anthropic_names:
        client = package.from_anthropic(anthropic, mode=getattr(package.Mode, name))
        _extract(name, client.messages.create, person, asked)
    return f"{len(names) + len(anthropic_names)} modes and a partial stream"


def _extract(mode: str, create: Callable[..., Any], person: type, asked: dict[str, Any]) -> None:
    """Checks that a person comes; where nothing binds the model to it, that an answer does, and
    nothing else in it.
    """
    print(mode, flush=True)
    errors = import_module("instructor.core.exceptions")
    many = GenericAlias(Iterable, (person,))
    try:
        found = create(**asked, response_model=many if "PARALLEL" in mode else person)
        persons = list(found) if "PARALLEL" in mode else [found]
    except errors.InstructorError as error:
        if mode in _UNBOUND_MODES and getattr(error, "last_completion", None) is not None:
            return
        raise
    assert all(isinstance(each, person) for each in persons), f"{mode}: {persons!r}"
    print(*persons, flush=True)


def langchain_openai(service: Service) -> str:
    """An answer, a stream, a batch, three ways to an object, tools, log probabilities."""
    package, messages = import_module("langchain_openai"), import_module("langchain_core.messages")
    chat = package.ChatOpenAI(
        model=_MODEL,
        base_url=f"{service.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=64,
        stream_usage=True,
    )
    answer = chat.invoke(_QUESTION)
    check_paris(answer.content)
    assert answer.usage_metadata["output_tokens"] > 0
    parts = list(
        chat.stream([messages.SystemMessage("Be brief."), messages.HumanMessage(_QUESTION)])
    )
    assert len(parts) > 3
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) > 3
    assert all(each.content for each in chat.batch([_QUESTION] * 4))
    for method in ("json_schema", "function_calling", "json_mode"):
        schema = {"title": "Person", "description": "A person.", **_SCHEMA}
        found = chat.with_structured_output(schema, method=method).invoke(
            f"As a JSON object: {_PERSON}"
        )
        assert isinstance(found, dict), (method, found)
        assert method == "json_mode" or isinstance(found["age"], int), (method, found)
    function = {"name": "person", "description": "A person.", "parameters": _SCHEMA}
    called = chat.bind_tools(
        [{"type": "function", "function": function}], tool_choice="any"
    ).invoke(_PERSON)
    assert isinstance(called.tool_calls[0]["args"]["age"], int), called
    logprobs = (
        chat.bind(logprobs=True, top_logprobs=2)
        .invoke(_QUESTION)
        .response_metadata["logprobs"]["content"]
    )
    assert len(logprobs[0]["top_logprobs"]) == 2
    responses = package.ChatOpenAI(
        model=_MODEL,
        base_url=f"{service.url}/v1",
        api_key="none",
        temperature=0,
        use_responses_api=True,
    )
    check_paris(responses.invoke(_QUESTION).text)
    whole = package.OpenAI(
        model=_MODEL, base_url=f"{service.url}/v1", api_key="none", temperature=0, max_tokens=8
    )
    check_paris(whole.invoke("The capital of France is"))
    vectors = package.OpenAIEmbeddings(
        model=_MODEL, base_url=f"{service.url}/v1", api_key="none", check_embedding_ctx_length=False
    ).embed_documents(["a cat", "a dog"])
    assert [len(each) > 100 for each in vectors] == [True, True]
    return "answers, streams, objects, tools, log probabilities, responses, embeddings"


def litellm(service: Service) -> str:
    """As OpenAI's, as vLLM's and as Anthropic's API."""
    package = import_module("litellm")
    messages = [{"role": "user", "content": _QUESTION}]
    given: dict[str, Any] = {
        "messages": messages,
        "max_tokens": 32,
        "temperature": 0,
        "api_key": "none",
    }
    bases = {
        "openai": f"{service.url}/v1",
        "hosted_vllm": f"{service.url}/v1",
        "anthropic": service.url,
    }
    for provider, base in bases.items():
        asked = given | {"model": f"{provider}/{_MODEL}", "api_base": base}
        check_paris(package.completion(**asked).choices[0].message.content)
        parts = list(package.completion(**asked, stream=True))
        check_paris("".join(part.choices[0].delta.content or "" for part in parts))
    asked = given | {"model": f"hosted_vllm/{_MODEL}", "api_base": bases["hosted_vllm"]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
    asked |= {"messages": [{"role": "user", "content": _PERSON}], "max_tokens": 100}
    assert (
        json.loads(package.completion(**asked, response_format=form).choices[0].message.content)[
            "age"
        ]
        is not None
    )
    tools = [{"type": "function", "function": {"name": "person", "parameters": _SCHEMA}}]
    for call in (
        package.completion(**asked, tools=tools, tool_choice="required")
        .choices[0]
        .message.tool_calls
    ):
        assert isinstance(json.loads(call.function.arguments)["age"], int)
    text = {
        "model": f"text-completion-openai/{_MODEL}",
        "api_base": bases["openai"],
        "api_key": "none",
    }
    check_paris(
        package.text_completion(**text, prompt="The capital of France is", max_tokens=8)
        .choices[0]
        .text
    )
    vectors = package.embedding(
        model=f"openai/{_MODEL}", input=["a cat"], api_base=bases["openai"], api_key="none"
    )
    assert len(vectors.data[0]["embedding"]) > 100
    answer = package.responses(
        model=f"openai/{_MODEL}",
        input=_QUESTION,
        api_base=bases["openai"],
        api_key="none",
        temperature=0,
    )
    check_paris(answer.output[0].content[0].text)
    return f"{', '.join(bases)}: answers, streams, objects, tools, responses, embeddings"


def llm(service: Service) -> str:
    """Its command line: a prompt, a stream, a schema, tools, a conversation."""
    Path("user").mkdir()
    model = (
        f"- model_id: demo\n  model_name: {_MODEL}\n  api_base: {service.url}/v1\n  api_key_name: "
        "none\n"
    )
    Path("user", "extra-openai-models.yaml").write_text(
        f"{model}  supports_schema: true\n  supports_tools: true\n"
    )
    Path("user", "keys.json").write_text('{"none": "none"}')
    options = ("-m", "demo", "-o", "temperature", "0", "-o", "max_tokens", "100")
    check_paris(_run("llm", *options, _QUESTION))
    check_paris(_run("llm", *options, "--no-stream", _QUESTION))
    for schema in ("name, age int", json.dumps(_SCHEMA)):
        found = json.loads(
            _run("llm", *options, "--schema", schema, _PERSON), object_pairs_hook=_without_doubles
        )
        assert (type(found["name"]), type(found["age"])) == (str, int), found
    # When the list ends is left to the model: max_tokens may cut it.
    many = _run("llm", *options, "--schema-multi", "name, age int", _PERSON)
    first, _ = json.JSONDecoder(object_pairs_hook=_without_doubles).raw_decode(
        many, many.index("[") + 1
    )
    assert (type(first["name"]), type(first["age"])) == (str, int), many
    assert _run("llm", *options, "--tool", "llm_version", _QUESTION)
    assert _run("llm", "-c", *options[2:], "Why?")
    return "prompts, --schema, --schema-multi, --tool, -c"


def lm_eval(service: Service) -> str:
    """Choices by log probabilities, and generations by completions and chats."""
    rows = [{"q": "The capital of France is", "a": ["Paris", "Rome"], "gold": 0}]
    rows += [{"q": "The capital of Italy is", "a": ["Paris", "Rome"], "gold": 1}]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = (
        "dataset_path: json\ndataset_kwargs: "
        f"{{data_files: {{test: {Path('rows.jsonl').resolve()}}}}}\n"
    )
    common = f"{files}test_split: test\ndoc_to_text: '{{{{q}}}}'\n"
    choices = "output_type: multiple_choice\ndoc_to_choice: '{{a}}'\ndoc_to_target: gold\n"
    Path("choices.yaml").write_text(
        f"task: choices\n{common}{choices}metric_list: [{{metric: acc}}]\n"
    )
    generated = "output_type: generate_until\ndoc_to_target: '{{a[gold]}}'\n"
    generated += "generation_kwargs: {until: ['\\n'], max_gen_toks: 16, temperature: 0}\n"
    metric = (
        "metric_list: "
        "[{metric: exact_match, ignore_case: true, regexes_to_ignore: ['\\W*(is|The)\\W*']}]\n"
    )
    Path("texts.yaml").write_text(f"task: texts\n{common}{generated}{metric}")
    tokenizer = f"tokenizer={service.folder},tokenizer_backend=huggingface"
    found = _evaluate(
        "local-completions", "choices,texts", f"{service.url}/v1/completions", tokenizer
    )
    assert found["choices"]["acc,none"] == 1, found
    _evaluate(
        "local-chat-completions",
        "texts",
        f"{service.url}/v1/chat/completions",
        "tokenizer_backend=None",
    )
    samples = "".join(path.read_text() for path in Path("out").rglob("samples_texts*.jsonl"))
    assert samples.count("Paris") >= 2, samples
    accuracy = found["choices"]["acc,none"]
    return f"local-completions: accuracy {accuracy:.2f} by log probabilities; generations of both"


def _evaluate(model: str, tasks: str, url: str, more: str) -> Any:
    arguments = f"model={_MODEL},base_url={url},num_concurrent=2,tokenized_requests=False,{more}"
    chat = ("--apply_chat_template",) if "chat" in model else ()
    options = ("--include_path", ".", "--output_path", f"out/{model}", "--log_samples")
    _run("lm_eval", "--model", model, "--model_args", arguments, "--tasks", tasks, *options, *chat)
    (results,) = Path("out", model).rglob("results*.json")
    return json.loads(results.read_text())["results"]


def guidellm(service: Service) -> str:
    """A synchronous and a concurrent load of synthetic prompts; no request may fail."""
    backend = f"kind=openai_http,target={service.url},model={_MODEL}"
    data = ("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16")
    tokenizer = ("--tokenizer", f"kind=hf_auto,model={service.folder}")
    for profile in ("kind=synchronous", "kind=concurrent,streams=4"):
        limits = (
            "--constraint",
            "kind=max_requests,count=8",
            "--output",
            "kind=json,path=found.json",
        )
        _run(
            "guidellm",
            "run",
            "--backend",
            backend,
            "--profile",
            profile,
            *data,
            *tokenizer,
            *limits,
        )
        (benchmark,) = json.loads(Path("found.json").read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (8, 0), totals
    return "synchronous and 4 at a time, 8 requests each"


def aiperf(service: Service) -> str:
    """Chats and completions; no request may fail."""
    # Without a network it takes a tokenizer from the hub's cache alone, from no folder.
    cached = Path(os.environ["HF_HOME"], "hub", f"models--tandem--{_MODEL}")
    for folder in ("refs", "snapshots"):
        (cached / folder).mkdir(parents=True)
    (cached / "refs" / "main").write_text("local")
    (cached / "snapshots" / "local").symlink_to(service.folder)
    for kind in ("chat", "completions"):
        options = (
            "--streaming",
            "--request-count",
            "8",
            "--concurrency",
            "4",
            "--output-tokens-mean",
            "16",
        )
        shape = (
            "--synthetic-input-tokens-mean",
            "64",
            "--tokenizer",
            f"tandem/{_MODEL}",
            "--ui",
            "none",
        )
        where = ("--url", service.url, "--artifact-dir", kind, "--endpoint-type", kind)
        _run("aiperf", "profile", "--model", _MODEL, *where, *options, *shape)
        (file,) = Path(kind).rglob("profile_export_aiperf.csv")
        found = {
            row[0]: row[1] for row in csv.reader(file.read_text().splitlines()) if len(row) > 1
        }
        assert (float(found["Request Count"]), float(found.get("Error Request Count", 0))) == (
            8,
            0,
        ), found
    return "chat and completions, streamed, 8 requests each"


_RUNS: Final[dict[str, tuple[Callable[[Service], str], tuple[str, ...]]]] = {
    "instructor": (instructor, ("instructor[anthropic]",)),
    "langchain-openai": (langchain_openai, ("langchain-openai",)),
    "litellm": (
        litellm,
        ("litellm", "mcp"),
    ),  # which it imports as soon as there are tools, and does not require
    "llm": (llm, ("llm",)),
    "lm-eval": (lm_eval, ("lm-eval[api]", "transformers")),
    "guidellm": (guidellm, ("guidellm",)),
    "aiperf": (aiperf, ("aiperf",)),
}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


def _run(command: str, *arguments: str) -> str:
    """Runs a command of the client's environment; returns what it wrote to stdout."""
    done = subprocess.run(
        [Path(sys.prefix, "bin", command), *arguments], stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    done.check_returncode()
    return done.stdout


def install(name: str) -> Path:
    """Returns the Python of the client's environment, made where it is not there yet."""
    python = HOME / name / "bin" / "python"
    done = HOME / name / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", HOME / name], check=True)
        # Of what a client brings along, torch alone is pinned, to the version (and build) that is
        # here already.
        pins = [
            line for line in _CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")
        ]
        constraints = HOME / name / "constraints.txt"
        constraints.write_text("\n".join(pins))
        pip = (
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--constraint",
            constraints,
        )
        subprocess.run([*pip, *_RUNS[name][1]], check=True)
        done.touch()
    return python


@contextlib.contextmanager
def serve() -> Iterator[Service]:
    """Starts `tandem serve` with ports of its own; ends it."""
    ports = ("--grpc-port", "0", "--http-port", "0", "--ops-port", "0")
    service = subprocess.Popen(
        [*_TANDEM, "serve", _MODEL, *ports], stdout=subprocess.PIPE, text=True
    )
    try:
        assert service.stdout is not None
        ready = service.stdout.readline()
        assert ready, "the service has ended"
        address = ready.split()[3].removeprefix("http=")
        yield Service(
            f"http://{address}", str(Path.home() / ".cache" / "tandem" / "models" / _MODEL)
        )
    finally:
        service.terminate()
        service.wait(_SECONDS)


def run_apart(name: str, service: Service) -> bool:
    """Runs one client in its environment; returns whether all was as it should be."""
    command = [str(install(name)), str(Path(__file__).resolve()), "--inside", name, *service]
    with tempfile.TemporaryDirectory() as folder:
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        offline |= {"LLM_USER_PATH": str(Path(folder, "user"))}
        settings = os.environ | offline | {"HF_HOME": folder, "OPENAI_API_KEY": "none"}
        settings.pop("PYTHONPATH", None)
        with Path(folder, "said").open("w+") as out:
            process = subprocess.Popen(
                command, cwd=folder, env=settings, stdout=out, stderr=subprocess.STDOUT
            )
            try:
                has_passed = process.wait(_SECONDS) == 0
            except subprocess.TimeoutExpired:
                has_passed = False
                print(f"{name}: not done after {_SECONDS:.0f} s", file=out)
            finally:
                process.kill()
                process.wait()
            out.seek(0)
            said = out.read().rstrip()
    print(
        f"{name:17}{'passed' if has_passed else 'FAILED'}  {said.rpartition(chr(10))[2]}",
        flush=True,
    )
    if not has_passed:
        print(said, flush=True)
    return has_passed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clients", nargs="*", help="all by default")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)  # in the client's environment
    args = parser.parse_args()
    if args.inside:
        name, *where = args.inside
        print(f"{metadata.version(name)}: {_RUNS[name][0](Service(*where))}")
        return 0
    with serve() as service:
        return int(sum(not run_apart(name, service) for name in args.clients or _RUNS) > 0)


if __name__ == "__main__":
    sys.exit(main())
