"""Checks from the source what makes whole classes of defects impossible; each rule has controls
that it must refuse.

That nothing decodes code from bytes is a rule of test_architecture.py.
"""

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest
from packaging.version import Version

from tandem.tests.source import ROOT, Module, Rule, made_up, package_modules

LOG_METHODS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
LOGGERS = {"log", "_log", "logger", "_logger", "logging"}
SECRET_WORDS = {
    *(
        "authorization",
        "body",
        "chat",
        "completion",
        "content",
        "credential",
        "credentials",
        "header",
        "headers",
        "ids",
    ),
    *(
        "key",
        "keys",
        "messages",
        "metadata",
        "password",
        "prompt",
        "prompts",
        "request",
        "salt",
        "secret",
    ),
    *("text", "texts", "token", "tokens"),
}
"""Parts of the names of what a caller sent, or is given; but a request's id names it in logs, and
is printable.
"""

SHELLS = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "pty.spawn",
}
TEMPLATES = {
    "jinja2.Environment",
    "jinja2.Template",
    "jinja2.environment.Environment",
    "jinja2.environment.Template",
}


def calls(module: Module) -> Iterator[ast.Call]:
    if not module.is_generated:
        yield from (node for node in module.nodes if isinstance(node, ast.Call))


def asserts_of_callers(modules: list[Module]) -> list[str]:
    """Complains of an assert that may check what came from outside: `python -O` removes it. Allowed
    are those that tell a type to the type checker, and `check_integrity`.
    """
    complaints = []
    for module in modules:
        integrity = [
            (node.lineno, node.end_lineno or 0)
            for node in module.nodes
            if isinstance(node, ast.FunctionDef) and node.name == "check_integrity"
        ]
        for node in module.nodes:
            if not isinstance(node, ast.Assert) or any(
                begin <= node.lineno <= end for begin, end in integrity
            ):
                continue
            if not re.fullmatch(
                r"[\w.]+ is not None|isinstance\([\w.]+, [\w.]+\)", ast.unparse(node.test)
            ):
                complaints.append(f"{module.name}:{node.lineno} asserts {ast.unparse(node.test)}")
    return complaints


def runs_a_shell(modules: list[Module]) -> list[str]:
    complaints = []
    for module in modules:
        for call in calls(module):
            shell = any(
                each.arg == "shell" and ast.unparse(each.value) != "False" for each in call.keywords
            )
            if shell or ast.unparse(call.func) in SHELLS:
                complaints.append(f"{module.name}:{call.lineno} runs a shell")
        complaints += [f"{module.name} imports {name}" for name in module.imports if name in SHELLS]
    return complaints


def receives_pickles(modules: list[Module]) -> list[str]:
    """Complains of multiprocessing's `recv()`, and of numpy files that may hold objects."""
    return [
        f"{module.name}:{call.lineno} unpickles"
        for module in modules
        for call in calls(module)
        if (isinstance(call.func, ast.Attribute) and call.func.attr == "recv" and not call.args)
        or any(
            each.arg == "allow_pickle" and ast.unparse(each.value) != "False"
            for each in call.keywords
        )
    ]


def renders_outside_the_sandbox(modules: list[Module]) -> list[str]:
    return [
        f"{module.name} imports {name}"
        for module in modules
        for name in module.imports
        if name in TEMPLATES
    ]


def logs_what_callers_sent(modules: list[Module]) -> list[str]:
    """Complains of a log call with a variable that may hold a key or a text; of print in what
    serves; and where texts and keys are known, which workers never see, of tracebacks, whose last
    line is the text of an exception.
    """
    complaints = []
    for module in modules:
        for call in calls(module):
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            owner = ast.unparse(call.func).split(".")[-2] if method else ""
            if method in LOG_METHODS and owner in LOGGERS:
                names = secret_names(call)
                traced = method == "exception" or any(
                    each.arg in ("exc_info", "stack_info") for each in call.keywords
                )
                names += (
                    ["a traceback"]
                    if traced and not module.name.startswith("tandem.workers.")
                    else []
                )
                complaints += [f"{module.name}:{call.lineno} logs {name}" for name in names]
            elif ast.unparse(call.func) == "print" and re.match(
                r"tandem\.(router|proto|workers(?!\.bench))", module.name
            ):
                complaints.append(f"{module.name}:{call.lineno} prints")
    return complaints


def secret_names(call: ast.Call) -> list[str]:
    """The identifiers in the arguments that have a secret word as a part, but those in type(...)
    and len(...).
    """
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("type", "len"):
            return
        if isinstance(node, ast.Attribute) and node.attr == "request_id":
            return
        name = (
            node.id
            if isinstance(node, ast.Name)
            else node.attr
            if isinstance(node, ast.Attribute)
            else ""
        )
        if SECRET_WORDS & set(name.lower().split("_")):
            found.append(name)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for argument in [*call.args, *(each.value for each in call.keywords)]:
        visit(argument)
    return found


FLOORS = {
    # CVE-2025-53643, CVE-2025-69223: request smuggling, unpacked bodies without a bound
    "aiohttp": "3.13.3",
    "filelock": "3.20.3",  # CVE-2025-68146: links in place of lock files
    "h11": "0.16.0",  # CVE-2025-43859: request smuggling
    "jinja2": "3.1.6",  # CVE-2025-27516: out of the sandbox
    "protobuf": "6.33.5",  # CVE-2025-4565, CVE-2026-0994: recursion
    "pyyaml": "5.4",  # CVE-2020-14343: full_load runs code
    "ray": "2.52.0",  # CVE-2025-62593: DNS rebinding runs code by the dashboard
    "starlette": "0.49.1",  # CVE-2025-54121, CVE-2025-62727: a header that takes quadratic time
    "torch": "2.6.0",  # CVE-2025-32434: torch.load runs code
    "transformers": "4.53.0",  # CVE-2025-6921: regular expressions without end
}
"""The first version of a dependency without a known vulnerability of a kind that reaches us."""


def versions(lines: list[str], operator: str) -> dict[str, Version]:
    split = [line.partition(operator) for line in lines if operator in line]
    return {
        name.partition("[")[0].lower(): Version(version.partition(",")[0])
        for name, _, version in split
    }


def test_no_dependency_may_be_older_than_its_repair() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = versions(declared, ">=")
    pins = versions((ROOT / "constraints.txt").read_text().splitlines(), "==")
    too_old = {name for name in FLOORS if floors.get(name, Version("999")) < Version(FLOORS[name])}
    assert too_old | {name for name in FLOORS if pins[name] < Version(FLOORS[name])} == set()
    assert set(floors) <= set(pins)


RULES: list[Rule] = [
    asserts_of_callers,
    runs_a_shell,
    receives_pickles,
    renders_outside_the_sandbox,
]
RULES += [logs_what_callers_sent]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    printing = {"tandem.proto.parameters", "tandem.workers.model.registry"}  # their __main__
    hand_written = [module for module in package_modules() if module.name not in printing]
    assert rule(hand_written) == []


CONTROLS: list[tuple[Rule, str]] = [
    (asserts_of_callers, "assert n > 0"),
    (asserts_of_callers, "def check(n):\n    assert isinstance(n, int) and n > 0, 'n'"),
    (runs_a_shell, "subprocess.run('ls', shell=True)"),
    (runs_a_shell, "subprocess.run('ls', shell=flag)"),
    (runs_a_shell, "import os\nos.system('ls')"),
    (runs_a_shell, "from os import popen"),
    (receives_pickles, "found = connection.recv()"),
    (receives_pickles, "np.load(path, allow_pickle=True)"),
    (renders_outside_the_sandbox, "from jinja2 import Template"),
    (logs_what_callers_sent, "_log.debug('%s', prompt)"),
    (logs_what_callers_sent, "log.info(f'key {self.api_key[:4]}')"),
    (
        logs_what_callers_sent,
        "logging.getLogger('x').error('%r', x)\n_log.error('x', extra={'a': request.text})",
    ),
    (logs_what_callers_sent, "_log.exception('failed')"),
    (logs_what_callers_sent, "_log.error('failed', exc_info=error)"),
    (logs_what_callers_sent, "print(x)"),
]


@pytest.mark.parametrize(("rule", "source"), CONTROLS)
def test_the_rule_complains(rule: Rule, source: str) -> None:
    assert rule(made_up(router__api__x=source))


ALLOWED = """
class A:
    def check_integrity(self):
        assert self.held == self.free
def f(group, log):
    assert group is not None
    assert isinstance(group, Group)
    subprocess.run(["ls"], shell=False)
    connection.recv_bytes()
    log.warning("%d of %s", len(tokens), type(prompt).__name__)
    math.log(tokens)
"""


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_silent_about_good_code(rule: Rule) -> None:
    assert rule(made_up(router__api__x=ALLOWED)) == []
