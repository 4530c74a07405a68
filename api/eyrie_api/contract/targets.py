"""The target of a job, and which targets Eyrie supports: the API refuses the others before a worker loads anything.

Architecture names are the entries of `architectures` in a Hugging Face `config.json`. To add one, implement its
forward pass in `eyrie_workers.targets`, then list it here.
"""

import re
from typing import Literal, get_args

from pydantic import ConfigDict, Field

from eyrie_api.contract.model import Frozen

SUPPORTED_ARCHITECTURES: tuple[str, ...] = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM",
    "Olmo3ForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM", "GraniteForCausalLM", "MiMoForCausalLM")

QUICKSTART = "quickstart"
"""The model, conversations and suites shipped with Eyrie; `quickstart:<suite>` names one suite."""

QUICKSTART_SUITE_NAMES: tuple[str, ...] = ("chat", "math", "code", "tools")

_REVISION = re.compile(r"[^\x00-\x20\x7f~^:?*\[\\-][^\x00-\x20\x7f~^:?*\[\\]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(model: str) -> bool:
    """Whether the text has the form of a Hub id, `org/name`. A relative path may have it too: stored jobs have none."""
    return _HUB_ID.fullmatch(model) is not None


def is_revision(revision: str) -> bool:
    """Whether it may be a branch, tag or commit, by Git's rules for names: none leads out of a directory of names."""
    return _REVISION.fullmatch(revision) is not None and not set(revision.split("/")) & {"", ".", ".."}


HELD_OUT = "held-out"
"""The suite made of the prompts split off the job's own data."""

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ELEMENT_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class JobTarget(Frozen):
    """The frozen large model whose output must not change, as a job names it."""

    # A `TargetSpec` given to a job becomes a `JobTarget`: models of different classes are never equal, and a job has to
    # equal itself after it was stored.
    model_config = ConfigDict(revalidate_instances="subclass-instances")

    model: str = Field(min_length=1, max_length=4096)
    """A local Hugging Face directory, a Hub id (`org/name`), or `quickstart` for the model shipped with Eyrie."""

    revision: str | None = Field(None, max_length=256)
    """Hub branch, tag or commit. Ignored for a local directory, whose content digest is recorded instead."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of the target. auto is resolved once, when the job is accepted: on GPUs the checkpoint's dtype
    (bfloat16 where config.json cannot be read then), on CPUs float32, which most of them compute faster."""


class TargetSpec(JobTarget):
    """A target whose dtype is known: what stages load and endpoints serve."""

    dtype: Dtype = "float32"
    """Arithmetic of the target here. float32 is the lossless reference on CPU; bfloat16 is usual on GPU."""


def resolve_dtype(target: JobTarget, stored: str | None, *, on_gpus: bool) -> TargetSpec:
    """The target with the dtype that `auto` means. Pure.

    stored  the dtype that the checkpoint's config names; None where it names none or cannot be read.
    """
    by_default = next((name for name in DTYPES if name == stored), "bfloat16") if on_gpus else "float32"
    return TargetSpec(model=target.model, revision=target.revision,
                      dtype=by_default if target.dtype == "auto" else target.dtype)
