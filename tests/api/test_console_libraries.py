"""The console's npm packages: pins, files and table agree, and only the pinned tarballs are written.

A local server stands for npm's registry; its packages are made here.
"""

import base64
import hashlib
import io
import json
import shutil
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eyrie_api.errors import InvalidInput, Transient
from eyrie_api.http.console import pages
from tests.api.console_libraries import (
    CONSOLE,
    Library,
    advisories,
    fetch,
    page_with,
    pinned,
    registry,
    rows,
    with_components,
)

STATIC = CONSOLE / "static"


def packed(**files: str) -> bytes:
    """A package's tarball; `__` in a name stands for a slash."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo("package/" + name.replace("__", "/"))
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def library(name: str, tarball: bytes, **files: str) -> Library:
    digest = base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    return Library(name, "1.0.0", "MIT", "Copyright (c) 2020 somebody", f"sha512-{digest}", files)


class Registry(ThreadingHTTPServer):
    """Answers a path with the bytes under it; 404 for others, 405 for POST unless there are advisories."""

    def __init__(self) -> None:
        answers: dict[str, bytes] = {}
        self.answers, self.asked = answers, list[object]()
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(answers.get(self.path), 404)

            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.answer(answers.get(self.path), 405)

            def answer(self, content: bytes | None, otherwise: int) -> None:
                self.send_response(otherwise if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    server = Registry()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def static(tmp_path: Path) -> Path:
    shutil.copy(STATIC / "LICENSES.md", tmp_path)
    return tmp_path


def test_pins_files_and_the_table_of_licences_agree() -> None:
    libraries = pinned()
    assert {name for one in libraries for name in one.files} == {name for name in pages.STATIC if ".min." in name}
    page = (STATIC / "LICENSES.md").read_text()
    assert page_with(rows(libraries, STATIC), page) == page, "make console-assets"
    assert {one.licence for one in libraries} == {"BSD-3-Clause"}, "whose text the page has"
    for one in libraries:
        assert len(base64.b64decode(one.integrity.removeprefix("sha512-"))) == 64


def test_fetching_writes_the_named_files_and_their_rows(npm: Registry, static: Path) -> None:
    tarball = packed(dist__a="let a", dist__b="p {}", other="x")
    npm.answers["/plots/-/plots-1.0.0.tgz"] = tarball
    one = library("plots", tarball, **{"a.min.js": "dist/a", "a.min.css": "dist/b"})
    fetch([one], static)
    assert {path.name for path in static.iterdir()} == {"a.min.js", "a.min.css", "LICENSES.md"}
    assert (static / "a.min.js").read_text() == "let a"
    page = (static / "LICENSES.md").read_text()
    digest = hashlib.sha256(b"p {}").hexdigest()
    assert f"| a.min.css | plots | 1.0.0 | MIT, Copyright (c) 2020 somebody | {digest} |\n\nBSD-3-Clause: " in page
    assert "vega.min.js" not in page
    fetch([one], static)
    assert (static / "LICENSES.md").read_text() == page


def test_a_tarball_that_is_not_the_pinned_one_is_refused_and_nothing_is_written(npm: Registry, static: Path) -> None:
    right, tampered = packed(a="let a"), packed(a="let a = evil()")
    npm.answers |= {"/good/-/good-1.0.0.tgz": right, "/bad/-/bad-1.0.0.tgz": tampered}
    before = (static / "LICENSES.md").read_text()
    with pytest.raises(InvalidInput, match=r"tarball of bad 1\.0\.0 has the integrity sha512-.*nothing was written"):
        fetch([library("good", right, **{"good.js": "a"}), library("bad", right, **{"bad.js": "a"})], static)
    assert [path.name for path in static.iterdir()] == ["LICENSES.md"]
    assert (static / "LICENSES.md").read_text() == before


def test_a_file_that_a_package_lacks_and_a_package_that_the_registry_lacks_are_named(
        npm: Registry, static: Path) -> None:
    tarball = packed(a="let a")
    npm.answers["/plots/-/plots-1.0.0.tgz"] = tarball
    with pytest.raises(InvalidInput, match=r"plots 1\.0\.0 has no file 'b'"):
        fetch([library("plots", tarball, **{"b.js": "b"})], static)
    with pytest.raises(Transient, match=r"maps 1\.0\.0 cannot be downloaded: .*404"):
        fetch([library("maps", tarball, **{"a.js": "a"})], static)


def test_advisories_are_asked_for_by_version_and_a_registry_that_has_none_is_not_taken_for_a_clean_result(
        npm: Registry) -> None:
    libraries = [library("plots", b"", a="a")]
    with pytest.raises(Transient, match=r"the advisories of npm packages cannot be read: .*405"):
        advisories(libraries)
    path = "/-/npm/v1/security/advisories/bulk"
    npm.answers[path] = b"<html>"
    with pytest.raises(Transient, match="cannot be read"):
        advisories(libraries)
    npm.answers[path] = b"{}"
    assert advisories(libraries) == []
    npm.answers[path] = json.dumps({"plots": [{"url": "https://example.com/1", "title": "runs text as code",
                                               "vulnerable_versions": "<1.0.1"}]}).encode()
    assert advisories(libraries) == ["plots 1.0.0: https://example.com/1, runs text as code, affects <1.0.1"]
    assert npm.asked[-1] == {"plots": ["1.0.0"]}


def test_a_bill_of_materials_lists_the_packages_by_their_address_and_digest() -> None:
    document = with_components({"bomFormat": "CycloneDX", "components": [{"name": "fastapi"}]}, pinned())
    components = document["components"]
    assert isinstance(components, list)
    assert [one["name"] for one in components] == ["fastapi", *(one.package for one in pinned())]
    assert components[1]["purl"] == "pkg:npm/vega@5.33.1"
    assert components[1]["hashes"] == [{"alg": "SHA-512", "content":
        base64.b64decode(pinned()[0].integrity.removeprefix("sha512-")).hex()}]


def test_the_registry_is_that_of_npms_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("npm_config_registry", raising=False)
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Transient, match="no npm registry"):
        registry()
    (tmp_path / "npm").write_text('#!/bin/sh\necho "https://mirror.example.com/npm"\n')
    (tmp_path / "npm").chmod(0o755)
    assert registry() == "https://mirror.example.com/npm/"
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://other.example.com")
    assert registry() == "https://other.example.com/"
