"""How checkpoints are benchmarked: suites of prompts, temperatures, concurrencies, tree; drafters that the job does not
train, as its candidates or as rivals next to them."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from eyrie_api.contract.data import without_credentials
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.model import Frozen, Name, depends


class SuiteSpec(Frozen):
    """A held-out set of prompts."""

    name: Name
    """In reports, on the leaderboard and in promotion's reasons."""

    path: Annotated[str, AfterValidator(without_credentials)] = Field(min_length=1, max_length=4096)
    """`quickstart:<suite>`, a file of `messages` or `prompt` rows (also `s3://` or `https://`), `held-out` for the
    prompts split off the data, or a Hub data set. Files of MT-Bench, GSM8K, HumanEval, Alpaca and BFCL are read as
    published."""

    max_prompts: int = Field(8, ge=1, le=100_000)
    """Prompts taken from the suite, the first ones of the file. In the final measurement of tuning, a required suite
    that they do not decide answers up to four times as many."""

    required: bool = True
    """Whether promotion demands a speed-up in this suite. Where one is required, the tuner's races and the proof's load
    are of prompts of required suites alone; identity is checked on all."""

QUICKSTART_SUITES = tuple(
    SuiteSpec(name=name, path=f"quickstart:{name}") for name in ("chat", "math", "code", "tools")
)


class BenchmarkSpec(Frozen):
    """How every checkpoint is measured in the decode engine, against the same engine without a drafter."""

    suites: tuple[SuiteSpec, ...] = depends(QUICKSTART_SUITES, min_length=1, max_length=64)
    """Prompts that no drafter was trained on. Each suite is measured and reported by itself. Omitted: the shipped
    suites for `quickstart` data; where a target other than the shipped one has other data too, or there is no
    `quickstart` data, 32 prompts held out of the data (of few conversations up to a fifth). With `drafters`: the
    shipped suites for the shipped target; for another, suites are named."""

    temperatures: tuple[Annotated[float, Field(ge=0.0, le=4.0)], ...] = depends((0.0, 1.0), min_length=1)
    """Each is measured and reported by itself; 0 is greedy. Omitted, 0 alone for SGLang on CPUs."""

    concurrencies: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field((1,), min_length=1, max_length=16)
    """Requests decoded at once. 1 is always among them: suites, ranking and promotion are decided there. At each of
    the others every checkpoint answers the prompts of all suites mixed."""

    tree: DraftTreeShape = depends(DraftTreeShape())
    """The draft that every checkpoint is ranked with; the tune stage then finds the winner's own. SGLang drafts with
    `dflash` whole blocks alone: where a job trains it for SGLang, the default is the chain of one block."""

    max_new_tokens: int = Field(96, ge=2, le=131_072)
    """Longest answer to one prompt, in tokens."""

    repeats: int = Field(1, ge=1, le=100)
    """Interleaved repetitions of every prompt in every variant."""

    warmup_prompts: int = Field(2, ge=0, le=1000)
    """Prompts answered by every variant before the first timed one."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seed of sampled answers, the same in all variants."""

    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of the engine; default: all."""

    @property
    def deciding_suites(self) -> tuple[SuiteSpec, ...]:
        """The required suites; all where none is required."""
        return tuple(suite for suite in self.suites if suite.required) or self.suites

    @field_validator("concurrencies")
    @classmethod
    def _ascending_from_one(cls, concurrencies: tuple[int, ...]) -> tuple[int, ...]:
        if concurrencies[0] != 1 or list(concurrencies) != sorted(set(concurrencies)):
            raise ValueError(f"benchmark.concurrencies {list(concurrencies)} must ascend from 1, at which checkpoints "
                             f"are ranked: write {sorted({1, *concurrencies})}")
        return concurrencies


NAME_PREFIX = "rival-"
"""Checkpoints with this prefix are rivals; those of candidates end in `-step-<n>`."""


# Rivals: drafters that the job did not train, measured next to its own candidates. A drafter from elsewhere (a
# published head, or a small language model) is one more checkpoint of the benchmark stage, which first copies it into
# the job in the form that the engines load. N-gram look-up is benchmarked in the same way, in a chain; tuning compares
# it at every load besides. No drafter is the baseline of every speed-up: its line of the leaderboard is taken from the
# other benchmarks. The target's own MTP layers (`nextn`) are a drafter of which only SGLang knows how to compute it;
# the benchmark stage copies them from the target's checkpoint.


class RivalSpec(Frozen):
    """One rival. Short form: a path or Hub id, `nextn`, `ngram` or `off`."""

    method: Literal["drafter", "nextn", "ngram", "off"] = "drafter"
    """What it drafts with; `drafter` needs a path. `nextn` is the target's own MTP layers, in engine `sglang`."""

    path: str | None = Field(None, min_length=1, max_length=4096)
    """Directory or Hub id of a drafter in one of the forms of docs/drafters.md: EAGLE-1/2, EAGLE-3, DFlash (also with
    the head of Domino, DFlash2 or LiLiCorr), DSpark, any export of Eyrie, or a Llama of the target's vocabulary."""

    revision: str | None = Field(None, max_length=256)
    """Of a Hub id."""

    name: Name | None = Field(None, max_length=40)
    """In the leaderboard, behind `rival-`. Default: from the last part of the path."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return {"method": value.lower()} if value.lower() in ("nextn", "ngram", "off") else {"path": value}

    @model_validator(mode="after")
    def _path_of_a_drafter(self) -> "RivalSpec":
        if (self.method == "drafter") != (self.path is not None):
            raise ValueError(f"method {self.method!r} with path {self.path!r}: a drafter needs the path, and "
                             "nextn, ngram and off have none")
        return self

    @property
    def has_drafter(self) -> bool:
        """Whether it drafts with weights: a published drafter's, or the target's own MTP layers."""
        return self.method in ("drafter", "nextn")

    @property
    def checkpoint(self) -> str:
        """Name among the job's checkpoints."""
        return NAME_PREFIX + self._own_name

    @property
    def _own_name(self) -> str:
        last = (self.path or self.method).rstrip("/").rpartition("/")[2]
        return self.name or re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:40].strip("-") or "drafter"


class BroughtDrafter(RivalSpec):
    """One drafter that was trained elsewhere, as a candidate. Short form: a path or Hub id, or `nextn`."""

    method: Literal["drafter", "nextn"] = "drafter"
    """What it drafts with; `drafter` needs a path. `nextn` is the target's own MTP layers, in engine `sglang`."""

    name: Name | None = Field(None, max_length=40)
    """In reports and in the leaderboard. Default: from the last part of the path."""

    @property
    def checkpoint(self) -> str:
        """Name among the job's checkpoints."""
        return self._own_name

    @model_validator(mode="after")
    def _named_as_no_rival(self) -> "BroughtDrafter":
        if self.checkpoint.startswith(NAME_PREFIX):
            raise ValueError(f"{self.checkpoint!r} begins with {NAME_PREFIX!r}, as the names of rivals do: give it "
                             "another name")
        return self
