"""Checks names from the source, as test_architecture.py checks the structure."""

import ast
import re

import pytest

from tandem.tests.source import ROOT, Module, Rule, made_up, package_modules

# Names that this project alone used for what vLLM, SGLang, PyTorch or the papers call otherwise:
# words that no identifier may have as one of its parts, and whole identifiers.
PRIVATE_WORDS = {
    *(
        "door",
        "doors",
        "exporter",
        "flight",
        "hear",
        "inlet",
        "inlets",
        "ledger",
        "leg",
        "legs",
        "mover",
        "outlet",
    ),
    *("outlets", "puller", "shaping", "ship", "stopwatch", "tell", "ways"),
}
PRIVATE_NAMES = {
    *(
        "Choices",
        "DirectoryView",
        "Job",
        "Jobs",
        "Joined",
        "KnownWorker",
        "Leader",
        "Means",
        "Opened",
        "Opening",
    ),
    *(
        "Outcome",
        "RankLink",
        "Room",
        "Run",
        "WorkerLink",
        "add_up",
        "draw",
        "follow",
        "job",
        "jobs",
        "means",
    ),
}


def shares_class_names(modules: list[Module]) -> list[str]:
    owners: dict[str, list[str]] = {}
    for module in modules:
        if module.is_generated or module.name.endswith("_proto"):
            continue
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners.setdefault(node.name, []).append(module.name)
    return [
        f"{name} is in {' and '.join(found)}" for name, found in owners.items() if len(found) > 1
    ]


def uses_private_names(modules: list[Module]) -> list[str]:
    return [
        f"{module.name} has {name}"
        for module in modules
        for name in sorted(identifiers(module))
        if is_private(name)
    ]


def is_private(name: str) -> bool:
    """Whether it is a private name, or has a private word as a part, other than the `flight` of
    `in_flight`.
    """
    words = re.findall(
        r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.replace("in_flight", "").replace("InFlight", "")
    )
    private = name.strip("_") in PRIVATE_NAMES or name.endswith("_there")
    return private or not PRIVATE_WORDS.isdisjoint(word.lower() for word in words)


def identifiers(module: Module) -> set[str]:
    """The names that the module defines: of itself, classes, functions, parameters, variables and
    attributes.
    """
    if module.name.endswith("_proto"):
        return set(re.findall(r"[A-Za-z_]\w*", re.sub(r"//.*|\"[^\"]*\"", "", module.source)))
    names = set() if module.is_generated else {module.name.rpartition(".")[2]}
    for node in module.nodes if not module.is_generated else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def proto_modules() -> list[Module]:
    """The .proto files, which only the rules of names read."""
    files = sorted((ROOT / "proto").glob("*.proto"))
    return [
        Module(name=f"tandem.proto.{path.stem}_proto", source=path.read_text()) for path in files
    ]


RULES: list[Rule] = [shares_class_names, uses_private_names]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert rule(package_modules() + proto_modules()) == []


def test_the_scan_sees_the_protos() -> None:
    assert {"GenerateRequest", "SamplingParams"} <= {
        name for module in proto_modules() for name in identifiers(module)
    }


CONTROLS: list[tuple[Rule, dict[str, str]]] = [
    (
        shares_class_names,
        {"cluster__x": "class Same: ...", "router__api__y": "def f():\n    class Same: ..."},
    ),
    (uses_private_names, {"cluster__x": "class Exporter: ..."}),
    (uses_private_names, {"cluster__x": "def open_doors(): ..."}),
    (uses_private_names, {"cluster__x": "def f(puller_id): ..."}),
    (uses_private_names, {"cluster__x": "x = leg = 1\nx.y = 2"}),
    (uses_private_names, {"cluster__x": "x.lease_ledger = 1"}),
    (uses_private_names, {"cluster__x": "async def draw(): ..."}),
    (uses_private_names, {"cluster__x": "kv_there = 1"}),
    (uses_private_names, {"cluster__x": "for job in x: ..."}),
    (uses_private_names, {"workers__transfer__outlets": "x = 1"}),
    (uses_private_names, {"proto__x_proto": "message Joined {\n  uint32 size = 1;\n}"}),
    (uses_private_names, {"proto__x_proto": "message M {\n  uint32 num_legs = 1;  // no job\n}"}),
]


@pytest.mark.parametrize(("rule", "sources"), CONTROLS)
def test_the_rule_complains(rule: Rule, sources: dict[str, str]) -> None:
    assert len(rule(made_up(**sources))) == 1


ALLOWED: dict[str, str] = {
    "cluster__terms": "num_in_flight = 1\nclass RunningInFlight: ...\nrun(doors)\n"
    "joined = legal = Choice = 1",
    "cluster__private": "class _Same: ...\nclass Same: ...",
    "workers__private": "class _Same: ...",
    "proto__big_pb2": "class Same: ...\nclass Job: ...",
    "proto__x_proto": "// Who tells the job?\nmessage M {\n}",
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_silent_about_good_code(rule: Rule) -> None:
    assert rule(made_up(**ALLOWED)) == []
