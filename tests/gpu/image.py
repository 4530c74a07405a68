"""Runs a program of this checkout with the Python of an image, without set-up and without a network.

    python3 -m tests.gpu.image -- -m pytest tests/gpu         what `make test-gpu` and `make bench-gpu` do
    python3 -m tests.gpu.image --check                        states what is there and what is missing, one line each
    python3 -m tests.gpu.image --walk                         prints the packages that `carried.txt` has to list

An image for GPUs has torch, Triton and transformers with what they require. Whatever else the GPU tests import is
listed in `carried.txt`. Wheels of it, from a folder named by WHEELS, are installed into a temporary directory that only
this run sees, except those of which the image has any version. All are pure Python but pydantic-core, whose wheel must
be the one for the image's Python and processor. On a machine with a network (any Python; name the image's):

    pip download --no-deps --only-binary :all: --python-version 3.12 \
        --platform manylinux2014_x86_64 -r tests/gpu/carried.txt -d wheels

Versions other than those pinned in constraints.txt are reported, not refused. Only the standard library is imported
here: this program states what is missing.
"""

import argparse
import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = Path(__file__).with_name("carried.txt")
IMAGE = ("torch", "triton", "transformers")
"""What an image is required to have."""

_COMPONENTS = ("api", "kernels", "operator", "pipelines", "workers")
# The tests and the benchmark of a GPU.
_WALKED = ("tests.gpu.test_on_a_gpu", "tests.gpu.test_kernels_at_size", "tests.gpu.conftest", "tests.kernels.conftest",
           "tests.kernels.test_packed_attention", "tests.kernels.test_soft_target_loss",
           "benchmarks.gpu.__main__")


def pins(text: str) -> dict[str, str]:
    """Distribution -> version, from the text of a constraints or requirements file. Pure."""
    return {_normal(name): version for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", text, re.MULTILINE)}


def differences(pinned: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """One line for every installed distribution whose version is not the pinned one. Pure."""
    return [f"version: {name} {version} is installed, and Eyrie is tested with {pinned[name]}"
            for name, version in sorted(installed.items())
            if name in pinned and version.partition("+")[0] != pinned[name]]


def missing(needed: Iterable[str], installed: Mapping[str, str]) -> list[str]:
    """One line for every needed distribution that is not installed. Pure."""
    lines = []
    for name in needed:
        if _normal(name) not in installed:
            where = "use an image that has it" if name in IMAGE else (
                "put its wheel into the folder that WHEELS names (python3 -m tests.gpu.image --help)")
            lines.append(f"missing: {name}: {where}")
    return lines


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed() -> dict[str, str]:
    return {_normal(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()
            if found.metadata["Name"]}


def path_of(extra: Path | None) -> str:
    """PYTHONPATH of a program of this checkout, with a directory of packages behind it."""
    parts = [ROOT, *(ROOT / component for component in _COMPONENTS)]
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, parts), *([given] if given else []), *([str(extra)] if extra else [])])


def install(wheels: Path, into: Path) -> None:
    """Install the wheels of a folder, except those of which this Python has any version: a second pydantic next to the
    image's pydantic-core does not work. Raises SystemExit with a line that says which folder and why."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        sys.exit(f"error: WHEELS={wheels} holds no wheel\nhint: see python3 -m tests.gpu.image --help")
    installed = _installed()
    files = [file for file in files if _normal(file.name.partition("-")[0]) not in installed]
    if not files:
        return
    ended = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
                            "--no-index", "--no-deps", "--target", str(into), *map(str, files)], check=False)
    if ended.returncode:
        sys.exit(f"error: pip could not install the wheels in {wheels} for Python {sys.version.split()[0]}\n"
                 "hint: pydantic-core's wheel must be the one for this Python and processor")


def check() -> list[str]:
    """Lines about what is missing, printed after lines about versions and the GPUs."""
    installed = _installed()
    lost = missing([*IMAGE, *pins(CARRIED.read_text())], installed)
    for line in [*differences(pins((ROOT / "constraints.txt").read_text()),
                              {name: version for name, version in installed.items()
                               if name in {*IMAGE, *pins(CARRIED.read_text())}}), *lost]:
        print(line)
    if "torch" in installed:
        import torch

        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        print(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
              f"GPUs: {', '.join(names) or 'none'}")
        if not names:
            lost.append("missing: a GPU: torch finds no CUDA device on this machine")
            print(lost[-1])
    return lost


def walk() -> list[str]:
    """The distributions that our modules import and what these require, without those of an image; with their pins."""
    code = (f"import importlib, sys\nfor name in {_WALKED}: importlib.import_module(name)\n"
            "print(*(module.__file__ for module in list(sys.modules.values()) if getattr(module, '__file__', None)),"
            " sep='\\n')")
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                           env=os.environ | {"PYTHONPATH": path_of(None)})
    ours = [Path(line) for line in ended.stdout.splitlines() if line.startswith(str(ROOT)) and ".venv" not in line]
    owners = importlib.metadata.packages_distributions()
    used = {owner for path in ours for name in _imported(path) for owner in owners.get(name, ())}
    # typer, which transformers requires for its command, requires pydantic in its newest versions alone.
    found = required(used) - required(IMAGE, without={"typer"}) - {"eyrie"}
    pinned = pins((ROOT / "constraints.txt").read_text())
    return [f"{name}=={pinned[name]}" for name in sorted(found) if name in pinned]


def _imported(path: Path) -> set[str]:
    """Top-level names that a file imports when it is imported itself."""
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    names = {alias.name for statement in statements if isinstance(statement, ast.Import) for alias in statement.names}
    names |= {statement.module or "" for statement in statements if isinstance(statement, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def required(names: Iterable[str], without: Collection[str] = ()) -> set[str]:
    """The distributions and everything they require on Linux, extras excluded."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = _normal(waiting.pop())
        if name in found or name in without:
            continue
        found.add(name)
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [match[0] for line in wanted if "extra ==" not in line and "win32" not in line
                    and (match := re.match(r"[A-Za-z0-9._-]+", line)) is not None]
    return found


def main(argv: Sequence[str]) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu.image", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="report and stop; exit code 1 if something is missing")
    parser.add_argument("--walk", action="store_true", help="print the lines of carried.txt")
    parser.add_argument("--wheels", type=Path, default=os.environ.get("WHEELS") or None, help="default: $WHEELS")
    parser.add_argument("arguments", nargs="*", help="of Python, for the program to run")
    given = parser.parse_args(argv)
    if given.walk:
        print(*walk(), sep="\n")
        return 0
    if given.check:
        return 1 if check() else 0
    with tempfile.TemporaryDirectory(prefix="eyrie-wheels-") as scratch:
        into = None
        if given.wheels is not None:
            into = Path(scratch)
            install(given.wheels, into)
        environment = os.environ | {"PYTHONPATH": path_of(into), "TOKENIZERS_PARALLELISM": "false"}
        # In a process of its own: this one's path does not contain the wheels.
        if subprocess.run([sys.executable, "-m", "tests.gpu.image", "--check"], env=environment, check=False,
                          cwd=ROOT).returncode:
            return 1
        return max((subprocess.run([sys.executable, *program], env=environment, check=False, cwd=ROOT).returncode
                    for program in programs(given.arguments)), default=0)


def programs(arguments: Sequence[str]) -> list[list[str]]:
    """The programs of a command line, separated by `+`. Pure."""
    found: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "+":
            found.append([])
        else:
            found[-1].append(argument)
    return [program for program in found if program]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
