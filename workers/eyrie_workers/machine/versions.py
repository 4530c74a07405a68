"""Versions of the libraries that compute on a GPU: reported where they are not those Eyrie is tested with, not refused.

An image for GPUs has the torch, Triton and CUDA of its maker. The ranges are the installed package's own requirements;
a checkout that is not installed has none.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement

_LIBRARIES = ("torch", "triton", "transformers")


def other_versions(requirements: Iterable[str], installed: Mapping[str, str]) -> list[str]:
    """One line for each installed library that is outside its required range. Pure."""
    lines = []
    for wanted in map(Requirement, requirements):
        found = installed.get(wanted.name)
        if found is not None and not wanted.specifier.contains(found, prereleases=True):
            lines.append(f"{wanted.name} {found} is installed, and Eyrie is tested with "
                         f"{wanted.name}{wanted.specifier}: if results differ, install a version of that range")
    return list(dict.fromkeys(lines))


def version_notes() -> list[str]:
    """`other_versions` of this Python."""
    installed = {}
    for name in _LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        return other_versions(importlib.metadata.requires("eyrie") or (), installed)
    except importlib.metadata.PackageNotFoundError:
        return []
