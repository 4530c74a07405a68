"""Resolves a target's name to its files, weights and digest; the only module that reads model files and the Hub.

Weights are read from safetensors directly: importing transformers costs seconds and would bring a second forward pass.
They are read one tensor at a time, as the model asks for them, so that neither the host nor the device ever holds the
checkpoint and the model at once (`CheckpointTensors`).
`quickstart` is the model shipped inside this package; a Hub id is fetched by huggingface_hub into its usual cache, and
only the files we read; on a cluster with a model cache it is read there (`model_cache`). The digest names what was
read, so that an artifact says which target it belongs to. Digests of large files are kept for one user of a machine, so
that stages and jobs do not each hash a target's weights.
"""

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyrie_api.artifacts import digest_bytes, digest_file, read_sealed, write_sealed
from eyrie_api.contract.model import Digest, Frozen
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import ArtifactCorrupt, MemoryTooSmall, TargetNotFound, UnsupportedTarget, reading
from eyrie_api.planning.quantised import Matrix, Quantisation, read_quantisation
from eyrie_api.planning.target_config import has_tied_embeddings, language_model
from eyrie_api.planning.target_files import INDEX, SINGLE, dense_matrices, indexed_files
from eyrie_workers.machine import cpu_count
from eyrie_workers.targets.config import parse_config, read_config_files, read_json
from eyrie_workers.targets.dequantise import dequantise
from eyrie_workers.targets.device import default_device, free_bytes
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.model_cache import (
    DEFAULT_REVISION,
    WANTED_FILES,
    cache_of_this_pod,
    cached_snapshot,
    recorded_digests,
)

QUICKSTART = "quickstart"
_QUICKSTART_DIR = Path(__file__).resolve().parents[1] / "quickstart" / "target"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By the names of `target.dtype`."""

_HASHING_THREADS = 8


def resolve(spec: TargetSpec) -> Path:
    """Directory of the target's files. Raises TargetNotFound."""
    if spec.model == QUICKSTART:
        if not (_QUICKSTART_DIR / "config.json").exists():
            raise TargetNotFound(f"the quickstart target is not in {_QUICKSTART_DIR}",
                                 "run `python -m benchmarks.quickstart.pretrain`, or name another target")
        return _QUICKSTART_DIR
    local = Path(spec.model).expanduser()
    if local.is_dir():
        if not (local / "config.json").exists():
            raise TargetNotFound(f"target.model {spec.model!r} is a directory without config.json",
                                 "give a Hugging Face model directory")
        return local.resolve()
    if local.is_absolute() or spec.model.startswith((".", "~")) or spec.model.count("/") != 1:
        raise TargetNotFound(f"target.model {spec.model!r} is not a directory",
                             "give an existing directory, a Hub id of the form org/name, or 'quickstart'")
    cache = cache_of_this_pod()
    if cache is None:
        return fetch_snapshot("target.model", spec.model, spec.revision)
    snapshot = cached_snapshot(cache, spec)
    if snapshot is None:  # a stage downloads no target beside the cache
        raise TargetNotFound(
            f"target.model {spec.model!r} (revision {spec.revision or DEFAULT_REVISION}) is not in the model cache "
            f"{cache}", "retry the job: its first task fills the cache; a cache on the nodes' own disks has to be "
            "filled on each node")
    return snapshot


def fetch_snapshot(field: str, name: str, revision: str | None) -> Path:
    """The directory of a Hub id in the Hub's cache, fetched if it is not there; `field` is for the messages. Raises
    TargetNotFound."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(WANTED_FILES)))
    except LocalEntryNotFoundError as error:
        raise TargetNotFound(f"{field} {name!r} is not in the Hub cache and the Hub cannot be reached",
                             "check the network, or give a local directory") from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise TargetNotFound(f"{field} {name!r} (revision {revision or 'default'}) was not found on "
                             f"the Hub: {type(error).__name__}",
                             "check the id, and log in if the model is gated") from error


def load_target(path: Path, dtype: str = "float32", device: torch.device | None = None) -> TargetModel:
    """The model in directory `path`, its weights in `dtype` on `device`; default: `default_device()`. Raises
    TargetNotFound without a config, UnsupportedTarget for what cannot be computed, ArtifactCorrupt for weights that are
    missing, truncated or of the wrong shape, MemoryTooSmall before any weight is read."""
    device = device or default_device()
    with reading(path):
        config = parse_config(*read_config_files(path))
        require_memory(str(device), weight_bytes(path, dtype), free_bytes(device), dtype)
        require_tied_head(path)
    try:
        return TargetModel(config, CheckpointTensors(path, DTYPES[dtype], device), path)
    except KeyError as error:
        raise ArtifactCorrupt(f"{path} has no tensor {error.args[0]!r}", "download or save the model again") from None
    except torch.OutOfMemoryError:
        raise
    except MemoryError as error:  # free when it was counted, and taken since
        raise MemoryTooSmall(f"{device} has too little memory for {path}", "end other programs on it") from error
    except (RuntimeError, TypeError, ArithmeticError) as error:
        raise ArtifactCorrupt(f"{path}: tensors do not fit config.json: {error}", "save the model again") from error


def require_tied_head(path: Path) -> None:
    """Raises UnsupportedTarget for weights with an output matrix of their own where config.json says that it is the
    embedding: every engine would ignore it, and answer as another model."""
    if not has_tied_embeddings(language_model(read_json(path / "config.json"))):
        return
    tensors = CheckpointTensors(path, torch.bfloat16, torch.device("cpu"))
    head, embedding = ([name for name in tensors if name.endswith(ending)] for ending in (
        "lm_head.weight", "embed_tokens.weight"))
    if len(head) == len(embedding) == 1 and not torch.equal(tensors[head[0]], tensors[embedding[0]]):
        raise UnsupportedTarget(
            f"{path}: config.json says that the output matrix is the embedding (tie_word_embeddings), and the weights "
            f"hold a {head[0]} of other values", "set tie_word_embeddings to false in config.json if the model was "
            "trained with its own output matrix, else save the weights again without it")


def weight_bytes(path: Path, dtype: str) -> int:
    """Bytes of a model's weights in a dtype, from the headers of its files. Tensors that no text model reads (a vision
    tower, an output matrix that is the embeddings') are counted: an upper bound. Raises ArtifactCorrupt,
    UnsupportedTarget."""
    return sum(math.prod(shape) for shape in tensor_shapes(path).values()) * DTYPES[dtype].itemsize


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's weights by the names that the model has for them. Raises as `weight_bytes`."""
    quantised = quantised_matrices(path)
    if quantised is not None:
        return {name: matrix.shape for name, matrix in quantised[1].items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        # Not "pt": torch's private mapping of a file that exceeds the memory is refused by the kernel.
        with _readable(file), safe_open(file, framework="np") as handle:
            shapes |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    return shapes


def quantised_matrices(path: Path) -> tuple[Quantisation, dict[str, Matrix]] | None:
    """How a target is quantised, and its weights by name; None: it is not. Raises UnsupportedTarget for a method that
    is not computed here, or tensors that it does not explain."""
    quantisation = read_quantisation(read_json(path / "config.json"))
    return None if quantisation is None else (quantisation, dense_matrices(path, quantisation))


def require_memory(device: str, needed: int, free: int | None, dtype: str) -> None:
    """Raises MemoryTooSmall where weights of `needed` bytes do not fit what is free; None: not known. Pure.

    Loading takes one layer more, and computing its activations: a target that passes may still be too large.
    """
    if free is None or needed <= free:
        return
    narrower = "set target.dtype to bfloat16, " if dtype == "float32" else ""
    raise MemoryTooSmall(f"the target's weights take {needed / 1e9:.1f} GB in {dtype}, and {device} has "
                         f"{free / 1e9:.1f} GB of free memory",
                         f"{narrower}end other programs on {device}, or use one with more memory")


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a model directory: each is read, converted and moved to the device when it is requested.

    Quantised weights are computed from what is stored for them (`targets.dequantise`), under the names that the model
    has for them. None is kept here, so memory holds what the caller keeps. The files are mapped, not read: their pages
    belong to the page cache. Tensors are copies: a view that is kept would keep all pages of its file.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None, device: torch.device, *, stored: bool = False) -> None:
        """Open the files. Raises ArtifactCorrupt, UnsupportedTarget.

        dtype    None: each as it is stored, and what is quantised in bfloat16
        stored   the tensors of quantised weights as they are in the files, by their names there, and not copied
        """
        self._dtype, self._device, self._copies = dtype, device, not stored
        self._files: dict[str, tuple[Path, safe_open]] = {}
        for file in weight_files(path):
            with _readable(file):
                handle = safe_open(file, framework="pt")
                self._files |= dict.fromkeys(handle.keys(), (file, handle))
        self._quantised = None if stored else quantised_matrices(path)
        self._names: Mapping[str, object] = self._files if self._quantised is None else self._quantised[1]

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor. Raises KeyError, ArtifactCorrupt."""
        if self._quantised is not None and self._quantised[1][name].is_quantised:
            quantisation, matrices = self._quantised
            values = dequantise(matrices[name], quantisation, lambda part: self._read(part).to(self._device))
            return values.to(self._dtype or torch.bfloat16)
        return self._read(name).to(device=self._device, dtype=self._dtype, copy=self._copies)

    def _read(self, name: str) -> Tensor:
        file, handle = self._files[name]
        with _readable(file):
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        """Without reading it, as the mixin's method would."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def stored_tensors(file: Path, wanted: Callable[[str], bool] = lambda _name: True) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file whose names are wanted, one by one, on the CPU. Raises ArtifactCorrupt."""
    with _readable(file), safe_open(file, framework="pt") as handle:
        for name in filter(wanted, handle.keys()):
            yield name, handle.get_tensor(name)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ArtifactCorrupt(f"{file} cannot be read: {error}", "download or save the model again") from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory: one, or those its index lists. Raises UnsupportedTarget."""
    index = path / INDEX
    if index.exists():
        return [path / name for name in sorted(set(indexed_files(index).values()))]
    single = path / SINGLE
    if not single.exists():
        raise UnsupportedTarget(f"{path} has neither model.safetensors nor its index",
                                "save the model with save_pretrained(..., safe_serialization=True)")
    return [single]


def special_token_ids(path: Path) -> list[int]:
    """Ids of the tokens that `tokenizer.json` marks as special; empty without that file."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return []
    added = json.loads(file.read_text()).get("added_tokens") or []
    return [int(token["id"]) for token in added if token.get("special")]


def target_digest(path: Path) -> str:
    """`sha256:<hex>` over everything that determines its answers: config, weights, tokenizer, template.

    Files are hashed side by side: one processor takes minutes for hundreds of gigabytes that a disk reads faster.
    """
    names = {file.name for file in weight_files(path)} | {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    recorded = recorded_digests(path)
    present = [name for name in sorted(names) if (path / name).exists()]
    with ThreadPoolExecutor(min(_HASHING_THREADS, cpu_count()), thread_name_prefix="eyrie-digests") as pool:
        digests = pool.map(lambda name: recorded.get(name) or known_digest(path / name), present)
        entries = [*zip(present, digests, strict=True)]
    return "sha256:" + hashlib.sha256(json.dumps(entries).encode()).hexdigest()


_LARGE = 64 << 20
"""Bytes. Smaller files are hashed in less than the time to look."""

_SETTLED_S = 2.0
"""A file that was changed so shortly ago may be changed again within the same tick of its file system's clock."""


class KnownDigest(Frozen):
    path: str
    identity: tuple[int, int, int, int, int]
    """Device, inode, bytes, nanoseconds of the modification and of the change."""

    sha256: Digest


def known_digest(path: Path) -> Digest:
    """The digest of a file: the known one of a large file that has not changed, else computed."""
    file = path.resolve()
    before, home = _identity(file), os.environ.get("HOME")
    caches = os.environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    # A user without a home has no record: one in a directory that others may write cannot be trusted.
    if before[2] < _LARGE or not caches:
        return digest_file(file)
    directory = Path(caches, "eyrie", "digests")
    record = directory / f"{digest_bytes(os.fsencode(file)).removeprefix('sha256:')}.json"
    with contextlib.suppress(OSError, ValueError):
        known = read_sealed(record.read_bytes(), KnownDigest)
        if (known.path, known.identity) == (str(file), before):
            return known.sha256
    sha256 = digest_file(file)
    if _identity(file) == before and time.time() - before[4] / 1e9 > _SETTLED_S:
        with contextlib.suppress(OSError):  # a home that cannot be written, as in a pod
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_sealed(record, KnownDigest(path=str(file), identity=before, sha256=sha256))
    return sha256


def _identity(file: Path) -> tuple[int, int, int, int, int]:
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
