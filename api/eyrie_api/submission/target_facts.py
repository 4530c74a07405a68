"""Facts about a target and its data that are cheap to read: from `config.json`, file sizes and the first rows.

Used by `preflight` to refuse a job and by plans to estimate it. Nothing here loads a model or a tokenizer. A Hub id is
looked up in the local Hub cache only: the control plane contacts no model hub.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from eyrie_api.data_files import SUFFIXES, data_files, is_pattern, is_remote
from eyrie_api.decisions.plan_facts import DataFacts, Experts, TargetFacts
from eyrie_api.decisions.target_config import has_tied_embeddings, language_model
from eyrie_api.errors import TargetNotFound, UnsupportedTarget
from eyrie_api.submission.file_reading import read_object
from eyrie_api.v1alpha1.data import DataSource, DataSpec
from eyrie_api.v1alpha1.targets import QUICKSTART, TRAINED_HERE, JobTarget, is_hub_id, trained_here

DATA_SUFFIXES = (*SUFFIXES, ".csv", ".txt")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SAMPLE_BYTES = 1 << 18
# Bytes of JSON per token, keys and quotes included, for English chats. A low value, so that plans overestimate tokens.
_BYTES_PER_TOKEN = 4.0
QUICKSTART_ROWS = 8192
"""Conversations that ship with the quickstart target (`conversations.jsonl.gz`)."""

# Means over 300 conversations of the quickstart corpus under its own 2048-token vocabulary, template included.
_QUICKSTART_PROMPT_TOKENS, _QUICKSTART_ANSWER_TOKENS = 97.0, 54.0


def exists(path: str) -> bool:
    """Whether the path exists on this machine; False for an invalid path."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def local_path(path: str) -> Path | None:
    """The absolute path, if the text is one: it exists, or has the form of a path. None for a Hub id or a URL."""
    if "\0" in path or is_remote(path):
        return None
    written_as_path = (path.startswith(("/", "./", "../", "~")) or path.endswith(DATA_SUFFIXES) or path.count("/") > 1
                       or is_pattern(path))
    if not (written_as_path or exists(path)):
        return None
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:  # expanduser of an unknown user: ~nobody
        return Path(path)


@cache
def quickstart_dir() -> Path | None:
    """The directory of the packaged target, found without importing the workers; None where they are not installed."""
    package = importlib.util.find_spec("eyrie_workers")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "quickstart" / "target"
    return path if (path / "config.json").is_file() else None


def target_dir(target: JobTarget) -> Path | None:
    """The target's directory on this machine, or None when it is a Hub id that is not in the cache.

    Raises TargetNotFound when the model is neither a directory here nor a Hub id, or its revision cannot be one.
    """
    if target.model == QUICKSTART:
        return quickstart_dir()
    if target.model in TRAINED_HERE:
        made = trained_here(target.model)
        if not (made / "config.json").is_file():
            raise TargetNotFound(f"target.model {target.model!r} is not in {made}",
                                 f"run `{TRAINED_HERE[target.model]}`")
        return made
    path = local_path(target.model)
    if path is not None:
        if not path.is_dir():
            raise TargetNotFound(f"target.model {target.model!r}: no such directory on the server",
                                 "give a Hugging Face directory with config.json, a Hub id org/name, or 'quickstart'")
        return path
    if not is_hub_id(target.model):
        raise TargetNotFound(f"target.model {target.model!r} is neither a directory here nor a Hub id",
                             "give a Hugging Face directory, a Hub id org/name, or 'quickstart'")
    return _cached(target)


def _cached(target: JobTarget) -> Path | None:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / ("models--" + target.model.replace("/", "--"))
    revision = target.revision or "main"
    if "\0" in revision:
        raise TargetNotFound(f"target.revision {revision!r} is no branch, tag or commit", "name one, or leave it out")
    if ".." in revision:
        return None
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
    config = language_model(read_config(directory))

    def figure(name: str, default: int | None = None) -> int:
        value = config.get(name, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedTarget(f"{directory / 'config.json'}: {name} is {value!r}, not a positive integer",
                                    "give a decoder-only text model's config")
        return value

    heads, hidden = figure("num_attention_heads"), figure("hidden_size")
    experts = next((name for name in _EXPERTS if config.get(name)), None)
    return TargetFacts(
        experts=None if experts is None else Experts(
            number=figure(experts), active=figure("num_experts_per_tok", 1), intermediate_size=figure(
                "moe_intermediate_size", figure("intermediate_size", 4 * hidden))),
        hidden_size=hidden, num_layers=figure("num_hidden_layers"), vocab_size=figure("vocab_size"),
        intermediate_size=figure("intermediate_size", 4 * hidden), num_heads=heads,
        num_kv_heads=figure("num_key_value_heads", heads), head_dim=figure("head_dim", max(1, hidden // heads)),
        tie_word_embeddings=has_tied_embeddings(config), source="the target's config.json",
        dtype=stored_dtype(config))


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Dtype of the checkpoint's weights, as its config names it; None where it does not."""
    named = config.get("dtype") or config.get("torch_dtype")
    return named if isinstance(named, str) else None


def data_facts(data: DataSpec) -> DataFacts:
    """Rows and lengths, from the first rows of local files; unknown where any source cannot be sampled."""
    samples = [_sample(source) for source in data.sources]
    if any(one.prompt_tokens is None for one in samples):
        return DataFacts()
    total = sum(one.rows or 0 for one in samples)
    if not total:
        return DataFacts()
    prompt = sum((one.prompt_tokens or 0.0) * (one.rows or 0) for one in samples) / total
    answers = [one.answer_tokens for one in samples]
    known = all(one is not None for one in answers)
    answer = sum((one.answer_tokens or 0.0) * (one.rows or 0) for one in samples) / total if known else None
    return DataFacts(rows=total, prompt_tokens=prompt, answer_tokens=answer,
                     source=_sources(one.source for one in samples),
                     source_rows=dict(zip(data.source_names, (one.rows or 0 for one in samples), strict=True)))


def _sources(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _sample(source: DataSource) -> DataFacts:
    if source.path == QUICKSTART:
        return DataFacts(min(source.max_rows or QUICKSTART_ROWS, QUICKSTART_ROWS), _QUICKSTART_PROMPT_TOKENS,
                         _QUICKSTART_ANSWER_TOKENS, "the quickstart corpus")
    files = data_files(source.path) if local_path(source.path) is not None else []
    if not files or any(file.suffix != ".jsonl" for file in files):
        return DataFacts()
    size = sum(file.stat().st_size for file in files)
    with files[0].open("rb") as file:
        data = file.read(_SAMPLE_BYTES)
    lines = [line for line in data.splitlines() if line.strip()]
    if not lines:
        return DataFacts()
    mean = len(data) / len(lines)
    rows = max(1, round(size / mean))
    return DataFacts(min(rows, source.max_rows or rows), mean / _BYTES_PER_TOKEN, None,
                     f"the first {len(lines)} rows, at {_BYTES_PER_TOKEN:g} bytes a token")
