"""What a launch line must know of a target and a drafter, read from their `config.json` and nothing else.

The target may be of any family SGLang serves, so nothing here asks whether Eyrie could load it: only the questions that
change flags are answered: attention kind, sliding windows, experts, quantisation, context; of a drafter also which
algorithm drafts with it, which its architecture says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from eyrie_api.decisions.capture_support import SUPPORTED_BY_SGLANG
from eyrie_api.v1alpha1.drafter import SGLANG_ALGORITHMS, Family
from eyrie_workers.engines.sglang.profiles import AttentionNeeds
from eyrie_workers.targets.sglang_limits import Unlaunchable, context_length, positive_integer

SLIDING, LINEAR = "sliding_attention", "linear_attention"
PLAIN = AttentionNeeds()
_ENDLESS = 2**31 - 1
_SINK_ARCHITECTURES = ("GptOssForCausalLM",)

Algorithm = Literal["EAGLE", "EAGLE3", "STANDALONE", "DFLASH"]
"""`--speculative-algorithm` of a drafter with weights."""

_ALGORITHMS: dict[str, Algorithm] = {
    "LlamaForCausalLMEagle3": "EAGLE3", "LlamaForCausalLMEagle": "EAGLE", "DFlashDraftModel": "DFLASH"}


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target as SGLang sees it."""

    model: str
    """Directory or Hub id."""

    architecture: str
    num_layers: int
    context_length: int
    revision: str | None = None
    attention: AttentionNeeds = PLAIN
    experts: bool = False
    quantised: str | None = None
    """`quant_method` of the checkpoint."""


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter as SGLang sees it."""

    directory: str
    context_length: int
    sliding_window: int | None = None
    """Latest positions it attends to, the present one included, as it was trained."""

    quantised: str | None = None
    algorithm: Algorithm | None = "EAGLE3"
    """None: SGLang has no way to draft with it."""

    block_size: int | None = None
    """Tokens of one block, the last settled one included, of a drafter that writes whole blocks."""


def read_target(model: str, config: Mapping[str, Any], revision: str | None = None) -> TargetCheckpoint:
    """The facts of a target from its `config.json`. Raises Unlaunchable naming what is missing."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise Unlaunchable(f"target {model!r}: config.json names no architecture", "give a Hugging Face model")
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    if config.get("model_type") == "olmo3" and SLIDING in (config.get("rope_parameters") or {}):
        # Its own Olmo 3 configuration does not know this spelling, and falls back to theta 10000 without a word.
        raise Unlaunchable(f"target {model!r}: config.json gives rope_parameters by layer type, as transformers 5 "
                           "saves them; SGLang would serve another model", "write the full_attention entry as "
                           "rope_scaling and its rope_theta at the top level, as the published checkpoints have them")
    kinds = text.get("layer_types") or ()
    linear = LINEAR in kinds or bool(text.get("linear_num_key_heads"))
    windowed = bool(text.get("sliding_window")) and bool(text.get("use_sliding_window", True))
    return TargetCheckpoint(
        model=model, revision=revision, architecture=str(architectures[0]),
        num_layers=positive_integer(text, "num_hidden_layers", model), context_length=context_length(text, model),
        attention=AttentionNeeds(
            mla=bool(text.get("kv_lora_rank")), sliding=SLIDING in kinds or (not kinds and windowed),
            sinks=str(architectures[0]) in _SINK_ARCHITECTURES, linear=linear),
        experts=any(text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")),
        quantised=_quantised(config))


def read_drafter(directory: str, config: Mapping[str, Any]) -> DrafterCheckpoint:
    """The facts of an exported drafter from its `config.json`. Raises Unlaunchable naming what is missing."""
    own = config.get("eyrie")
    window = config.get("sliding_window")
    if window is None and isinstance(own, Mapping):
        window = own.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 2):
        raise Unlaunchable(f"drafter {directory!r}: sliding_window is {window!r}, not a count of positions",
                           "export the drafter again")
    algorithm = checkpoint_algorithm(config)
    endless = algorithm is None and "max_position_embeddings" not in config  # heads on a state know no positions
    return DrafterCheckpoint(
        directory=directory, context_length=_ENDLESS if endless else context_length(config, directory),
        sliding_window=window, quantised=_quantised(config), algorithm=algorithm, block_size=_block_size(config))


def checkpoint_algorithm(config: Mapping[str, Any]) -> Algorithm | None:
    """How SGLang drafts with a checkpoint of these `architectures`; None when it cannot.

    A model that SGLang knows as a target drafts by itself (STANDALONE).
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    return _ALGORITHMS.get(str(name)) or ("STANDALONE" if name in SUPPORTED_BY_SGLANG else None)


def family_algorithm(family: Family) -> Algorithm | None:
    """The same for a drafter whose checkpoint cannot be read, only the job that asked for it."""
    found = SGLANG_ALGORITHMS.get(family)
    return next((algorithm for algorithm in get_args(Algorithm) if algorithm == found), None)


def _block_size(config: Mapping[str, Any]) -> int | None:
    inner = config.get("dflash_config")
    found = (inner if isinstance(inner, Mapping) else {}).get("block_size", config.get("block_size"))
    return found if isinstance(found, int) else None


def _quantised(config: Mapping[str, Any]) -> str | None:
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return None
    return str(quantisation.get("quant_method") or "unknown")
