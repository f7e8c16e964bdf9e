"""Checks the architecture from the source: arrows, bans, cycles, sizes, names, packages.

Every rule is a function from modules to complaints, and every rule has a control that it must
complain about.
"""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePath

import pytest

from tandem.tests.source import ROOT, Module, Rule, made_up, package_modules

MAX_FILE_LINES = 490
REASON_FOR_LENGTH = "One file because"  # begins the sentence in the docstring of a longer file
MAX_FUNCTION_STATEMENTS = 40  # the docstring not counted
MAX_FOLDER_FILES = 16  # __init__ included
PRODUCT_FOLDERS = {"cluster", "proto", "router", "workers"}
SOURCE_SUFFIXES = {".py", ".c", ".h", ".js", ".css", ".html", ".proto"}


def _names(group: str) -> list[str]:
    """Returns the names of `folder: name name`, or the one name."""
    folder, colon, names = group.partition(": ")
    return [f"{folder}.{name}" for name in names.split()] if colon else [group]


# What a folder, or a single module, may import: its own modules always, those of folders below it
# only if named, `proto` always. `workers.model:` before a list of names stands before each of them.
ARROWS: dict[str, set[str]] = {
    name: {target for group in groups for target in _names(group)} | ({"proto"} - {name})
    for name, groups in {
        "proto": (),
        "workers.host": (),
        "workers.kv_cache": (),
        "workers.step_cost": (),
        "workers.engine": ("workers: kv_cache step_cost",),
        "workers.model.device": (),
        "workers.model.module": (),
        "workers.model.config": ("workers.kv_cache",),
        "workers.model.checkpoint": ("workers.kv_cache", "workers.model.config"),
        "workers.model.adapter_folder": ("workers.model.config",),
        "workers.model.footprint": ("workers: engine kv_cache", "workers.model.config"),
        "workers.model.parallel": ("workers.kv_cache",),
        "workers.model.kernels.c": (),
        "workers.model.kernels.triton": ("workers.model.device",),
        "workers.model.kernels": ("workers.model.kernels: c triton",),
        "workers.model.quant": (
            "workers.model: config kernels module",
            "workers.model.kernels: c triton",
        ),
        "workers.model.layers": (
            "workers.kv_cache",
            "workers.model: config kernels kernels.c kernels.triton module parallel quant states",
        ),
        "workers.model.kv": (
            "workers: host kv_cache",
            "workers.model: device kernels.c",
        ),
        "workers.model.attention": (
            "workers.kv_cache",
            "workers.model: device kernels kernels.c kernels.triton kv",
        ),
        "workers.model.models": (
            "workers: engine kv_cache",
            "workers.model: attention config layers module quant states",
        ),
        "workers.model.generic.states": ("workers.kv_cache", "workers.model.states"),
        "workers.model.generic": (
            "workers: engine kv_cache",
            "workers.model: attention config footprint kernels kernels.c layers models module",
            "workers.model: generic.states parallel quant states",
        ),
        "workers.model.states": ("workers.model: kernels kernels.c",),
        "workers.model.registry": ("workers.model: config generic models quant",),
        "workers.model.loader": (
            "workers.host",
            "workers.model: checkpoint config device layers models module parallel quant registry",
        ),
        "workers.model.costs": (
            "workers.kv_cache",
            "workers.model: config footprint loader quant",
        ),
        "workers.model.sampling": (
            "workers.engine",
            "workers.model: device kernels kernels.c kernels.triton",
        ),
        "workers.model": ("workers: engine host kv_cache", "workers.model: *"),
        "workers.transfer": ("workers: engine host kv_cache",),
        "workers.tp": ("workers: engine host kv_cache model transfer", "workers.model: *"),
        "workers.serve": ("workers: engine host kv_cache model tp transfer", "workers.model: *"),
        "workers": (),
        "router.request": (),
        "router.due_order": (),
        "router.fair_queue": ("router.due_order",),
        "router.fields": (),
        "router.auth": ("router.fields",),
        "router.deadline": (),
        "router.garbage": (),
        "router.resume": (),
        "router.stopping": (),
        "router.turns": (),
        "router.prompt_cache": (),
        "router.pooling": (),
        "router.client": (),
        "router.slo": ("router: auth fields",),
        "router.telemetry": ("router.slo",),
        "router.watermark": ("router: auth fields",),
        "router.adapters": ("router: auth fields request",),
        "router.scheduling": ("router: due_order fair_queue request",),
        "router.dispatch": ("router: deadline request scheduling",),
        "router.frontend.formats": (),
        "router.frontend.messages": ("router.frontend.formats",),
        "router.frontend.schemas": (),
        "router.frontend": (
            "router: auth due_order fair_queue frontend.formats frontend.messages",
            "router: frontend.schemas pooling prompt_cache",
            "router: request resume slo stopping telemetry turns watermark",
        ),
        "router.output": (
            "router: frontend frontend.formats frontend.schemas request resume stopping",
        ),
        "router.storage": ("router.auth",),
        "router.json_lines": ("router.fields",),
        "router.api.dialect": (),
        "router.api": (
            "router: adapters api.dialect auth deadline frontend output request resume scheduling",
            "router: slo storage telemetry",
        ),
        "router.api.console": ("router: auth frontend telemetry",),
        "router.api.openai": (
            "router: api api.console auth frontend frontend.schemas garbage output request resume",
            "router: storage telemetry",
        ),
        "router.api.anthropic": ("router: api api.openai frontend frontend.schemas output",),
        "router.api.batches": ("router: api api.openai auth frontend json_lines storage",),
        "router.api.responses": (
            "router: api api.openai frontend frontend.schemas output storage",
        ),
        "router.api.server": (
            "router: auth deadline frontend output request scheduling telemetry",
            "router: api api.anthropic api.batches api.console api.openai api.responses",
        ),
        "router": ("router: client deadline frontend request",),
        "": ("router.client", "cluster.local"),
        "cluster.certificate": (),
        "cluster.tables": (),
        "cluster.text_files": ("router.json_lines",),
        "cluster.traces": ("router.json_lines",),
        "cluster.chat_template": ("cluster.text_files",),
        "cluster.given_keys": ("router.auth",),
        "cluster.settings": ("cluster.given_keys",),
        "cluster.scaling.config": ("router.fields",),
        "cluster.scaling": ("cluster.scaling.config", "router.scheduling"),
        "cluster.parser_names": ("router.frontend.formats",),
        "cluster.request_defaults": ("router.frontend",),
        "cluster.config": (
            "cluster: chat_template parser_names request_defaults scaling.config settings",
            "cluster.text_files",
            "router: adapters api.dialect auth fields resume scheduling slo storage watermark",
            "workers.engine",
        ),
        "cluster.nodes": ("cluster.config",),
        "cluster.store": (
            "cluster: config request_defaults stop_signals",
            "router: adapters frontend pooling request",
            "workers: kv_cache model",
            "workers.model: adapter_folder config footprint loader registry",
        ),
        "cluster.service_url": ("cluster.serve", "router.client"),
        "cluster.eval": ("cluster.text_files", "router.client"),
        "cluster.bench": ("cluster: tables text_files traces", "router.client"),
        "cluster.sim": (
            "cluster: bench config local.session scaling scaling.config serve.members serve.views",
            "cluster.traces",
            "router: dispatch request scheduling telemetry",
            "workers: engine kv_cache serve tp transfer",
        ),
        "cluster.local.session": (),
        "cluster.local": (
            "cluster: config eval local.session settings store tables text_files",
            "router: *",
            "workers: *",
        ),
        "cluster.serve.members": (
            "cluster: scaling scaling.config",
            "cluster.serve.storage",
            "router: adapters dispatch storage",
        ),
        "cluster.serve.views": ("cluster: config serve.members", "router.api"),
        "cluster.serve.telemetry": (
            "cluster.traces",
            "router: api api.server dispatch scheduling slo telemetry",
        ),
        "cluster.serve.storage": (
            "cluster.local",
            "router: api api.batches auth storage telemetry",
        ),
        "cluster.serve": (
            "cluster: arithmetic certificate config local nodes scaling scaling.config",
            "cluster.serve.members",
            "cluster: serve.storage serve.telemetry serve.views store text_files",
            "router: *",
            "workers: *",
        ),
        "cluster.arithmetic": ("workers.model: config costs registry",),
        "cluster.explain": (
            "cluster: arithmetic cli.options config local planner.profile service_url sim store",
            "cluster: tables text_files",
            "router.client",
            "workers: host kv_cache",
            "workers.model: config costs device registry",
        ),
        "cluster.planner.profile": ("cluster.sim", "router.fields", "workers.engine"),
        "cluster.planner": (
            "cluster: arithmetic bench cli.options config explain local planner.profile serve sim",
            "cluster: scaling.config stop_signals store tables text_files traces",
            "router: client",
            "workers: engine host kv_cache serve tp",
            "workers.model: costs device footprint kv",
        ),
        "cluster.cli.options": (
            "cluster: config service_url settings text_files",
            "router.client",
        ),
        "cluster.stop_signals": (),
        "cluster.cli.answers": ("cluster.tables", "router: client telemetry"),
        "cluster.cli.demo": (
            "cluster: cli.answers config eval serve stop_signals store tables",
            "router: client telemetry",
        ),
        "cluster.cli.watermark": (
            "cluster: cli.options service_url text_files",
            "router: client watermark",
        ),
        "cluster.cli": ("cluster: *", "router: *", "workers: *"),
        "cluster": (),
    }.items()
}
for _targets in ARROWS.values():
    for _group in [target for target in _targets if target.endswith(".*")]:
        _targets.remove(_group)
        _targets.update(name for name in ARROWS if name.startswith(_group[:-1]))

# Which folders, with those below them, alone may import a library, or which may not.
ONLY_IN = {"ray": {"cluster.serve"}}
NOT_IN = {
    "torch": {"proto", "workers.engine", "router", "cluster.sim", ""},
    "transformers": {"proto", "workers.engine", ""},
    "grpc": {"workers.engine", "workers.model"},
    "grpc_health": {"workers.engine", "workers.model"},
    "grpc_reflection": {"workers.engine", "workers.model"},
}

# What can run code found in bytes.
FORBIDDEN_IMPORTS = {
    "pickle",
    "cloudpickle",
    "marshal",
    "dill",
    "shelve",
    "ray.cloudpickle",
    "torch.load",
    "yaml.load",
}
FORBIDDEN_IMPORTS |= {"yaml.unsafe_load", "yaml.full_load", "builtins.eval", "builtins.exec"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "ray.cloudpickle",
}
FORBIDDEN_NAMES = {call.rpartition(".")[2] for call in FORBIDDEN_CALLS}

# The folders whose code runs on the clock that it is given, so that `cluster.sim` can run it, and
# the exceptions: API servers and clients of real connections, and waits for processes and devices.
ON_A_CLOCK = ("tandem.router", "tandem.workers")
OFF_THE_CLOCK = (
    "tandem.router.api",
    "tandem.router.client",
    "tandem.router.frontend.child_process",
    "tandem.workers.transfer.backend",
    "tandem.workers.transfer.nixl_agent",
)


def folder_of(name: str) -> str:
    """The entry of ARROWS that is the module or its folder; `` is the package's root. Unknown: its
    own name.
    """
    inner = name.partition(".")[2]
    return next((folder for folder in (inner, inner.rpartition(".")[0]) if folder in ARROWS), name)


def edges(modules: list[Module]) -> dict[str, set[str]]:
    """Which module of ours imports which: names inside modules are cut back to the module that
    holds them.
    """
    known = {module.name for module in modules}

    def holder(name: str) -> str:
        while name not in known and "." in name and name.rpartition(".")[0].startswith("tandem"):
            name = name.rpartition(".")[0]
        return name

    return {
        module.name: {holder(name) for name in module.imports if name.split(".")[0] == "tandem"}
        - {module.name}
        for module in modules
    }


def breaks_arrows(modules: list[Module]) -> list[str]:
    complaints = []
    for name, targets in edges(modules).items():
        folder = folder_of(name)
        if folder not in ARROWS:
            complaints.append(f"{name} lies in a folder that the arrows do not know")
            continue
        allowed = ARROWS[folder] | {folder}
        complaints += [
            f"{name} imports {target}"
            for target in sorted(targets)
            if folder_of(target) not in allowed
        ]
    return complaints


def breaks_library_bans(modules: list[Module]) -> list[str]:
    complaints = []
    for module in modules:
        parts = folder_of(module.name).split(".")
        around = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        for library in sorted({name.split(".")[0] for name in module.imports}):
            is_banned = bool(around & NOT_IN.get(library, set()))
            if is_banned or not around & ONLY_IN.get(library, around):
                complaints.append(f"{module.name} imports {library}")
    return complaints


def has_cycle(modules: list[Module]) -> list[str]:
    return cycle_in(edges(modules))


def has_folder_cycle(modules: list[Module]) -> list[str]:
    """Complains about a cycle among the entries of ARROWS, so about one inside a folder too."""
    graph: dict[str, set[str]] = {}
    for name, targets in edges(modules).items():
        graph.setdefault(folder_of(name), set()).update(
            {folder_of(target) for target in targets} - {folder_of(name)}
        )
    return cycle_in(graph)


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def decodes_code(modules: list[Module]) -> list[str]:
    complaints = []
    for module in modules:
        for name in module.imports:
            if name in FORBIDDEN_IMPORTS or name.split(".")[0] in FORBIDDEN_IMPORTS:
                complaints.append(f"{module.name} imports {name}")
        for node in module.nodes:
            if isinstance(node, ast.Attribute | ast.Name):
                last = node.attr if isinstance(node, ast.Attribute) else node.id
                if last in FORBIDDEN_NAMES and ast.unparse(node) in FORBIDDEN_CALLS:
                    complaints.append(f"{module.name}:{node.lineno} uses {ast.unparse(node)}")
            if (
                isinstance(node, ast.keyword)
                and node.arg == "trust_remote_code"
                and ast.unparse(node.value) != "False"
            ):
                complaints.append(f"{module.name}:{node.lineno} trusts remote code")
    return complaints


def reads_another_clock(modules: list[Module]) -> list[str]:
    """Complains about code that reads the time itself instead of calling its `clock`."""

    def lies_in(module: Module, folders: tuple[str, ...]) -> bool:
        return f"{module.name}.".startswith(tuple(f"{folder}." for folder in folders))

    return [
        f"{module.name}:{node.lineno} calls {ast.unparse(node.func)}"
        for module in modules
        if lies_in(module, ON_A_CLOCK) and not lies_in(module, OFF_THE_CLOCK)
        for node in module.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and ast.unparse(node.func).rpartition(".")[2] == "monotonic"
    ]


def is_too_long(modules: list[Module]) -> list[str]:
    """Complains about functions of many statements, and about long files whose docstring gives no
    reason.
    """
    complaints = []
    for module in modules:
        if module.is_generated:
            continue
        num_lines = len(module.source.splitlines())
        if num_lines > MAX_FILE_LINES and REASON_FOR_LENGTH not in (
            ast.get_docstring(module.tree) or ""
        ):
            complaints.append(
                f"{module.name} has {num_lines} lines; its docstring does not say "
                f"`{REASON_FOR_LENGTH}`"
            )
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_statements = sum(isinstance(each, ast.stmt) for each in ast.walk(node)) - 1
                num_statements -= ast.get_docstring(node) is not None
                if num_statements > MAX_FUNCTION_STATEMENTS:
                    complaints.append(f"{module.name}.{node.name} has {num_statements} statements")
    return complaints


def full_folders(files: Iterable[PurePath]) -> list[str]:
    """Complains about folders with more source files than a reader can overlook."""
    counts = Counter(
        file.parent
        for file in files
        if file.suffix in SOURCE_SUFFIXES and not file.stem.endswith(("_pb2", "_pb2_grpc"))
    )
    return [
        f"{folder} has {count} files"
        for folder, count in counts.items()
        if count > MAX_FOLDER_FILES
    ]


RULES: list[Rule] = [
    breaks_arrows,
    breaks_library_bans,
    has_cycle,
    has_folder_cycle,
    decodes_code,
    reads_another_clock,
    is_too_long,
]


DATA_PACKAGES = {
    "tandem.cluster.chat_templates",
    "tandem.router.api.console.static",
    "tandem.workers.model.kernels.c.attention",
    "tandem.workers.model.kernels.c.linear",
    "tandem.workers.model.kernels.c.scan",
}
"""Folders without modules whose files setuptools installs only if they are listed as packages."""


def packages_off_the_list(modules: list[Module], listed: list[str]) -> set[str]:
    """Returns the packages that have files but are not listed, and the other way round."""
    return ({module.package for module in modules} | DATA_PACKAGES) ^ set(listed)


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert rule(package_modules()) == []


def test_no_folder_is_full() -> None:
    product = (path for path in ROOT.iterdir() if path.is_dir() and path.name in PRODUCT_FOLDERS)
    assert full_folders(file for folder in product for file in folder.rglob("*")) == []


def test_a_full_folder_is_seen() -> None:
    files = [PurePath("x") / f"{number}.c" for number in range(MAX_FOLDER_FILES)]
    assert full_folders(files) == []
    assert full_folders([*files, PurePath("x/y.py")]) == ["x has 17 files"]


def test_the_scan_sees_the_package() -> None:
    names = {module.name for module in package_modules()}
    assert {
        "tandem",
        "tandem.proto.errors",
        "tandem.workers.engine.plan",
        "tandem.cluster.store.store",
    } <= names
    imported = {
        "proto.errors",
        "cluster.cli.options",
        "cluster.local.llm",
        "cluster.stop_signals",
        "cluster.store.quantize",
        "cluster.store.store",
    }
    imported |= {"cluster.tables", "cluster.text_files", "workers.model.generic.context"}
    assert edges(package_modules())["tandem.cluster.cli.model"] == {
        f"tandem.{each}" for each in imported
    }


def test_proto_is_a_namespace_folder() -> None:
    # With an __init__.py it would hide the `proto` of proto-plus that Ray imports, whenever the
    # root is on sys.path.
    assert (ROOT / "proto" / "errors.py").exists()
    assert not (ROOT / "proto" / "__init__.py").exists()


def test_pyproject_lists_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert packages_off_the_list(package_modules(), listed) == set()
    assert packages_off_the_list(package_modules(), listed[1:]) == {listed[0]}
    assert packages_off_the_list(package_modules(), [*listed, "tandem.gone"]) == {"tandem.gone"}


CONTROLS: list[tuple[Rule, dict[str, str]]] = [
    (breaks_arrows, {"router__policy": "from ..workers.engine import plan"}),
    (breaks_arrows, {"router__policy": "from .. import workers", "workers": ""}),
    (breaks_arrows, {"router__policy": "import tandem.cluster.config"}),
    (breaks_arrows, {"workers__worker": "from tandem.router.request import Request"}),
    (breaks_arrows, {"workers__tp__rank": "from .. import worker", "workers__worker": ""}),
    (breaks_arrows, {"workers__tp__rank": "from ..worker import Worker", "workers__worker": ""}),
    (
        breaks_arrows,
        {"workers__kv_cache__layout": "from ..engine import plan", "workers__engine__plan": ""},
    ),
    (
        breaks_arrows,
        {
            "router__scheduling__policy": "from ..dispatch import attempt",
            "router__dispatch__attempt": "",
        },
    ),
    (breaks_arrows, {"cluster__store__hub": "from ..cli import main", "cluster__cli__main": ""}),
    (breaks_arrows, {"workers__model__runner": "from ..transfer import wire"}),
    (breaks_arrows, {"workers__transfer__wire": "def f():\n    from ..model.kv import KvCache"}),
    (breaks_arrows, {"workers__engine__plan": "from ..model import runner"}),
    (breaks_arrows, {"proto__limits": "from ..router import request"}),
    (breaks_arrows, {"proto__limits": "from .. import __version__", "router": ""}),
    (breaks_arrows, {"attic__junk": ""}),
    (breaks_arrows, {"workers__attic__junk": ""}),
    (breaks_library_bans, {"workers__engine__plan": "import torch.nn"}),
    (breaks_library_bans, {"workers__engine__plan": "import grpc"}),
    (breaks_library_bans, {"workers__engine__plan": "def f():\n    import ray"}),
    (breaks_library_bans, {"workers__model__runner": "from grpc import aio"}),
    (breaks_library_bans, {"workers__model__runner": "import ray"}),
    (breaks_library_bans, {"workers__serve__worker": "from ray import serve"}),
    (breaks_library_bans, {"router__policy": "from torch import Tensor"}),
    (breaks_library_bans, {"router__policy": "import ray.serve"}),
    (breaks_library_bans, {"router__api__server__x": "import torch"}),
    (has_cycle, {"router__a": "from . import b", "router__b": "from .a import x"}),
    (
        has_cycle,
        {"router__a": "from .b import x", "router__b": "def f():\n    from tandem.router import a"},
    ),
    (
        has_cycle,
        {
            "router__a": "from .b import x",
            "router__b": "import tandem.router.c",
            "router__c": "from . import a",
        },
    ),
    (
        has_folder_cycle,
        {
            "router__api__a": "from ..dispatch.b import x",
            "router__dispatch__b": "from ..api import c",
            "router__api__c": "",
        },
    ),
    (
        has_folder_cycle,
        {
            "cluster__cli__a": "from ..eval import b",
            "cluster__eval__b": "from ..cli import c",
            "cluster__cli__c": "",
        },
    ),
    (decodes_code, {"cluster__x": "import pickle"}),
    (decodes_code, {"cluster__x": "from ray import cloudpickle"}),
    (decodes_code, {"cluster__x": "from marshal import loads"}),
    (decodes_code, {"cluster__x": "eval('1')"}),
    (decodes_code, {"cluster__x": "exec('1')"}),
    (decodes_code, {"cluster__x": "import torch\ntorch.load('x')"}),
    (decodes_code, {"cluster__x": "from torch import load"}),
    (decodes_code, {"cluster__x": "import yaml\nyaml.load('x', yaml.SafeLoader)"}),
    (decodes_code, {"cluster__x": "f(trust_remote_code=True)"}),
    (reads_another_clock, {"router__x": "import time\nuntil = time.monotonic() + 1"}),
    (reads_another_clock, {"workers__serve__x": "from time import monotonic\nnow = monotonic()"}),
    (is_too_long, {"cluster__x": "x = 1\n" * (MAX_FILE_LINES + 1)}),
    (
        is_too_long,
        {"cluster__x": "async def f():\n" + "    x = 1\n" * (MAX_FUNCTION_STATEMENTS + 1)},
    ),
]


@pytest.mark.parametrize(("rule", "sources"), CONTROLS)
def test_the_rule_complains(rule: Rule, sources: dict[str, str]) -> None:
    assert len(rule(made_up(**sources))) == 1


ALLOWED: dict[str, str] = {
    "cluster__serve__app": "import ray\nimport torch\nfrom ...router import request\n"
    "from ...workers.serve import worker",
    "workers__serve__worker": "import grpc\nfrom ..tp import rank\nfrom ..model import runner\n"
    "from ...proto import limits",
    "router__client__wire": "import time\nnow = time.monotonic()",
    "router__deadline": "import time\ndef f(clock=time.monotonic):\n    return clock()",
    "workers__tp__rank": "from ..model import runner\nfrom ..engine.plan import StepPlan",
    "workers__model__runner": "import torch\nfrom ..engine.plan import StepPlan\nmodel.eval()\n"
    "yaml.safe_load('')",
    "workers__engine__plan": "def f():\n    'Why.'\n" + "    x = (\n1)\n" * MAX_FUNCTION_STATEMENTS,
    "router__request": "import grpc\nfrom ..proto.limits import MAX_TOKENS\n"
    "f(trust_remote_code=False)",
    "proto__limits": "MAX_TOKENS = 1\n" * MAX_FILE_LINES,
    "proto__parameters": f"'{REASON_FOR_LENGTH} it is a table.'\n" + "x = 1\n" * MAX_FILE_LINES,
    "proto__big_pb2": "x = 1\n" * (MAX_FILE_LINES + 1),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_silent_about_good_code(rule: Rule) -> None:
    assert rule(made_up(**ALLOWED)) == []
