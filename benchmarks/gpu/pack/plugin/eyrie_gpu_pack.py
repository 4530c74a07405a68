"""A plugin of SGLang (entry-point group sglang.srt.plugins) that finds the modules of a pack and edits no file.

SGLang compiles its JIT modules at a server's start and keeps them by the compiler's version text and the digests of
all system headers, which differ between two machines. EYRIE_PACK_JIT names a directory of modules that were compiled
before, by the same sources and the same release of nvcc; they are found by module, arguments, flags and own sources. A
module that is not there is compiled as usual. With EYRIE_PACK_JIT_RECORD=1 what is compiled is copied into it.

Packs are without flashinfer: SGLang then gets top-k and top-p of sampled requests with a drafter from sgl_kernel, of
whose kernels flashinfer's are a later version.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any


def key(spec: Any) -> str:
    """What a module is found by."""
    digest = hashlib.sha256()
    for part in (spec.module_name, spec.module_args, spec.cuda_wrappers, spec.cpp_wrappers, spec.cuda_cflags,
                 spec.header_only):
        digest.update(repr(part).encode() + b"\0")
    for path in sorted([*spec.cpp_files, *spec.cuda_files]):
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return f"{spec.module_name[:60]}-{digest.hexdigest()[:16]}"


def use_compiled(directory: Path) -> None:
    """Look for JIT modules in `directory` first."""
    from sglang.kernels.jit.utils.compile import cache, loader

    find_prebuilt, commit_build = loader._find_prebuilt, cache.commit_build

    def find(*, spec: Any, scope: Any) -> Any:
        compiled = directory / key(spec) / f"{spec.module_name}.so"
        print(f"[eyrie_gpu_pack] {'found' if compiled.is_file() else 'COMPILES'} {key(spec)}", file=sys.stderr,
              flush=True)
        return compiled if compiled.is_file() else find_prebuilt(spec=spec, scope=scope)

    def keep(spec: Any, **rest: Any) -> Any:
        library = commit_build(spec, **rest)
        if library is not None:
            (directory / key(spec)).mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, directory / key(spec) / f"{spec.module_name}.so")
        return library

    loader._find_prebuilt = find
    if importlib.util.find_spec("flashinfer") is None:
        # Its headers are needed to compile one module (sampling), not to load it.
        loader.REGISTERED_DEPENDENCIES["flashinfer"] = list
    if os.environ.get("EYRIE_PACK_JIT_RECORD"):
        cache.commit_build = keep


def install() -> None:
    """The entry point."""
    if importlib.util.find_spec("flashinfer") is None:
        from sglang.kernels.ops.sampling import renorm

        for name in ("top_k_renorm_prob", "top_p_renorm_prob"):
            lazy = getattr(renorm, name)
            if getattr(lazy, "module_name", None) == "flashinfer.sampling":  # resolved at its first call
                lazy.module_name, lazy.class_name = "sgl_kernel", name
    if directory := os.environ.get("EYRIE_PACK_JIT"):
        use_compiled(Path(directory))
