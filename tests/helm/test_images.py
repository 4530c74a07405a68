"""The Dockerfiles, read: nothing here can build them, so what can be known without building is checked.

Beyond the text, the programs of an image are imported with every distribution hidden that its extra does not bring.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"api": ["api"], "operator": ["operator"], "workers": ["workers", "pipelines"]}
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
    assert {"pyproject.toml", "constraints.txt", "LICENSE", "README.md"} <= set(sources)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {path.split("/")[0] for path in packages["packages"]} <= set(sources)
    for path in sources:
        assert (ROOT / path).exists(), path
        assert path not in ignored


@pytest.mark.parametrize("image", EXTRAS)
def test_an_image_holds_its_own_extra_under_the_pins(image: str) -> None:
    installs = [rest for keyword, rest in stages(image)[0] if keyword == "RUN" and "pip install" in rest]
    assert all("-c /source/constraints.txt" in line for line in installs)
    (extras,) = re.findall(r"/source\[([\w,-]+)\]", installs[-1])
    assert extras.split(",") == EXTRAS[image]
    assert set(EXTRAS[image]) <= set(PROJECT["optional-dependencies"])
    assert ("torch" in " ".join(installs)) == (image == "workers")


def test_the_build_of_torch_can_be_chosen() -> None:
    build, _ = stages("workers")
    assert ("ARG", 'TORCH_INDEX=""') in build
    assert any("TORCH_INDEX" in rest for keyword, rest in build if keyword == "RUN")


# Walks what an extra brings, hides every other distribution's modules, and imports.
_HIDDEN = """
import importlib, importlib.metadata as metadata, re, sys, tomllib
from packaging.requirements import Requirement

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

# As pyproject.toml has it now: the installed metadata is of the day the environment was made.
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
ours = list(project["dependencies"])
for extra, lines in project["optional-dependencies"].items():
    for line in lines:
        need, _, marker = line.partition(";")
        ours.append(f"{need} ; {f'({marker.strip()}) and ' if marker else ''}extra == '{extra}'")

brought, todo = set(), [("eyrie", frozenset(sys.argv[1].split(",")))]
while todo:
    name, extras = todo.pop()
    if (name, extras) in brought:
        continue
    brought.add((name, extras))
    try:
        needs = ours if name == "eyrie" else metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        continue
    for line in needs:
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""}) \\
                or need.marker.evaluate({"extra": ""}):
            todo.append((canonical(need.name), frozenset(need.extras)))
names = {name for name, _ in brought}
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
