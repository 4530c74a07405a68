"""The Dockerfiles and their requirements, read. `make test-images` builds and runs them, with a container engine.

Beyond the text, the programs of an image are imported with every distribution hidden that its extra does not bring.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helm.image_requirements import BUILD, EXTRAS, brought, listed, pins, wanted

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "api": ["eyrie_operator.command", "eyrie_api.http.replica", "eyrie_api.database.migrations"],
    "operator": ["eyrie_operator.command", "eyrie_operator.celery_app", "eyrie_operator.cluster.program"],
    "workers": ["eyrie_pipelines.drafter", "eyrie_workers.stages.train", "eyrie_workers.stages.prove",
                "eyrie_workers.shards"],
}

Instruction = tuple[str, str]


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
    arguments = dict(rest.split("=", 1) for keyword, rest in instructions(image) if keyword == "ARG")
    assert re.fullmatch(r"python:3\.11-slim-\w+", arguments["PYTHON"])
    build, final = stages(image)
    assert build[0] == ("FROM", "${PYTHON} AS build")
    assert final[0] == ("FROM", "${PYTHON}")
    assert [rest for keyword, rest in final if keyword == "COPY"] == ["--from=build /opt/eyrie /opt/eyrie"]
    assert not [rest for keyword, rest in final if keyword == "RUN" and "pip" in rest]


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
    assert {name: version for name, (version, _) in found.items()} == wanted(image), \
        "python -m tests.helm.image_requirements writes the list again"
    assert brought(EXTRAS[image]) - set(found) <= {"eyrie", "torch"}
    assert all(hashes for _, hashes in found.values())
    assert ("torch" in brought(EXTRAS[image])) == (image == "workers")


def test_what_builds_the_wheels_is_pinned_by_version_and_hash() -> None:
    pinned = pins()
    assert {"hatchling", "setuptools"} <= set(listed(BUILD))
    for name, (version, hashes) in listed(BUILD).items():
        assert version == pinned[name]
        assert hashes


@pytest.mark.parametrize("image", EXTRAS)
def test_pip_installs_nothing_without_a_hash_but_torch_and_what_was_built(image: str) -> None:
    steps = [step.strip() for keyword, rest in stages(image)[0] if keyword == "RUN" for step in rest.split("&&")]
    unhashed = [step for step in steps if re.search(r"pip (install|wheel)", step)
                and "--require-hashes" not in step and "--no-index" not in step]
    assert len(unhashed) == (image == "workers")
    assert all("-c /source/constraints.txt" in step and step.endswith(" torch") for step in unhashed)


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


@pytest.mark.parametrize(("image", "lacks"), [("api", "torch,kfp,kopf"), ("operator", "torch,transformers"),
                                              ("workers", "sqlalchemy,kopf")])
def test_the_programs_of_an_image_import_with_nothing_but_its_extra(image: str, lacks: str) -> None:
    done = subprocess.run([sys.executable, "-c", _HIDDEN, ",".join(EXTRAS[image]), lacks, *PROGRAMS[image]],
                          capture_output=True, text=True, check=False, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
