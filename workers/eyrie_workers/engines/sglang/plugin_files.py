"""`python -m eyrie_workers.engines.sglang.plugin_files --directory D`: our package for an interpreter without Eyrie.

SGLang imports `eyrie_workers.engines.sglang.plugin` in its own interpreter. Only that package and the `__init__` of its
parents are copied, because the whole may be in site-packages: with those on its path SGLang would import our torch.
In a cluster an init container of the stages' image copies them into a volume, so that SGLang's own images serve.
"""

import argparse
import shutil
from pathlib import Path

import eyrie_workers

PACKAGE = "eyrie_workers.engines.sglang.plugin"


def place_plugin(root: Path) -> None:
    """Copy the package below `root`, which then is what PYTHONPATH has to name. Safe to repeat."""
    source = Path(eyrie_workers.__file__).parent
    parts = PACKAGE.split(".")[1:]
    folder = root / "eyrie_workers"
    if folder.is_symlink():  # of an earlier version, which linked the whole package
        folder.unlink()
    for part in (None, *parts):
        if part is not None:
            source, folder = source / part, folder / part
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.glob("*.py") if part == parts[-1] else (source / "__init__.py",):
            shutil.copyfile(file, folder / file.name)


def main() -> None:
    """Copy it."""
    parser = argparse.ArgumentParser(description="Copy the package that SGLang imports.")
    parser.add_argument("--directory", type=Path, required=True, help="goes into SGLang's PYTHONPATH")
    place_plugin(parser.parse_args().directory)


if __name__ == "__main__":
    main()
