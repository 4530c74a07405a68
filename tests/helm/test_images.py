"""The Dockerfiles and their requirements, read. `make test-images` builds and runs them, with a container engine.

Beyond the text, the programs of an image are imported with every distribution hidden that its extra does not bring.
"""

import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helm.base_digest import pinned
from tests.helm.image_requirements import BUILD, EXTRAS, SETUP, brought, entries, listed, pins, wanted

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "api": ["eyrie_operator.command", "eyrie_api.http.replica", "eyrie_api.database.migrations"],
    "operator": ["eyrie_operator.command", "eyrie_operator.control_plane", "eyrie_operator.cluster.program"],
    "workers": ["eyrie_pipelines.kfp_pipeline", "eyrie_workers.stages.train", "eyrie_workers.stages.prove",
                "eyrie_workers.shards"],
}

Instruction = tuple[str, str]
DIGEST = "sha256:" + "0" * 64


def instructions(image: str) -> list[Instruction]:
    """(keyword, rest), continued lines joined, comments and here-documents not expected."""
    text = re.sub(r"\\\n", " ", (ROOT / image / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def stages(image: str) -> list[list[Instruction]]:
    """The instructions of each build stage, FROM first."""
    found: list[list[Instruction]] = []
    for one in instructions(image):
        if one[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(one)
    return found


@pytest.mark.parametrize("image", EXTRAS)
def test_an_image_is_built_in_two_stages_on_a_pinned_base(image: str) -> None:
    arguments = dict(rest.split("=", 1) for keyword, rest in instructions(image) if keyword == "ARG" and "=" in rest)
    assert re.fullmatch(r"python:3\.11-slim-\w+@sha256:[0-9a-f]{64}", arguments["PYTHON"])
    build, final = stages(image)
    assert build[0] == ("FROM", "${PYTHON} AS build")
    assert final[0] == ("FROM", "${PYTHON}")
    assert ("LABEL", 'org.opencontainers.image.base.name="${PYTHON}"') in final
    assert [rest for keyword, rest in final if keyword == "COPY"] == ["--from=build /opt/eyrie /opt/eyrie"]
    assert not [rest for keyword, rest in final if keyword == "RUN" and "pip" in rest]


def test_every_dockerfile_builds_on_the_same_python_by_digest_and_that_of_sglang_is_looked_up() -> None:
    files = [ROOT / path for path in subprocess.run(["git", "ls-files", "*Dockerfile"], cwd=ROOT, check=True, text=True,
                                                    capture_output=True).stdout.split()]
    assert len(files) >= 5
    bases = {found for file in files
             for found in re.findall(r"^(?:ARG PYTHON=|FROM )(python:\S+)", file.read_text(), re.M)}
    assert len(bases) == 1
    assert re.search(r"@sha256:[0-9a-f]{64}$", *bases)
    dry = subprocess.run(["make", "-n", "image-sglang", f"PYTHON={sys.executable}"], cwd=ROOT, check=True, text=True,
                         capture_output=True).stdout
    assert '-m tests.helm.base_digest "docker.io/lmsysorg/sglang:v' in dry
    assert '--build-arg SGLANG="$base"' in dry


def test_stages_in_sglangs_image_run_as_the_user_of_those_in_the_workers_image() -> None:
    def last(path: str) -> dict[str, str]:
        text = re.sub(r"\\\n", " ", (ROOT / path).read_text())
        return dict(line.split(None, 1) for line in text.splitlines() if line.startswith(("USER", "WORKDIR")))

    assert last("workers/sglang.Dockerfile") == last("workers/Dockerfile") != {}


class Registry(BaseHTTPRequestHandler):
    """The two requests that a public registry is asked. A stand-in: no registry can be reached from the tests."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        port = self.server.server_address[1]  # type: ignore[index]
        known = self.path == "/v2/team/base/manifests/v1" and "image.index" in (self.headers["Accept"] or "")
        permitted = self.headers["Authorization"] == "Bearer for-reading"
        self.send_response(401 if not permitted else 200 if known else 404)
        self.send_header("WWW-Authenticate", f'Bearer realm="http://127.0.0.1:{port}/token",service="s",scope="pull"')
        self.send_header("Docker-Content-Digest", DIGEST)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        body = b'{"token": "for-reading"}' if self.path == "/token?service=s&scope=pull" else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_tag_is_pinned_by_the_digest_that_the_registry_has_for_it_now() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"127.0.0.1:{server.server_address[1]}/team/base"
        assert pinned(f"{base}:v1") == f"{base}:v1@{DIGEST}"
        with pytest.raises(OSError, match="404"):
            pinned(f"{base}:v2")
        server.shutdown()
    assert pinned(f"x:v1@{DIGEST}") == f"x:v1@{DIGEST}", "nothing to ask"
    with pytest.raises(ValueError, match="name:tag"):
        pinned("python")


@pytest.mark.parametrize("image", EXTRAS)
def test_an_image_runs_as_the_user_the_chart_runs_it_as(image: str) -> None:
    _, final = stages(image)
    users = [rest for keyword, rest in final if keyword == "USER"]
    assert users == ["10001:10001"]
    assert [keyword for keyword, _ in final].index("USER") < [keyword for keyword, _ in final].index("CMD")
    assert "runAsUser: 10001" in (ROOT / "helm/eyrie/values.yaml").read_text()


@pytest.mark.parametrize("image", EXTRAS)
def test_everything_copied_exists_and_is_not_ignored(image: str) -> None:
    ignored = [line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines()
               if line.strip() and not line.startswith("#")]
    sources = [path for keyword, rest in stages(image)[0] if keyword == "COPY" for path in rest.split()[:-1]]
    assert {"pyproject.toml", "LICENSE", "README.md", BUILD, f"{image}/requirements.txt"} <= set(sources)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {path.split("/")[0] for path in packages["packages"]} <= set(sources)
    for path in sources:
        assert (ROOT / path).exists(), path
        assert path not in ignored


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lists are for Python 3.11, as the images are")
@pytest.mark.parametrize("image", EXTRAS)
def test_an_image_installs_what_its_extras_bring_by_version_and_hash(image: str) -> None:
    found = listed(f"{image}/requirements.txt")
    assert {name: version for name, (version, _) in found.items()} == wanted(EXTRAS[image]), \
        "`make requirements` writes the list again"
    assert brought(EXTRAS[image]) - set(found) <= {"eyrie", "torch"}
    assert all(hashes for _, hashes in found.values())
    assert ("torch" in brought(EXTRAS[image])) == (image == "workers")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="which distributions are brought depends on the Python")
def test_setup_installs_everything_but_torch_by_version_and_hash_before_the_checkout() -> None:
    found = listed(SETUP)
    assert {name: version for name, (version, _) in found.items()} == wanted(["dev"]), \
        "`make requirements` writes the list again"
    assert brought(["dev"]) - set(found) == {"eyrie", "torch"}
    assert all(hashes for _, hashes in found.values())
    installs = re.findall(r"^(?:[^#]*\|\| )?pip (.*)$", (ROOT / ".ci/setup").read_text(), re.M)
    assert installs == ["--no-deps --require-hashes -r operator/build-requirements.txt",
                        "--no-deps --require-hashes --no-build-isolation -r .ci/requirements.txt",
                        '"${TORCH:-torch==2.13.0}"',
                        '-c constraints.txt --no-build-isolation -e ".[dev]"']


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="which distributions are brought depends on the Python")
def test_the_wheel_is_installed_without_an_index_after_what_its_extra_brings_by_version_and_hash() -> None:
    printed = subprocess.run([sys.executable, "-m", "tests.helm.image_requirements", "local"], cwd=ROOT, check=True,
                             text=True, capture_output=True).stdout.splitlines()
    local = brought(["local"])
    assert printed == [entry for name, entry in entries(SETUP).items() if name in local]
    assert 0 < len(printed) < len(listed(SETUP)), "what only the tests need would hide what the extra lacks"
    script = (ROOT / ".ci/wheel").read_text()
    assert re.findall(r"^pip (.*)$", script, re.M) == [
        'install --no-deps --no-index "$work"/wheels/*.whl',
        'install -c "$root/constraints.txt" "${TORCH:-torch==2.13.0}"',
        'install --no-index "eyrie[local] @ file://$wheel"']
    assert all("--no-index" in built or "--require-hashes" in built
               for built in re.findall(r"^build (.*)$", script, re.M))


def test_what_builds_the_wheels_is_pinned_by_version_and_hash() -> None:
    pinned = pins()
    assert {"hatchling", "setuptools"} <= set(listed(BUILD))
    for name, (version, hashes) in listed(BUILD).items():
        assert version == pinned[name]
        assert hashes


@pytest.mark.parametrize("image", [*EXTRAS, "tests/cluster"])
def test_pip_installs_nothing_without_a_hash_but_torch_and_what_was_built(image: str) -> None:
    steps = [step.strip() for keyword, rest in stages(image)[0] if keyword == "RUN" for step in rest.split("&&")]
    unhashed = [step for step in steps if re.search(r"pip (install|wheel)", step)
                and "--require-hashes" not in step and "--no-index" not in step]
    assert len(unhashed) == (image in ("workers", "tests/cluster"))
    assert all("-c /source/constraints.txt" in step and step.endswith(" torch") for step in unhashed)
    (last,) = [number for number, step in enumerate(steps) if step.endswith(" /wheels/*.whl")]
    for step in unhashed:  # torch finds what it needs installed by hash, or that is installed again
        assert steps.index(step) > last or "--force-reinstall" in steps[last]


def test_the_build_of_torch_can_be_chosen() -> None:
    build, _ = stages("workers")
    assert ("ARG", 'TORCH_INDEX=""') in build
    assert any("TORCH_INDEX" in rest for keyword, rest in build if keyword == "RUN")


# Hides every module that no extra of the image brings, and imports.
_HIDDEN = """
import importlib, importlib.metadata as metadata, sys
from tests.helm.image_requirements import brought, canonical

names = brought(sys.argv[1].split(","))
hidden = {module for module, owners in metadata.packages_distributions().items()
          if not {canonical(owner) for owner in owners} & names}

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"the image has no {name}", name=name)

if not hidden & set(sys.argv[2].split(",")):
    sys.exit("nothing is hidden: the check checks nothing")
for module in hidden & set(sys.modules):
    del sys.modules[module]
sys.meta_path.insert(0, Hide())
for program in sys.argv[3:]:
    importlib.import_module(program)
"""


@pytest.mark.parametrize(("image", "lacks"), [("api", "torch,kfp,kubernetes"), ("operator", "torch,transformers"),
                                              ("workers", "sqlalchemy")])
def test_the_programs_of_an_image_import_with_nothing_but_its_extra(image: str, lacks: str) -> None:
    done = subprocess.run([sys.executable, "-c", _HIDDEN, ",".join(EXTRAS[image]), lacks, *PROGRAMS[image]],
                          capture_output=True, text=True, check=False, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
