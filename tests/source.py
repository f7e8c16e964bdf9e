"""Reads the package's source for the tests that check its structure and its names."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file of the package; `name` is absolute and a package's is that of its
    `__init__`.
    """

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, which every rule walks."""
        return list(ast.walk(self.tree))

    @property
    def is_generated(self) -> bool:
        return self.name.endswith(("_pb2", "_pb2_grpc"))

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def imports(self) -> list[str]:
        """The absolute dotted names of everything imported anywhere in the file, functions and
        TYPE_CHECKING too.
        """
        return list(imported_names(self))


Rule = Callable[[list[Module]], list[str]]


@cache
def package_modules() -> list[Module]:
    outside = ("tests", "build", "dist")
    folders = [
        path
        for path in ROOT.iterdir()
        if path.is_dir() and path.name[0] != "." and path.name not in outside
    ]
    modules = []
    for path in sorted(
        [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    ):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(("tandem", *(parts[:-1] if is_package else parts)))
        modules.append(Module(name=name, source=path.read_text(), is_package=is_package))
    return modules


def imported_names(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def made_up(**sources: str) -> list[Module]:
    """Modules by names with `__` for the dot: `router__policy` is
    tandem.router.scheduling.policy.
    """
    return [
        Module(name=f"tandem.{name.replace('__', '.')}", source=source)
        for name, source in sources.items()
    ]
