"""Unpacks packs on an image: `python3 -m benchmarks.gpu.pack.unpack PACKS TO`, by the image's Python, in a checkout.

Needs the standard library alone. Afterwards, for programs that import SGLang: `. TO/environment`; for Eyrie, whose own
packages SGLang must not see: `export EYRIE_SGLANG_PROGRAM=TO/sglang`.
"""

import compileall
import hashlib
import importlib.util
import lzma
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any


class Parts:
    """Files one after the other, as one to read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files: list[IO[bytes]] = [path.open("rb") for path in paths]

    def read(self, size: int) -> bytes:
        while self.files:
            if data := self.files[0].read(size):
                return data
            self.files.pop(0).close()
        return b""


def variables(to: Path) -> dict[str, str]:
    """What SGLang's processes need."""
    return {
        "PYTHONPATH": f"{to / 'plugin'}:{to / 'site'}", "EYRIE_PACK_JIT": str(to / "jit"),
        "SGLANG_JIT_CACHE_DIR": str(to / "jit-cache"), "TRITON_CACHE_DIR": str(to / "triton"),
        "SGLANG_CACHE_DIR": str(to / "cache"), "LIBRARY_PATH": str(to / "link"),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def main(packs: Path, to: Path) -> None:
    """Compare digests, unpack, and write what starts SGLang."""
    for line in (packs / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        if hashlib.sha256((packs / name).read_bytes()).hexdigest() != digest:
            sys.exit(f"error: {packs / name} has another digest than SHA256SUMS\nhint: transfer it again")
    to.mkdir(parents=True, exist_ok=True)
    for pack in ("sglang", "job"):
        if parts := sorted(packs.glob(f"{pack}.tar.xz.*")):
            files: Any = Parts(parts)  # `read` is all that is called
            with lzma.open(files) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                tar.extractall(to, filter="fully_trusted")
    for site in ("site", "job"):  # else the first processes would all compile the same files
        compileall.compile_dir(to / site, quiet=2, workers=0)
    # Should a module be compiled: its link line wants libcudart.so, which the wheel names libcudart.so.13.
    runtime = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    (to / "link").mkdir(exist_ok=True)
    if runtime is not None and runtime.submodule_search_locations and not (to / "link/libcudart.so").exists():
        (to / "link/libcudart.so").symlink_to(Path(runtime.submodule_search_locations[0]) / "lib/libcudart.so.13")
    (to / "environment").write_text("".join(
        f'export {name}="{value}{f"${{{name}:+:${name}}}" if name.endswith("PATH") else ""}"\n'
        for name, value in variables(to).items()))
    # Folders named `plugin` hold what Eyrie adds to SGLang; all else of the caller's PYTHONPATH is Eyrie's packages.
    (to / "sglang").write_text(
        "#!/bin/sh\nkept=\nIFS=:\nfor part in $PYTHONPATH; do case $part in */plugin) kept=$kept:$part ;; esac; done\n"
        f'unset IFS PYTHONPATH\n. "{to}/environment"\nexport PYTHONPATH="$PYTHONPATH$kept"\n'
        f'exec "{sys.executable}" -m sglang.launch_server "$@"\n')
    (to / "sglang").chmod(0o755)
    print(f"unpacked into {to}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
