"""Where a job's conversations come from, and how they are mixed, filtered and split."""

from typing import Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from eyrie_api.v1alpha1.model import Frozen, Probability


class DataSource(Frozen):
    """One source of conversations."""

    path: str = Field(min_length=1, max_length=4096)
    """A file (JSON lines or a JSON array, also compressed as .gz or .zst; parquet), a directory of such files, a
    pattern (`chats/*.jsonl.gz`); the same in a bucket (`s3://bucket/chats/*.parquet`), a file of a web server
    (`https://...`); a Hub data set id, or `quickstart` for locally generated conversations."""

    format: Literal["auto", "messages", "sharegpt", "alpaca"] = "auto"
    """Row layout: OpenAI `messages`, ShareGPT `conversations`, Alpaca's `instruction`, or decided by the first readable
    row."""

    @field_validator("path")
    @classmethod
    def _without_credentials(cls, path: str) -> str:
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
            raise ValueError("a source's URL has no user, query or fragment: credentials are not part of a job")
        return path

    config: str | None = Field(None, min_length=1, max_length=256)
    """Configuration (subset) of a Hub data set."""

    split: str = "train"
    """Split of a Hub data set."""

    revision: str | None = Field(None, min_length=1, max_length=256)
    """Branch, tag or commit of a Hub data set."""

    weight: float = Field(1.0, gt=0.0, le=1e6)
    """Share of the mix, relative to the other sources."""

    max_rows: int | None = Field(None, ge=1)
    """Read at most this many rows."""

    chat_template_kwargs: dict[str, JsonValue] = Field({}, max_length=32)
    """Variables for the target's chat template in the prompts of this source, for example `enable_thinking: false`."""

    max_new_tokens: int | None = Field(None, ge=1, le=131_072)
    """Limit of an answer's length, in place of `regenerate.max_new_tokens`: a reasoning model's answers are long."""


class DataSpec(Frozen):
    """The conversations whose last assistant turn the target regenerates."""

    sources: tuple[DataSource, ...] = Field(min_length=1, max_length=64)
    """Where conversations come from; the shares of the mix are their weights."""

    max_conversations: int = Field(1000, ge=1, le=100_000_000)
    """Conversations drawn from the mix."""

    held_out_fraction: Probability = 0.02
    """Share of prompts split off by hash before anything else; never answered for training, never trained on."""

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

    @model_validator(mode="after")
    def _one_rule_for_each_file(self) -> "DataSpec":
        rules: dict[str, tuple[dict[str, JsonValue], int | None]] = {}
        for source in self.sources:
            rule = (source.chat_template_kwargs, source.max_new_tokens)
            if rules.setdefault(source.path, rule) != rule:
                raise ValueError(f"data.sources names {source.path!r} twice with different chat_template_kwargs or "
                                 "max_new_tokens: rows are distinguished by their file; use a copy of the file")
        return self
