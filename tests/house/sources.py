"""The source files of the five packages and of the benchmarks, parsed, and the imports between them."""

import ast
from collections.abc import Collection
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("api", "kernels", "operator", "pipelines", "workers")


@cache
def modules() -> tuple[Path, ...]:
    """Every Python file that the wheel contains."""
    return tuple(path for component in COMPONENTS
                 for path in sorted((ROOT / component / f"eyrie_{component}").rglob("*.py")))


@cache
def benchmarks() -> tuple[Path, ...]:
    """Every Python file of benchmarks that is not a test."""
    paths = sorted((ROOT / "benchmarks").rglob("*.py"))
    return tuple(path for path in paths if not path.stem.startswith("test_"))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    """The name a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1 if parts[0] in COMPONENTS else 0:]).removesuffix(".__init__")


@cache
def imports(*, type_checking: bool = True) -> dict[str, frozenset[str]]:
    """Module -> the modules of ours that it imports anywhere, inside functions too.

    `from package import name` is an import of the module `package.name` where there is one, else of `package`. With
    `type_checking` False, imports under `if TYPE_CHECKING` are left out: they do not run.
    """
    files = {dotted(path): path for path in (*modules(), *benchmarks())}
    return {name: frozenset(_imported(parsed(path), files.keys(), type_checking)) - {name}
            for name, path in files.items()}


@cache
def programs() -> dict[str, frozenset[str]]:
    """Module -> the modules of ours that it names in a string, as it does to start them by `python -m`."""
    files = {dotted(path): path for path in modules()}
    return {name: frozenset(node.value for node in ast.walk(parsed(path))
                            if isinstance(node, ast.Constant) and node.value in files) - {name}
            for name, path in files.items()}


def _imported(tree: ast.Module, known: Collection[str], type_checking: bool) -> set[str]:
    found = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if not type_checking and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(full if (full := f"{node.module}.{alias.name}") in known else node.module
                         for alias in node.names)
    return {name for name in found if name in known}
