"""What an image with torch 2.11.0+cu130 and no network lacks for SGLang and for a job: `make gpu-pack OUT=DIR`.

    python -m benchmarks.gpu.pack OUT

Prepared on a machine without a GPU, from packages alone, for one Hopper GPU, x86-64 and Python 3.12. OUT gets two packs
in parts of at most 25 MiB with their SHA256SUMS:

    sglang.tar.xz.*   the published SGLang and sglang-kernel with what they import, and compiled JIT modules
    job.tar.xz.*      the libraries of Eyrie's control plane and stages, and the packages of the published target

`unpack` and `job` use them on the image, in a checkout. OUT/work has the steps' results (9 GB), by which an
interrupted run resumes; it can be removed afterwards. Every pack is checked: libraries bind, Triton kernels compile,
SGLang's parser resolves the product's launch lines, and a job runs to its end with an environment that has what the
image has, in Eyrie's engine on this CPU. A step that cannot run here prints NOT DONE and why; the program then ends
with exit code 1.

What SGLang needs is read from tests/sglang/environment/requirements.txt, which the SGLang tests pass with; what Eyrie
needs, from pyproject.toml and constraints.txt.
"""

import hashlib
import importlib.metadata
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu.pack.slim import slim
from tests.gpu.image import ROOT, pins, required

HERE = Path(__file__).parent
IMAGE = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0", "transformers==5.17.0", "numpy==2.5.2", "numba",
         "einops", "aiohttp", "prometheus-client", "uvloop", "psutil", "pillow", "scipy", "pandas", "regex", "requests",
         "sentencepiece==0.2.2", "tiktoken==0.14.0", "xxhash", "nvidia-ml-py", "ninja", "tqdm", "rich", "typer",
         "attrs", "cloudpickle", "accelerate==1.15.0")
"""What the image of docs/results/gpu.md has, of what SGLang and Eyrie import; with what these require."""
KERNELS = "sglang-kernel==0.4.6"
"""The newest that was compiled against torch 2.11.0: `_same_torch` compares."""
HEADERS = "flashinfer-python==0.7.2"
"""Of one JIT module. Too large for the pack; SGLang imports it lazily."""
UNUSED = {
    "airportsdata", "asttokens", "blobfile", "datasets", "diskcache", "executing", "interegular", "jedi", "kernels",
    "kernels-data", "ipython-pygments-lexers", "lark", "llguidance", "lxml", "matplotlib-inline", "multiprocess",
    "nest-asyncio", "openai-harmony", "outlines", "outlines-core", "parso", "pexpect", "prompt-toolkit", "ptyprocess",
    "pure-eval", "pyarrow", "pycountry", "pycryptodomex", "stack-data", "tomlkit", "wcwidth", "psycopg"}
"""Not imported at a server's start or by a local job."""
FA3 = (r"cute::C<\d+>, cute::C<\d+>, cute::C<(64|128)> ?>, \1, cutlass::bfloat16_t, float, cutlass::arch::Sm90, \w+, "
       r"\w+, false,|FlashAttnFwdCombine<.*bfloat16_t|prepare_varlen_num_blocks")
"""Kept of FlashAttention 3: bfloat16, heads of 64 and 128, no soft cap of scores."""
NOT_HOPPER = ("sgl_kernel/sm100", "sgl_kernel/flashmla_ops*", "sgl_kernel/infllm_ops*", "triton_kernels", "bin",
              "share", "sglang/srt/rust_extensions/_server.*.so", "sglang/srt/rust_extensions/_bench.*.so",
              # The prefix cache in Rust, compiled for a later torch; the one in Python serves.
              "sglang/srt/mem_cache/rust_tree_core/mem_cache.*.so")
DRIVER_CALLS = (
    "cuPointerGetAttribute", "cuCtxFromGreenCtx", "cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2",
    "cuDevResourceGenerateDesc", "cuDevSmResourceSplitByCount", "cuDeviceGetDevResource", "cuDriverGetVersion",
    "cuGetErrorString", "cuGetProcAddress_v2", "cuGreenCtxCreate", "cuGreenCtxDestroy", "cuGreenCtxGetDevResource",
    "cuStreamCreate", "cuInit")
"""Of libcuda.so.1, which a machine without a driver does not have: a stub has these, and nothing calls them."""
PART_BYTES = 25 << 20


class NotDone(Exception):
    """Why a step cannot run on this machine, or failed."""


class Pack:
    """The steps, each in a directory of `work`; the file NAME.done says that it is complete."""

    def __init__(self, out: Path) -> None:
        self.out, self.work = out, out / "work"
        self.image = self.work / "image/bin/python"
        self.nvidia = self.work / "image/lib/python3.12/site-packages/nvidia/cu13"
        self.not_done: list[str] = []
        self.changed = False

    def step(self, name: str, make: Callable[[Path], None]) -> None:
        """Run one, unless it is complete and none before it ran now. The others run whatever becomes of it."""
        directory, done = self.work / name, self.work / f"{name}.done"
        if done.exists() and not self.changed:
            return
        done.unlink(missing_ok=True)
        began = time.perf_counter()
        print(f"gpu-pack: {name}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            make(directory)
        except (NotDone, subprocess.CalledProcessError, OSError) as error:
            self.not_done.append(name)
            print(f"gpu-pack: NOT DONE: {name}: {error}", flush=True)
            return
        done.touch()
        self.changed = True
        print(f"gpu-pack: {name}: done in {time.perf_counter() - began:.0f} s", flush=True)

    def python(self, *words: str | Path, path: Sequence[Path] = (), **variables: str | Path) -> None:
        """The image's Python, which sees the packages of `path` and a stub of the driver."""
        subprocess.run([self.image, *words], check=True, cwd=ROOT, env=self.variables(path, variables))

    def variables(self, path: Sequence[Path], more: Mapping[str, str | Path]) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1",
                "LD_LIBRARY_PATH": str(self.work / "stub"), **{name: str(value) for name, value in more.items()}}

    def pip(self, *words: str | Path) -> None:
        self.python("-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile", *words)

    def of_image(self) -> set[str]:
        """The image's packages, but for pydantic: typer requires it in its newest versions alone, so it is packed."""
        site = str(self.image.parents[1] / "lib/python3.12/site-packages")
        found = pins("\n".join(f"{one.name}=={one.version}" for one in importlib.metadata.distributions(path=[site])))
        return set(found) - required({"pydantic"}) | {"typing-extensions"}

    # What goes into the packs.

    def make_image(self, directory: Path) -> None:
        """An environment with the image's packages; 6 GB."""
        python = os.environ.get("IMAGE_PYTHON") or shutil.which("python3.12") or "python3.12"
        subprocess.run([python, "-m", "venv", directory], check=True)
        self.pip(*IMAGE)
        self.python("-c", "import torch; assert torch.__version__ == '2.11.0+cu130', torch.__version__")

    def make_stub(self, directory: Path) -> None:
        source = "".join(f"int {name}(void) {{ return 999; }}\n" for name in DRIVER_CALLS)
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o",
                        directory / "libcuda.so.1"], input=source.encode(), check=True)

    def make_site(self, directory: Path) -> None:
        """SGLang, and what it imports that the image lacks."""
        wanted = pins((ROOT / "tests/sglang/environment/requirements.txt").read_text())
        lines = [f"{name}=={version}" for name, version in wanted.items() if name not in self.of_image() | UNUSED]
        self.pip("--no-deps", "--target", directory, KERNELS, *lines)

    def make_jit(self, directory: Path) -> None:
        """SGLang's JIT modules for sm_90a."""
        nvcc = next((found for found in ("/usr/local/cuda-13.0/bin/nvcc", shutil.which("nvcc")) if found
                     and Path(found).exists()), None)
        if nvcc is None or "release 13.0" not in subprocess.run([nvcc, "--version"], capture_output=True, text=True,
                                                                check=True).stdout:
            raise NotDone("no nvcc 13.0 here: servers would compile their modules at the start, if the image has one")
        headers = self.work / "headers"
        self.pip("--no-deps", "--upgrade", "--target", headers, HEADERS)
        (self.work / "link").mkdir(exist_ok=True)
        link = self.work / "link/libcudart.so"
        link.unlink(missing_ok=True)
        link.symlink_to(self.nvidia / "lib/libcudart.so.13")
        plugin, program = HERE / "plugin", HERE / "compile_ahead.py"
        common: dict[str, str | Path] = {
            "EYRIE_PACK_JIT": directory, "EYRIE_PACK_JIT_RECORD": "1", "LIBRARY_PATH": link.parent,
            "SGLANG_JIT_CACHE_DIR": self.work / "jit-cache", "CUDA_HOME": Path(nvcc).resolve().parents[1],
            "PATH": f"{self.image.parent}:{os.environ['PATH']}"}
        self.python(program, "jit", path=[plugin, self.work / "site"], **common)
        # In another process: its headers make flashinfer available to the others, which then want its kernels.
        self.python(program, "jit", "sampling", path=[plugin, self.work / "site", headers], **common,
                    CPATH=self.nvidia / "include")

    def make_tree(self, directory: Path) -> None:
        """What is packed for SGLang: what a Hopper GPU loads."""
        site = directory / "site"
        shutil.copytree(self.work / "site", site, symlinks=True)
        shutil.copytree(HERE / "plugin", directory / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
        if (self.work / "jit.done").exists():
            shutil.copytree(self.work / "jit", directory / "jit")
        information = directory / "plugin/eyrie_gpu_pack-1.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: eyrie-gpu-pack\nVersion: 1\n")
        (information / "entry_points.txt").write_text("[sglang.srt.plugins]\neyrie_gpu_pack = eyrie_gpu_pack:install\n")
        for pattern in NOT_HOPPER:
            for found in site.glob(pattern):
                shutil.rmtree(found) if found.is_dir() else found.unlink()
        print("  " + slim(site / "sgl_kernel/sm90/common_ops.abi3.so"))
        print("  " + slim(site / "sgl_kernel/flash_ops.abi3.so", FA3))
        _strip([file for file in site.rglob("*.so") if "sgl_kernel" not in file.parts])

    def make_job(self, directory: Path) -> None:
        """What is packed for a job: Eyrie's libraries that the image lacks, and the published target's packages."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        direct = {found[0] for line in [*project["dependencies"], *(line for extra in (
            "api", "pipelines", "operator", "workers") for line in extras[extra])]
            if (found := re.match(r"[A-Za-z0-9._-]+", line)) and found[0] != "eyrie"}
        pinned = pins((ROOT / "constraints.txt").read_text())
        site, wanted = directory / "job", required(direct) - self.of_image() - UNUSED
        self.pip("--no-deps", "--target", site, *(f"{name}=={pinned[name]}" for name in wanted if name in pinned))
        shutil.rmtree(site / "bin", ignore_errors=True)
        for service in (site / "botocore/data").iterdir():  # of 400 services' descriptions
            if service.is_dir() and service.name not in ("s3", "sts"):
                shutil.rmtree(service)
        _strip([*site.rglob("*.so")])
        self.python("-m", "pip", "download", "-qq", "--no-deps", "-d", directory / "packages", "--require-hashes", "-r",
                    ROOT / "benchmarks/published/packages.txt")

    def write(self, directory: Path) -> None:
        """Both packs in parts, with digests."""
        sums = []
        for name, tree in (("sglang", self.work / "tree"), ("job", self.work / "job")):
            for old in self.out.glob(f"{name}.tar.xz.*"):
                old.unlink()
            whole = directory / "whole"
            with lzma.open(whole, "wb") as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
                tar.add(tree, ".", filter=lambda entry: None if "__pycache__" in entry.name else entry)
            with whole.open("rb") as stream:
                for number, data in enumerate(iter(lambda: stream.read(PART_BYTES), b"")):
                    part = self.out / f"{name}.tar.xz.{number:02d}"
                    part.write_bytes(data)
                    sums.append(f"{hashlib.sha256(data).hexdigest()}  {part.name}\n")
            print(f"  {name}: {whole.stat().st_size / 1e6:.1f} MB")
            whole.unlink()
        (self.out / "SHA256SUMS").write_text("".join(sums))

    # What is checked of them.

    def check_binding(self, _: Path) -> None:
        """The libraries load in the image's torch with all symbols bound, and were compiled against it."""
        for library in ("sm90/common_ops", "flash_ops"):
            file = self.work / f"tree/site/sgl_kernel/{library}.abi3.so"
            self.python("-c", "import sys, torch; torch.ops.load_library(sys.argv[1])", file, LD_BIND_NOW="1")
            _same_torch(file, self.image.parents[1] / "lib/python3.12/site-packages/torch/include")

    def check_triton(self, directory: Path) -> None:
        for capability in ("90", "100"):
            print(f"  for sm_{capability}a")
            self.python(HERE / "compile_ahead.py", "triton", path=[self.work / "tree/site"],
                        TRITON_CACHE_DIR=directory / "cache", EYRIE_PACK_CAPABILITY=capability)

    def check_launch_lines(self, directory: Path) -> None:
        """The tests of launch lines, resolved by the pack's SGLang with the image's packages."""
        # Without a GPU sgl_kernel does not import. Of its stand-in's folder, sitecustomize is for another torchvision.
        (directory / "sgl_kernel").symlink_to(ROOT / "tests/sglang/environment/stand_in/sgl_kernel")
        path = f"{directory}:{ROOT / 'workers'}:{self.work / 'tree/site'}"
        program = directory / "python"
        program.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{self.image}" "$@"\n')
        program.chmod(0o755)
        subprocess.run([sys.executable, "-m", "pytest", "-q", "--timeout", "1200",
                        "tests/sglang/test_launch_commands.py"], cwd=ROOT, check=True,
                       env={**os.environ, "EYRIE_TEST_SGLANG": "1", "EYRIE_SGLANG_PYTHON": str(program)})

    def check_job(self, directory: Path) -> None:
        """Both packs unpacked, and a job to its end."""
        to = directory / "unpacked"
        home = Path(tempfile.mkdtemp(prefix="eyrie-gpu-pack-"))
        self.python("-m", "benchmarks.gpu.pack.unpack", self.out, to)
        try:
            self.python("-m", "benchmarks.gpu.pack.job", to, directory / "reports", "--seconds", "1500", "--file",
                        ROOT / "docs/examples/smallest.yaml", EYRIE_HOME=home)
        finally:
            self.python("-m", "eyrie_operator.command", "down", EYRIE_HOME=home,
                        path=[ROOT, *(ROOT / name for name in ("api", "kernels", "operator", "pipelines", "workers")),
                              to / "job"])
        shutil.rmtree(home)
        shutil.rmtree(to)


def _strip(libraries: Sequence[Path]) -> None:
    for library in libraries:  # what is no library of this machine's kind stays as it is
        subprocess.run(["strip", "--strip-unneeded", library], stderr=subprocess.DEVNULL, check=False)


def _same_torch(library: Path, include: Path) -> None:
    """Raises NotDone if the lines of assertions in the library are not those of torch's headers in `include`."""
    found = set(re.findall(rb'/torch/include/([\w/.]+)":(\d+), please report', library.read_bytes()))
    others = [(name, line) for name, line in ((name.decode(), int(line)) for name, line in found)
              if "ASSERT" not in (include / name).read_text().splitlines()[line - 1]]
    if others or not found:
        raise NotDone(f"{library.name} was compiled against another torch: {others}")
    print(f"  {library.name}: loads, and its {len(found)} assertions are lines of this torch's headers")


def main(argv: Sequence[str]) -> int:
    """The program."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 2
    pack = Pack(Path(argv[0]).resolve())
    for name, make in (("image", pack.make_image), ("stub", pack.make_stub), ("site", pack.make_site),
                       ("jit", pack.make_jit), ("tree", pack.make_tree), ("job", pack.make_job),
                       ("packs", pack.write), ("libraries bind", pack.check_binding),
                       ("Triton kernels", pack.check_triton), ("launch lines", pack.check_launch_lines),
                       ("a job", pack.check_job)):
        pack.step(name, make)
    print(f"gpu-pack: packs in {pack.out}; " + (f"NOT DONE: {', '.join(pack.not_done)}" if pack.not_done
                                                else "everything was checked that can be without a GPU"))
    return 1 if pack.not_done else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
