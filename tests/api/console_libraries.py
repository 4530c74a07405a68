"""The console's npm packages: their files fetched by their pins, their known vulnerabilities, their entries in an SBOM.

    python -m tests.api.console_libraries fetch              # make console-assets
    python -m tests.api.console_libraries audit              # exit code 75: the registry does not answer
    python -m tests.api.console_libraries sbom FILE...       # adds the packages to CycloneDX documents

`libraries.json` pins each package: version, the `integrity` that the registry publishes for its tarball, and which of
its files are shipped under which names. `fetch` compares every tarball with its integrity before it writes a file, and
writes the files and the table of LICENSES.md; run again it writes the same bytes. A new version is a change of
`version` and `integrity` (`npm view NAME@VERSION dist.integrity`). Needs no node.

What a package's own build has bundled into its file, such as d3 in Vega's, is not listed: the packages do not say in
which versions.
"""

import argparse
import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import httpx

from eyrie_api.errors import EyrieError, InvalidInput, Transient, report_error

CONSOLE = Path(__file__).parents[2] / "api/eyrie_api/http/console"
PINS = CONSOLE / "libraries.json"
_BEGIN, _END = "|---|---|---|---|---|\n", "\n\n"
"""Around the rows of the table in LICENSES.md."""

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Library:
    """A pinned package. `files`: the name here of each shipped file, and its path within the package."""

    package: str
    version: str
    licence: str
    copyright: str
    integrity: str
    files: dict[str, str]


def pinned() -> list[Library]:
    """The packages of libraries.json."""
    return [Library(**one) for one in json.loads(PINS.read_text())]


def registry() -> str:
    """The registry's address by npm's configuration, with a slash at its end. Raises Transient where none is named."""
    address = next((value for name, value in os.environ.items() if name.lower() == "npm_config_registry"), "")
    npm = shutil.which("npm")
    if not address and npm is not None:
        done = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, check=False,
                              timeout=60)
        address = done.stdout.strip() if done.returncode == 0 else ""
    if not address:
        raise Transient("no npm registry is known", "set NPM_CONFIG_REGISTRY to its address, or install npm")
    return address.rstrip("/") + "/"


def files_of(library: Library, tarball: bytes) -> dict[str, bytes]:
    """The shipped files of a package's tarball by their names here. Raises InvalidInput unless the tarball is the
    pinned one and has them."""
    digest = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    named = f"{library.package} {library.version}"
    if digest != library.integrity:
        raise InvalidInput(f"the tarball of {named} has the integrity {digest}, not {library.integrity}",
                           f"compare with `npm view {library.package}@{library.version} dist.integrity`; nothing was "
                           "written")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(tarball), mode="r:gz") as archive:
        for name, path in library.files.items():
            try:
                member = archive.extractfile(f"package/{path}")
            except KeyError:
                member = None
            if member is None:
                raise InvalidInput(f"{named} has no file {path!r}", f"correct `files` in {PINS.name}")
            found[name] = member.read()
    return found


def rows(libraries: list[Library], static: Path) -> str:
    """The rows of the table in LICENSES.md, of the files in `static`."""
    return "\n".join(
        f"| {name} | {one.package} | {one.version} | {one.licence}, {one.copyright} | "
        f"{hashlib.sha256((static / name).read_bytes()).hexdigest()} |"
        for one in libraries for name in one.files)


def page_with(table: str, page: str) -> str:
    """The text of LICENSES.md with these rows."""
    head, _, rest = page.partition(_BEGIN)
    return head + _BEGIN + table + _END + rest.partition(_END)[2]


def fetch(libraries: list[Library], static: Path) -> None:
    """Download the packages and write their files and the table, once all of them are the pinned ones."""
    found: dict[str, bytes] = {}
    with httpx.Client(base_url=registry(), timeout=_TIMEOUT_S, follow_redirects=True) as client:
        for one in libraries:
            path = f"{one.package}/-/{one.package}-{one.version}.tgz"
            try:
                answer = client.get(path).raise_for_status()
            except httpx.HTTPError as error:
                raise Transient(f"{one.package} {one.version} cannot be downloaded: {error}",
                                "the registry is that of npm's configuration: `npm config get registry`") from error
            found |= files_of(one, answer.content)
    for name, content in found.items():
        (static / name).write_bytes(content)
    page = static / "LICENSES.md"
    page.write_text(page_with(rows(libraries, static), page.read_text()))


def advisories(libraries: list[Library]) -> list[str]:
    """One line for each advisory about a pinned version. Raises Transient where the registry does not answer."""
    asked = {one.package: [one.version] for one in libraries}
    try:
        with httpx.Client(base_url=registry(), timeout=_TIMEOUT_S) as client:
            answer = client.post("-/npm/v1/security/advisories/bulk", json=asked).raise_for_status().json()
        return [f"{name} {asked[name][0]}: {one['url']}, {one['title']}, affects {one['vulnerable_versions']}"
                for name, all_of_it in answer.items() for one in all_of_it]
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Transient(f"the advisories of npm packages cannot be read: {type(error).__name__}: {error}",
                        "they are checked where the registry of npm's configuration answers") from error


def with_components(document: dict[str, object], libraries: list[Library]) -> dict[str, object]:
    """A CycloneDX document with the packages among its components."""
    added = [{"type": "library", "bom-ref": f"pkg:npm/{one.package}@{one.version}", "name": one.package,
              "version": one.version, "purl": f"pkg:npm/{one.package}@{one.version}", "copyright": one.copyright,
              "licenses": [{"license": {"id": one.licence}}],
              "hashes": [{"alg": "SHA-512", "content": base64.b64decode(one.integrity.partition("-")[2]).hex()}]}
             for one in libraries]
    components = document.get("components", [])
    assert isinstance(components, list)
    return {**document, "components": [*components, *added]}


def main() -> int:
    """Do what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["fetch", "audit", "sbom"])
    parser.add_argument("documents", nargs="*", type=Path)
    given = parser.parse_args()
    libraries = pinned()
    try:
        if given.action == "fetch":
            fetch(libraries, CONSOLE / "static")
        elif given.action == "audit":
            found = advisories(libraries)
            print("".join(f"audit: {line}\n" for line in found), end="")
            print(f"audit: {len(libraries)} npm packages, {len(found)} known vulnerabilities")
            return 1 if found else 0
        for path in given.documents:
            path.write_text(json.dumps(with_components(json.loads(path.read_text()), libraries), indent=2) + "\n")
    except EyrieError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
