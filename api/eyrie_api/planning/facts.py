"""What the resolution of a job depends on besides its document: machine or cluster, and the files of target and data.

`read_facts` reads all of it once, before `resolve`, which is pure. Of a target `config.json` is read, of data the size
of the files and the first rows; nothing here loads a model or a tokenizer. A Hub id is looked up in the local Hub cache
only: the control plane contacts no model hub. GPUs are found without torch, by device files, environment variables and
the driver; GPUs of AMD, and GPUs under WSL, have one device file for all, which gives no number.
"""

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from eyrie_api.contract.cluster import ClusterProfile
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.engine import SGLANG_PROGRAM
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import StageKey
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.resolved import PlacedGpus
from eyrie_api.contract.targets import HELD_OUT, QUICKSTART, JobTarget, is_hub_id, is_revision
from eyrie_api.data_files import GZIP, SUFFIXES, data_files, is_pattern, is_remote
from eyrie_api.errors import InvalidInput, NoUsableData, TargetNotFound
from eyrie_api.file_rules import open_file
from eyrie_api.planning.data_files import check_data_source, first_rows, usable_rows
from eyrie_api.planning.hardware import memory_of
from eyrie_api.planning.placement import read_profile
from eyrie_api.planning.plan_work import DataFacts, Experts, LatentAttention, TargetFacts
from eyrie_api.planning.quantised import scale_block
from eyrie_api.planning.target_config import check_size, has_tied_embeddings, language_model
from eyrie_api.planning.target_files import read_object, template_refusals
from eyrie_api.settings import Settings

DEVICES = Path("/dev")
WITHOUT_A_NUMBER = ("kfd", "dxg")
"""Device files of AMD GPUs, and of the GPUs of a Windows host."""

Device = Literal["cpu", "gpu"]
"""What an engine computes on."""

DATA_SUFFIXES = (*SUFFIXES, ".csv", ".txt")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SAMPLE_ROWS = 1000
"""Of the first file of a source, as far as they are in its first 256 KiB."""

# Bytes of JSON per token, keys and quotes included, for English chats. A low value, so that plans overestimate tokens.
_BYTES_PER_TOKEN = 4.0
QUICKSTART_ROWS = 8192
"""Conversations that ship with the quickstart target (`data.jsonl.gz`)."""

# Means over 300 conversations of the quickstart corpus under its own 2048-token vocabulary, template included.
_QUICKSTART_PROMPT_TOKENS, _QUICKSTART_ANSWER_TOKENS = 97.0, 54.0


@dataclass(frozen=True)
class Facts:
    """Read once per submission. The default is a machine without GPUs that knows nothing of target and data."""

    profile: ClusterProfile | None = None
    """None: jobs run on this machine."""

    local_device: Device = "cpu"
    has_sglang: bool = False
    target: Path | None = None
    """Directory of the target on this machine; None: a Hub id that is not in the cache."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Its `config.json`; empty where it is not here."""

    data: DataFacts = field(default_factory=DataFacts)

    @cached_property
    def sizes(self) -> TargetFacts | None:
        """Of the target; None where it is not here. Raises UnsupportedTarget."""
        return None if self.target is None else target_facts(self.target)

    def engine_device(self, gpus: Mapping[StageKey, PlacedGpus], serving: PlacedGpus) -> Device:
        """The device of a job's engine, given the GPUs of its stages and its endpoint."""
        if self.profile is None:
            return self.local_device
        return "gpu" if gpus["prove"].num_gpus or serving.num_gpus else "cpu"

    def computes_on_gpus(self, gpus: Mapping[StageKey, PlacedGpus], serving: PlacedGpus) -> bool:
        """Whether a job's target is on GPUs in any stage; `target.dtype: auto` depends on it."""
        if any(placed.num_gpus for placed in (*gpus.values(), serving)):
            return True
        return self.engine_device(gpus, serving) == "gpu" and os.environ.get("EYRIE_DEVICE") != "cpu"


def read_facts(spec: JobSpec, settings: Settings, rules: ReadRules | None = None) -> Facts:
    """Read target and data of a job, whose sources are checked first: reading may wait where a file is none. Raises
    InvalidInput or NoUsableData for a source, TargetNotFound and UnsupportedTarget."""
    profile = None if settings.cluster_profile is None else read_profile(settings.cluster_profile)
    for number, source in enumerate(spec.data.sources):
        if source.path == QUICKSTART or is_remote(source.path) or (profile is not None and is_missing(source.path)):
            continue  # stages run in pods, which may have files that this server has not
        try:
            if local_path(source.path) is not None:
                check_data_source(source, spec.data.answered, rules)
            elif not is_hub_id(source.path):
                raise InvalidInput(f"data source {source.path!r} is neither a file here nor a Hub data set id",
                                   "give a file, directory or pattern, an s3:// or https:// URL, a Hub id org/name, or "
                                   "'quickstart'")
        except InvalidInput as error:
            raise type(error)(f"data.sources[{number}].path: {error.message}", error.hint) from None
    directory = target_dir(spec.target)
    return Facts(profile, local_device(), has_sglang(settings), directory,
                 {} if directory is None else read_config(directory), data_facts(spec.data, directory, rules))


def is_missing(path: str) -> bool:
    """Whether it is an absolute path of which nothing is on this machine."""
    return path.startswith("/") and not data_files(path) and not os.path.exists(os.path.expanduser(path))


# This machine.


def has_sglang(settings: Settings) -> bool:
    """Whether stages find an SGLang: on a cluster the administrator gives it to those with GPUs; here it is named by a
    variable, or installed."""
    return (settings.cluster_profile is not None or bool(os.environ.get(SGLANG_PROGRAM))
            or importlib.util.find_spec("sglang") is not None)


def local_device(devices: Path = DEVICES) -> Device:
    """Whether this process may use a GPU: an NVIDIA device that CUDA_VISIBLE_DEVICES does not hide, or an AMD one."""
    nvidia = any(devices.glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    amd = (devices / "kfd").exists() and os.environ.get("HIP_VISIBLE_DEVICES") not in ("", "-1")
    return "gpu" if nvidia or amd else "cpu"


def gpus_of(environment: Mapping[str, str], devices: Path = DEVICES) -> tuple[str, ...]:
    """Ids of this machine's NVIDIA GPUs for CUDA_VISIBLE_DEVICES, without loading torch; none with EYRIE_DEVICE=cpu."""
    if environment.get("EYRIE_DEVICE") == "cpu":
        return ()
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part for part in given.split(",") if part not in ("", "-1"))
    return tuple(str(number) for number in range(len(list(devices.glob("nvidia[0-9]*")))))


def gpu_names_here(driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """What NVIDIA's driver calls the GPUs of this machine; empty where this machine uses none."""
    return [] if not gpus_of(os.environ) else [
        line.removeprefix("Model:").strip() for file in driver.glob("*/information")
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith("Model:")]


def gpu_memory_here(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int | None:
    """The most memory of a GPU of this machine by its name; None where that of any is not known, or this machine uses
    none."""
    names = gpu_names_here(driver)
    sizes = [memory_of(name) for name in names]
    known = [size for size in sizes if size is not None]
    return max(known) if known and len(known) == len(sizes) else None


def memory_here(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Main memory that programs of this machine may take: all of it, or what a control group of this process allows, of
    version 2 or 1. None where it is not known."""
    sizes: list[int] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        total = next(line for line in (proc / "meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
        sizes.append(1024 * int(total.split()[1]))
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            first, file = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
            if controllers in ("", "memory"):
                group = first / path.strip("/")
                for limited in (group, *group.parents):  # a group has no more than those that it is in
                    with contextlib.suppress(OSError, ValueError):  # "max"
                        sizes.append(int((limited / file).read_text()))
    return min(sizes, default=None)


# Paths, target and data.


def local_path(path: str) -> Path | None:
    """The absolute path, if the text is one: it exists, or has the form of a path. None for a Hub id or a URL."""
    if "\0" in path or is_remote(path):
        return None
    written_as_path = (path.startswith(("/", "./", "../", "~")) or path.endswith(DATA_SUFFIXES) or path.count("/") > 1
                       or is_pattern(path))
    if not (written_as_path or os.path.exists(os.path.expanduser(path))):
        return None
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:  # expanduser of an unknown user: ~nobody
        return Path(path)


def with_absolute_paths(spec: JobSpec) -> JobSpec:
    """The job with this server's absolute paths: stage programs run elsewhere."""
    def absolute(field: str, path: str) -> str:
        if field == "promotion.drift.traffic_file" and not is_remote(path):  # never a Hub id
            return str(Path(path).expanduser().absolute())
        shipped = path in (QUICKSTART, HELD_OUT) or path.startswith(f"{QUICKSTART}:")
        local = None if shipped else local_path(path)
        return path if local is None else str(local)

    # A relative path and its absolute one may end in different names: those that the mixes use are kept.
    if spec.data.mix is not None or spec.sweep.varies_mix:
        sources = tuple(source.model_copy(update={"name": name})
                        for source, name in zip(spec.data.sources, spec.data.source_names, strict=True))
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"sources": sources})})
    return spec.with_paths(absolute)


@cache
def quickstart_dir() -> Path | None:
    """The directory of the packaged target, found without importing the workers; None where they are not installed."""
    package = importlib.util.find_spec("eyrie_workers")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "quickstart" / "target"
    return path if (path / "config.json").is_file() else None


def target_dir(target: JobTarget) -> Path | None:
    """The target's directory on this machine, or None when it is a Hub id that is not in the cache. Raises
    TargetNotFound when the model is neither a directory here nor a Hub id, or its revision cannot be one."""
    if target.model == QUICKSTART:
        return quickstart_dir()
    path = local_path(target.model)
    if path is not None:
        if not path.is_dir():
            raise TargetNotFound(f"target.model {target.model!r}: no such directory on the server",
                                 "give a Hugging Face directory with config.json, a Hub id org/name, or 'quickstart'")
        return path
    if not is_hub_id(target.model):
        raise TargetNotFound(f"target.model {target.model!r} is neither a directory here nor a Hub id",
                             "give a Hugging Face directory, a Hub id org/name, or 'quickstart'")
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / ("models--" + target.model.replace("/", "--"))
    revision = target.revision or "main"
    if not is_revision(revision):
        raise TargetNotFound(f"revision {revision!r} of {target.model} is no branch, tag or commit",
                             "name one, or leave it out")
    with contextlib.suppress(OSError):  # not a branch or tag in the cache: taken as a commit
        revision = (cache / "refs" / revision).read_text().strip()
    path = cache / "snapshots" / revision
    return path if (path / "config.json").is_file() else None


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a target. Raises TargetNotFound or UnsupportedTarget."""
    path = directory / "config.json"
    if not path.is_file():  # opening a FIFO waits for its other end
        raise TargetNotFound(f"target.model {str(directory)!r} has no readable config.json",
                             "give a Hugging Face model directory (config.json, weights, tokenizer)")
    return read_object(path)


def target_facts(directory: Path) -> TargetFacts:
    """The sizes in a target's config. Raises UnsupportedTarget naming the one that is missing or invalid."""
    return facts_of(read_config(directory), str(directory / "config.json"))


def facts_of(config: Mapping[str, Any], file: str) -> TargetFacts:
    """The same of a config that was read from `file`."""
    config = language_model(config)

    def figure(name: str, default: int | None = None) -> int:
        value = config.get(name)
        return check_size(file, name, default if value is None else value)

    heads, hidden = figure("num_attention_heads"), figure("hidden_size")
    number = next((name for name in _EXPERTS if config.get(name)), None)
    experts: Experts | None = None
    latent: LatentAttention | None = None
    if number is not None:
        width = figure("moe_intermediate_size", figure("intermediate_size", 4 * hidden))
        shared = figure("n_shared_experts") * width if config.get("n_shared_experts") else 0
        experts = Experts(
            number=figure(number), active=figure("num_experts_per_tok", 1), intermediate_size=width,
            shared_size=shared or int(config.get("shared_expert_intermediate_size") or 0),
            dense_layers=min(int(config.get("first_k_dense_replace") or 0), figure("num_hidden_layers")))
    if config.get("kv_lora_rank"):
        latent = LatentAttention(
            figure("q_lora_rank") if config.get("q_lora_rank") else None, figure("kv_lora_rank"),
            figure("qk_rope_head_dim"), figure("qk_nope_head_dim"), figure("v_head_dim"))
    return TargetFacts(
        experts=experts, latent=latent, block=scale_block(config),
        hidden_size=hidden, num_layers=figure("num_hidden_layers"), vocab_size=figure("vocab_size"),
        intermediate_size=figure("intermediate_size", 4 * hidden), num_heads=heads,
        num_kv_heads=figure("num_key_value_heads", heads), head_dim=figure("head_dim", max(1, hidden // heads)),
        tie_word_embeddings=has_tied_embeddings(config), source="the target's config.json",
        dtype=stored_dtype(config))


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Dtype of the checkpoint's weights, as its config names it; None where it does not."""
    named = config.get("dtype") or config.get("torch_dtype")
    return named if isinstance(named, str) else None


def data_facts(data: DataSpec, target: Path | None = None, rules: ReadRules | None = None) -> DataFacts:
    """Rows and lengths, from the first rows of local files; unknown where any source cannot be sampled.

    target   directory of the target, whose chat template decides which conversations it answers; None: not here

    Raises NoUsableData where it answers none of the first rows of a source, InvalidInput for a file that may not be
    read.
    """
    samples = [_sample(source, number, data.answered, target, rules) for number, source in enumerate(data.sources)]
    total = sum(sample.rows or 0 for sample in samples)
    if not total or any(sample.prompt_tokens is None for sample in samples):
        return DataFacts()
    prompt = sum((sample.prompt_tokens or 0.0) * (sample.rows or 0) for sample in samples) / total
    known = all(sample.answer_tokens is not None for sample in samples)
    answer = sum((sample.answer_tokens or 0.0) * (sample.rows or 0) for sample in samples) / total if known else None
    accepted = [round((sample.rows or 0) * sample.accepted) for sample in samples]
    return DataFacts(rows=total, accepted=sum(accepted) / total, prompt_tokens=prompt, answer_tokens=answer,
                     not_usable=tuple(sentence for sample in samples for sentence in sample.not_usable),
                     source=", ".join(dict.fromkeys(sample.source for sample in samples)),
                     source_rows=dict(zip(data.source_names, accepted, strict=True)))


_TEXT_OF_BYTE = {".jsonl": 1.0, GZIP: 3.0}
"""Bytes of text in a byte of a file. gzip packs conversations about so much; a plan reads no file to its end."""


def _sample(source: DataSource, number: int, answered: bool, target: Path | None,
            rules: ReadRules | None) -> DataFacts:
    if source.path == QUICKSTART:
        return DataFacts(min(source.max_rows or QUICKSTART_ROWS, QUICKSTART_ROWS), _QUICKSTART_PROMPT_TOKENS,
                         _QUICKSTART_ANSWER_TOKENS, "the quickstart corpus")
    files = data_files(source.path) if local_path(source.path) is not None else []
    if not files or any(file.suffix not in _TEXT_OF_BYTE for file in files):
        return DataFacts()
    size = sum(file.stat().st_size * _TEXT_OF_BYTE[file.suffix] for file in files)
    with open_file(files[0], rules, "data file") as file:
        lines = first_rows(file, files[0].suffix, _SAMPLE_ROWS)
    if not lines:
        return DataFacts()
    mean = sum(map(len, lines)) / len(lines)
    rows = max(1, round(size / mean))
    rows = min(rows, source.max_rows or rows)
    # 1. Rows that are conversations; `data.max_conversations` counts these.
    conversations, fault = usable_rows(lines, source, answered)
    # 2. Those of them that the job answers: each prompt once, and only what the template accepts.
    distinct = list({row.id: row for row in conversations}.values())
    refusals = [""] * len(distinct) if target is None or not distinct else template_refusals(
        target, [(row.prompt, row.tools, source.chat_template_kwargs) for row in distinct])
    answerable = refusals.count("")
    fault = fault or next(filter(None, refusals), "the same prompts again")
    of_first = f"of the first {len(lines)} rows of {source.path!r}"
    packed = f", {_TEXT_OF_BYTE[GZIP]:g} of text to a packed one" if any(file.suffix == GZIP for file in files) else ""
    if not answerable:
        raise NoUsableData(f"data.sources[{number}].path: none {of_first} can be answered: {fault}",
                           "give conversations that the target's chat template accepts")
    share = f"{len(lines) - answerable} {of_first} will not be answered; the first reason: {fault}"
    return DataFacts(round(rows * len(conversations) / len(lines)), mean / _BYTES_PER_TOKEN, None,
                     f"the first {len(lines)} rows, at {_BYTES_PER_TOKEN:g} bytes a token{packed}",
                     accepted=answerable / len(conversations),
                     not_usable=() if answerable == len(lines) else (share,))
