"""What each image and `make setup` install, each distribution with its version and the hashes of its files.

    make requirements                                # asks PyPI for the hashes, writes the files
    python -m tests.helm.image_requirements local    # prints the part of `.ci/requirements.txt` that an extra brings

The distributions are those that the extras bring, read from the environment of the tests (Python 3.11, as in the
images); the versions are those of constraints.txt. `<image>/requirements.txt` has the hashes of wheels for Python 3.11
on Linux (x86-64 and ARM), `.ci/requirements.txt`, of the extra `dev`, those for Python 3.11 to 3.14 on Linux and macOS;
of sources where there is no wheel. `.ci/wheel` installs the part of it that `local` brings.
`operator/build-requirements.txt` is what builds the wheels, in an environment that no image keeps. torch is not listed:
it has several builds of one version, with other hashes each, of which the user chooses one (`TORCH_INDEX`, or a
directory of wheels), so it is pinned by version.

constraints.txt itself has no hashes: with one hash in it pip demands a hash of everything, torch and this checkout
included.
"""

import importlib.metadata as metadata
import json
import re
import sys
import tomllib
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[2]
EXTRAS = {"api": ["api"], "operator": ["operator"], "workers": ["workers", "pipelines", "trackers"]}
SETUP = ".ci/requirements.txt"
BUILD = "operator/build-requirements.txt"
BUILDERS = ("hatchling", "setuptools")
"""kfp-server-api is published as sources alone, for setuptools."""

_LINUX = [f"manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1) for machine in ("x86_64", "aarch64")] + [
    f"manylinux{old}_{machine}" for old in ("2014", "2010", "1") for machine in ("x86_64", "aarch64")]
_MACOS = [*mac_platforms((26, 0), "arm64"), *mac_platforms((26, 0), "x86_64")]


def _tags(pythons: Iterable[tuple[int, int]], platforms: Sequence[str]) -> frozenset[Tag]:
    return frozenset(tag for python in pythons for tag in (
        *cpython_tags(python, platforms=platforms),
        *compatible_tags(python, f"cp{python[0]}{python[1]}", platforms)))


_IMAGE_TAGS = _tags([(3, 11)], _LINUX)
_SETUP_TAGS = _tags([(3, minor) for minor in range(11, 15)], [*_LINUX, *_MACOS])
_HEAD = "# Written by `make requirements` from constraints.txt: do not edit.\n"


def canonical(name: str) -> str:
    """A distribution's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """The version of each distribution in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    split = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version.strip() for name, version in split}


def brought(extras: Iterable[str]) -> set[str]:
    """Names of the distributions that an installation of Eyrie with `extras` needs, itself included."""
    # As pyproject.toml has it now: the installed metadata is of the day the environment was made.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = list(project["dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        for line in lines:
            need, _, marker = line.partition(";")
            ours.append(f"{need} ; {f'({marker.strip()}) and ' if marker else ''}extra == '{extra}'")
    return _closure([("eyrie", frozenset(extras))], {"eyrie": ours})


def _closure(roots: Sequence[tuple[str, frozenset[str]]], known: dict[str, list[str]]) -> set[str]:
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = list(roots)
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            needs = known.get(name) or metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in needs:
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                todo.append((canonical(need.name), frozenset(need.extras)))
    return {name for name, _ in seen}


def entries(path: str) -> dict[str, str]:
    """The entry of each distribution in a requirements file of this module."""
    lines = (ROOT / path).read_text().replace("\\\n", " ").splitlines()
    return {line.partition("==")[0]: line for line in lines if line and not line.startswith("#")}


def listed(path: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each distribution in a requirements file of this module."""
    return {name: (entry.partition("==")[2].split()[0], len(re.findall(r"--hash=sha256:[0-9a-f]{64}", entry)))
            for name, entry in entries(path).items()}


def wanted(extras: Iterable[str]) -> dict[str, str]:
    """Name and version of what the requirements list: what the extras bring, without Eyrie and torch."""
    pinned = pins()
    return {name: pinned[name] for name in sorted(brought(extras) - {"eyrie", "torch"}) if name in pinned}


def _files(name: str, version: str, index: str, usable: frozenset[Tag]) -> list[str]:
    """Hashes of the files of a version: of its wheels that have a tag in `usable`, else of its sources."""
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/",
                                     headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    wheels, sources = [], []
    for file in files:
        try:
            if file["filename"].endswith(".whl"):
                _, of, _, tags = parse_wheel_filename(file["filename"])
                if of == Version(version) and tags & usable:
                    wheels.append(file["hashes"]["sha256"])
            elif parse_sdist_filename(file["filename"])[1] == Version(version):
                sources.append(file["hashes"]["sha256"])
        except (InvalidWheelFilename, InvalidSdistFilename):
            continue
    if not wheels and not sources:
        sys.exit(f"the index has no usable file of {name} {version}")
    return sorted(wheels or sources)


def _write(path: str, versions: dict[str, str], index: str, usable: frozenset[Tag] = _IMAGE_TAGS) -> None:
    with ThreadPoolExecutor(8) as pool:
        hashes = list(pool.map(lambda one: _files(*one, index, usable), versions.items()))
    lines = [f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{one}" for one in of)
             for (name, version), of in zip(versions.items(), hashes, strict=True)]
    (ROOT / path).write_text(_HEAD + "\n".join(lines) + "\n")
    print(f"{path}: {len(versions)} distributions, {sum(map(len, hashes))} files")


def main() -> None:
    """Write the requirements of the three images, of their build, and of `make setup`; or print those of an extra."""
    if extras := sys.argv[1:]:
        pinned = entries(SETUP)
        print("\n".join(pinned[name] for name in wanted(extras)))
        return
    from pip._internal.models.index import PyPI

    for image, extras in EXTRAS.items():
        _write(f"{image}/requirements.txt", wanted(extras), PyPI.simple_url)
    _write(SETUP, wanted(["dev"]), PyPI.simple_url, _SETUP_TAGS)
    pinned = pins()
    builders = _closure([(name, frozenset()) for name in BUILDERS], {})
    for name in BUILDERS:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            sys.exit(f"{name} is not installed here: pip install -c constraints.txt {name}")
    if missing := builders - set(pinned):
        sys.exit(f"constraints.txt has no version of {', '.join(sorted(missing))}")
    _write(BUILD, {name: pinned[name] for name in sorted(builders)}, PyPI.simple_url)


if __name__ == "__main__":
    main()
