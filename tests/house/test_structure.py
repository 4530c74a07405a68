"""What no linter checks: top-level entries, module names and docstrings, what may know what."""

import ast
import importlib.util
import subprocess
from collections.abc import Iterator

import pytest

from tests.house.sources import COMPONENTS, ROOT, modules, parsed

TOP_LEVEL = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md", "constraints.txt",
             "benchmarks", "docs", "helm", "pyproject.toml", "tests", *COMPONENTS}


def test_the_top_level_contains_only_the_agreed_entries() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout: nothing to compare")
    assert {name for path in tracked if not (name := path.split("/")[0]).startswith(".")} <= TOP_LEVEL


def test_no_python_file_lies_directly_in_a_component_folder() -> None:
    assert [path for component in COMPONENTS for path in (ROOT / component).glob("*.py")] == []


def test_every_module_has_a_docstring_and_is_ascii() -> None:
    assert [path for path in modules() if not ast.get_docstring(parsed(path))] == []
    assert [path for path in modules() if not path.read_text(encoding="utf-8").isascii()] == []


def test_no_module_has_a_vague_name_or_that_of_a_standard_library_module_at_package_level() -> None:
    vague = {"utils", "util", "common", "helpers", "manager", "misc", "base"}
    assert [path for path in modules() if path.stem in vague] == []
    assert [path for path in modules() if path.parent.name.startswith("eyrie_")
            and path.stem in {"operator", "types", "typing", "logging"}] == []


def test_the_api_accepts_exactly_the_target_families_that_the_workers_implement() -> None:
    from eyrie_api.contract.targets import SUPPORTED_ARCHITECTURES
    from eyrie_api.planning.target_config import FAMILIES

    without = {"MiMoForCausalLM"}  # a Qwen 2 with another name
    assert {name.removesuffix("ForCausalLM").lower() for name in {*SUPPORTED_ARCHITECTURES} - without} == set(FAMILIES)


def _names_and_strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from node.module.split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_decoding_stages_and_measurement_name_no_drafter_family() -> None:
    families = {"eagle1", "eagle3", "medusa", "hydra", "standalone", "dflash", "dspark"}
    workers = ROOT / "workers/eyrie_workers"
    paths = [path for package in ("speculation", "stages", "measure") for path in (workers / package).rglob("*.py")
             # The misconfigurations are those of one family's checkpoints; train reports MFU with EAGLE-3's operations.
             if path.stem not in ("known_misconfigurations", "train")]
    assert len(paths) > 30
    named = {path: families.intersection(_names_and_strings(parsed(path))) for path in paths}
    assert {path: found for path, found in named.items() if found} == {}


def test_every_program_of_the_catalog_exists() -> None:
    from eyrie_workers.catalog import CATALOG

    named = [(stage.module, stage.together, stage.before) for stage in CATALOG.values()]
    programs = [program for programs in named for program in programs if program]
    assert len(programs) > len(CATALOG)
    assert [program for program in programs if importlib.util.find_spec(program) is None] == []
