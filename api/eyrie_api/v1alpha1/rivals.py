"""Rivals: drafters that the job did not train, measured next to its own candidates.

A drafter from elsewhere (a published head, or a small language model) is one more checkpoint of the benchmark stage,
which first copies it into the job in the form that the engines load. N-gram look-up is benchmarked in the same way,
in a chain; tuning compares it at every load besides. No drafter is the baseline of every speed-up: its line of the
leaderboard is taken from the other benchmarks. The target's own MTP layers (`nextn`) are a drafter of which only SGLang
knows how to compute it; the benchmark stage copies them from the target's checkpoint.
"""

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from eyrie_api.v1alpha1.model import Frozen, Name

NAME_PREFIX = "rival-"
"""Checkpoints with this prefix are rivals; those of candidates end in `-step-<n>`."""


class RivalSpec(Frozen):
    """One rival. Short form: a path or Hub id, `nextn`, `ngram` or `off`."""

    method: Literal["drafter", "nextn", "ngram", "off"] = "drafter"
    """What it drafts with; `drafter` needs a path. `nextn` is the target's own MTP layers, in engine `sglang`."""

    path: str | None = Field(None, min_length=1, max_length=4096)
    """Directory or Hub id: EAGLE-1/2 and EAGLE-3 in the form of their authors, of SGLang or of speculators; DFlash;
    Medusa or Hydra of Eyrie; a Llama of the target's vocabulary as draft model."""

    revision: str | None = Field(None, max_length=256)
    """Of a Hub id."""

    name: Name | None = Field(None, max_length=40)
    """In the leaderboard, behind `rival-`. Default: from the last part of the path."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        return {"method": given.lower()} if given.lower() in ("nextn", "ngram", "off") else {"path": given}

    @model_validator(mode="after")
    def _path_of_a_drafter(self) -> "RivalSpec":
        if (self.method == "drafter") != (self.path is not None):
            raise ValueError(f"rivals: method {self.method!r} with path {self.path!r}: a drafter needs the path, and "
                             "nextn, ngram and off have none")
        return self

    @property
    def has_drafter(self) -> bool:
        """Whether it drafts with weights: a published drafter's, or the target's own MTP layers."""
        return self.method in ("drafter", "nextn")

    @property
    def checkpoint(self) -> str:
        """Name among the job's checkpoints."""
        last = (self.path or self.method).rstrip("/").rpartition("/")[2]
        return NAME_PREFIX + (self.name or re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:40].strip("-")
                              or "drafter")
