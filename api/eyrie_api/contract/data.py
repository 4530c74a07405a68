"""Where a job's conversations come from, and how they are mixed, filtered and split.

Two things are called a mix. `sources[].weight` decides what is drawn, answered and captured, once for the job: the
union. `mix` decides which of the captured rows a candidate trains on, and may differ between the candidates of a sweep.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from eyrie_api.contract.model import Frozen, Name, Probability, depends

SourceMix = dict[Name, Annotated[float, Field(ge=0.0, le=1e6)]]
"""Share of each source by its name, relative to the others; a source that is not named has none."""

FEW_ROWS = 100
"""Rows left to train on below which a plan and regeneration warn. Of 100, 5 are kept for evaluation: the acceptance by
which checkpoints are ranked then has a standard error near .04 (64 rows: .01), more than most of them differ by. The
smallest shipped example trains on more."""

_DATA_SUFFIX = re.compile(r"(\.(jsonl|ndjson|json|parquet))?(\.(gz|zst))?$", re.IGNORECASE)
_MAX_DERIVED_NAME = 48
"""Characters of a name made from a path: room for a number within a DNS label."""


def without_credentials(path: str) -> str:
    """The path of data, or ValueError for a URL that is not read or holds a credential."""
    if "://" not in path:
        return path
    scheme, _, rest = path.partition("://")
    if scheme not in ("s3", "https"):
        raise ValueError(f"data of {scheme}:// is not read; give s3://, https://, a path or a Hub id")
    host, _, key = rest.partition("/")
    if not host or (scheme == "https" and not key):
        raise ValueError(f"{scheme}:// is followed by {'a bucket' if scheme == 's3' else 'a host and a path'}")
    # A presigned URL is a credential, and a spec is shown to everyone who may read the job.
    if "@" in host or (scheme == "https" and ("?" in rest or "#" in rest)):
        raise ValueError("a URL of data has no user, query or fragment: credentials are not part of a job")
    return path


class DataSource(Frozen):
    """One source of conversations."""

    path: Annotated[str, AfterValidator(without_credentials)] = Field(min_length=1, max_length=4096)
    """A file (JSON lines or a JSON array, also compressed as .gz or .zst; parquet), a directory of such files, a
    pattern (`chats/*.jsonl.gz`); the same in a bucket (`s3://bucket/chats/*.parquet`), a file of a web server
    (`https://...`); a Hub data set id, or `quickstart` for locally generated conversations."""

    name: Name | None = None
    """What `data.mix` calls it. Default: the last part of the path without wildcards and suffix, in lower case
    (`s3://bucket/chats/*.jsonl.gz`: `chats`), numbered where another source has that name (`chats-2`)."""

    format: Literal["auto", "messages", "sharegpt", "alpaca"] = "auto"
    """Row layout: OpenAI `messages`, ShareGPT `conversations`, `alpaca` (its `instruction`, GSM8K's `question` or TRL's
    `prompt`), or decided by the first readable row."""

    config: str | None = Field(None, min_length=1, max_length=256)
    """Configuration (subset) of a Hub data set."""

    split: str = "train"
    """Split of a Hub data set."""

    revision: str | None = Field(None, min_length=1, max_length=256)
    """Branch, tag or commit of a Hub data set."""

    weight: float = Field(1.0, gt=0.0, le=1e6)
    """Share of the mix, relative to the other sources."""

    max_rows: int | None = Field(None, ge=1, le=100_000_000)
    """Read at most this many rows."""

    chat_template_kwargs: dict[str, JsonValue] = Field({}, max_length=32)
    """Variables for the target's chat template in the prompts of this source, for example `enable_thinking: false`."""

    max_new_tokens: int | None = Field(None, ge=1, le=131_072)
    """Limit of an answer's length, in place of `regenerate.max_new_tokens`: a reasoning model's answers are long."""


class DataSpec(Frozen):
    """The conversations whose last assistant turn the target regenerates. A job with `drafters` has none."""

    sources: tuple[DataSource, ...] = Field((), max_length=64)
    """Where conversations come from; their weights are their shares of what is drawn, answered and captured. At least
    one, unless the job trains nothing (`drafters`)."""

    answered: bool = False
    """The answers of the data are used as they are, and nothing is generated: for data that the target has answered
    already, such as recorded traffic. A drafter learns the text it is trained on, so answers of another model lower
    tau. Answers end at `regenerate.max_new_tokens`; a row without one is quarantined."""

    mix: SourceMix | None = None
    """Shares of the captured rows that are trained on, by source: `{chats: 3, tools: 1}`. As many rows as the sources
    have in these shares; without it, all rows. As an axis of a sweep (`data.mix`), every candidate trains on the same
    number of rows. A row is an answered conversation; with `turns: all`, an answered turn."""

    max_conversations: int = depends(1000, ge=1, le=100_000_000)
    """Conversations drawn from the mix. Omitted, 20,000 for a target of your own on GPUs."""

    held_out_fraction: Probability = depends(0.02)
    """Share of prompts split off by hash before anything else; never answered for training, never trained on.
    Omitted, it is larger where suites of `held-out` need more of few conversations, up to a fifth."""

    max_prompt_tokens: int = Field(1024, ge=8, le=1_048_576)
    """Longer prompts are quarantined, with the reason."""

    near_duplicates: float | None = Field(None, gt=0.0, le=1.0)
    """Drop prompts whose similarity to an earlier one (Jaccard, by MinHash) reaches this; 0.8 is usual.
    Without it only identical prompts are dropped."""

    overlaps: Literal["report", "drop"] = "report"
    """Conversations that share 13 consecutive words with a benchmark suite are reported or dropped. Exact prompts of a
    suite are always dropped."""

    seed: int = Field(0, ge=0, le=2**63 - 1)
    """Seed of the draw from the mix."""

    @property
    def source_names(self) -> tuple[str, ...]:
        """The name of each source, given or derived from its path. They differ."""
        taken = {source.name for source in self.sources if source.name is not None}
        names: list[str] = []
        for source in self.sources:
            name = source.name
            if name is None:
                # Of the last part of the path that has no wildcard.
                parts = [part for part in source.path.partition("://")[2 if "://" in source.path else 0].split("/")
                         if part.strip(".") and not set(part) & set("*?[]")]
                last = _DATA_SUFFIX.sub("", parts[-1]) if parts else ""
                name = re.sub(r"[^a-z0-9]+", "-", last.lower())[:_MAX_DERIVED_NAME].strip("-") or "source"
                derived, number = name, 1
                while name in taken:
                    number += 1
                    name = f"{derived}-{number}"
                taken.add(name)
            names.append(name)
        return tuple(names)

    @model_validator(mode="after")
    def _sources_and_mix_agree(self) -> "DataSpec":
        names = [source.name for source in self.sources if source.name is not None]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"data.sources has two sources of the name {twice[0]!r}, and data.mix could not tell them "
                             "apart: give each a name of its own, or omit the names")
        known = ", ".join(self.source_names)
        unknown = [name for name in self.mix or () if name not in self.source_names]
        if unknown:
            raise ValueError(f"data.mix names {unknown[0]!r}, which is no source: use the names of data.sources, "
                             f"which are {known}")
        if self.mix is not None and len(self.mix) < 2:
            raise ValueError(f"data.mix {self.mix or 'of no source'} names fewer than two sources: name at least two "
                             f"of {known or 'data.sources'}, with share 0 for one to leave out; or omit data.mix to "
                             "train on all captured rows")
        if self.mix is not None and not any(self.mix.values()):
            raise ValueError(f"data.mix {self.mix} has no share above 0: give at least one source a share")
        rules: dict[str, tuple[dict[str, JsonValue], int | None]] = {}
        for source in self.sources:
            rule = (source.chat_template_kwargs, source.max_new_tokens)
            if rules.setdefault(source.path, rule) != rule:
                raise ValueError(f"data.sources names {source.path!r} twice with different chat_template_kwargs or "
                                 "max_new_tokens: rows are distinguished by their file; use a copy of the file")
        return self
