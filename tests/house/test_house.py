"""What a linter cannot hold: the shape of the house."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOMES = ("api", "kernels", "operator", "pipelines", "workers")
MODULES = [path for home in HOMES for path in sorted((ROOT / home / f"eyrie_{home}").rglob("*.py"))]


def test_the_top_level_holds_exactly_the_agreed_entries() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout: nothing to compare")
    names = {path.split("/")[0] for path in tracked}
    visible = {name for name in names if not name.startswith(".")}
    assert visible <= {"pyproject.toml", "README.md", "Makefile", "LICENSE", "constraints.txt", "tests", "helm", *HOMES}


@pytest.mark.parametrize("home", HOMES)
def test_no_python_lies_directly_in_a_home(home: str) -> None:
    assert list((ROOT / home).glob("*.py")) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_the_room_is_for_in_ascii(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)), "add a module docstring"
    assert source.isascii(), "code is ASCII; write escapes for data"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_named_vaguely_or_after_the_standard_library_package(path: Path) -> None:
    assert path.stem not in {"utils", "util", "common", "helpers", "manager", "misc"}
    assert path.parent.name.startswith("eyrie_") is False or path.stem not in {"operator", "types", "typing", "logging"}


def test_the_control_plane_imports_without_torch_or_transformers() -> None:
    code = (
        "import sys, pkgutil, importlib\n"
        "import eyrie_api, eyrie_operator, eyrie_pipelines\n"
        "for package in (eyrie_api, eyrie_operator, eyrie_pipelines):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if '.migrations' not in module.name:\n"
        "            importlib.import_module(module.name)\n"
        "heavy = {'torch', 'transformers', 'sglang'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_api_accepts_exactly_the_families_the_workers_can_compute() -> None:
    from eyrie_api.v1alpha1.targets import SUPPORTED_ARCHITECTURES
    from eyrie_workers.targets.config import FAMILIES

    assert {name.removesuffix("ForCausalLM").lower() for name in SUPPORTED_ARCHITECTURES} == set(FAMILIES)


# The mistakes it makes on purpose are those of one family's checkpoints, and it says so.
ENGINE = [path for room in ("speculation", "stages", "measurement")
          for path in sorted((ROOT / "workers/eyrie_workers" / room).glob("*.py")) if path.stem != "suspects"]


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_file_of_the_engine_knows_a_family_by_name(path: Path) -> None:
    families = {"eagle1", "eagle3", "medusa", "hydra", "standalone", "dflash"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {part for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
                for part in (*node.module.split("."), *(alias.name for alias in node.names))}
    told = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not families & (imported | told)
