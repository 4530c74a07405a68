"""`python -m eyrie_workers.sglang.plugin_files --directory D`: our package for an interpreter without Eyrie.

SGLang imports `eyrie_workers.sglang.plugin` in its own interpreter. Only that package, what it imports of ours
and the `__init__` of the parents are copied, because the whole may be in site-packages: with those on its path SGLang
would import our torch. In a cluster an init container of the stages' image copies them into a volume, so that SGLang's
own images serve. An entry point makes SGLang call `plugin.prefix_cache` in each of its processes.
"""

import argparse
import shutil
from pathlib import Path

import eyrie_workers

PACKAGE = "eyrie_workers.sglang.plugin"
_IMPORTED = "eyrie_workers.engines.request_rules"


def place_plugin(root: Path) -> None:
    """Copy the package below `root`, which then is what PYTHONPATH has to name. Safe to repeat."""
    installed = Path(eyrie_workers.__file__).parents[1]
    plugin = PACKAGE.replace(".", "/")
    files = [*installed.glob(f"{plugin}/*.py"), installed / f"{_IMPORTED.replace('.', '/')}.py",
             *(installed / parent / "__init__.py" for parent in Path(plugin).parents if parent.name)]
    for file in files:
        copy = root / file.relative_to(installed)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    installed_as = root / "eyrie_sglang-1.dist-info"
    installed_as.mkdir(exist_ok=True)
    (installed_as / "METADATA").write_text("Metadata-Version: 2.1\nName: eyrie-sglang\nVersion: 1\n")
    (installed_as / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\neyrie = {PACKAGE}.prefix_cache:select_prefix_cache\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy the package that SGLang imports.")
    parser.add_argument("--directory", type=Path, required=True, help="goes into SGLang's PYTHONPATH")
    place_plugin(parser.parse_args().directory)


if __name__ == "__main__":
    main()
