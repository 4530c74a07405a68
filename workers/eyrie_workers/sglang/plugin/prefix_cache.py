"""Selects SGLang's prefix cache in Python where the one in Rust was compiled for another torch.

The wheel of SGLang 0.5.23 has the Rust library compiled for the torch that its metadata asks for. SGLang accepts it
with torch 2.11 to 2.14 (`rust_extensions.torch_build`, the range for which it can be built from source); with 2.11.0 it
loads, and the server ends at the first request. The variable is read when a scheduler makes its cache
(`tree_core_registry.select_tree_core_backend`). This runs before, in the launcher, whose processes inherit the
variable: as a plugin of SGLang (`plugin_files` writes the entry point), and in `guarded`.
"""

import importlib.metadata
import os
import sys
from collections.abc import Iterable

from packaging.requirements import Requirement

VARIABLE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


def other_torch(requirements: Iterable[str], installed: str) -> str | None:
    """The versions of torch that a package asks for, if the installed one is not among them. Pure."""
    for wanted in map(Requirement, requirements):
        if wanted.name == "torch" and (wanted.marker is None or wanted.marker.evaluate()) and (
                not wanted.specifier.contains(installed, prereleases=True)):
            return str(wanted.specifier)
    return None


def select_prefix_cache() -> None:
    """Set the variable, unless the user has set it or the versions are not known."""
    if VARIABLE in os.environ:
        return
    try:
        installed = importlib.metadata.version("torch")
        asked = other_torch(importlib.metadata.requires("sglang") or (), installed)
    except importlib.metadata.PackageNotFoundError:
        return
    if asked is not None:
        os.environ[VARIABLE] = "python"
        print(f"[eyrie] {VARIABLE}=python: torch {installed} is installed, and SGLang's prefix cache in Rust was "
              f"compiled for torch{asked}", file=sys.stderr, flush=True)
