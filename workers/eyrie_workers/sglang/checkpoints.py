"""Facts about a target and a drafter that decide SGLang's flags, read from their `config.json` only.

The target may be of any family that SGLang serves, whether or not Eyrie can load it. Read are: attention kind, sliding
windows, quantisation and context length; for a drafter also the speculative algorithm, which follows from its
architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyrie_api.contract.families import FAMILIES, SGLangAlgorithm
from eyrie_api.planning.sglang_attention import AttentionNeeds, needs_of
from eyrie_api.planning.sglang_support import (
    SUPPORTED_BY_SGLANG,
    Unlaunchable,
    context_length,
    holds_mtp_layers,
    positive_integer,
)
from eyrie_api.planning.target_config import SLIDING

PLAIN = AttentionNeeds()
_UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class TargetCheckpoint:
    model: str
    """Directory or Hugging Face Hub id."""

    architecture: str
    num_layers: int
    context_length: int
    revision: str | None = None
    attention: AttentionNeeds = PLAIN
    quantised: str | None = None
    """`quant_method` of the checkpoint."""


@dataclass(frozen=True)
class DrafterCheckpoint:
    directory: str
    context_length: int
    sliding_window: int | None = None
    """Number of latest positions it attends to, the current one included, as in training."""

    quantised: str | None = None
    algorithm: SGLangAlgorithm | None = "EAGLE3"
    """None: SGLang does not support its family."""

    block_size: int | None = None
    """For a drafter of blocks: the tokens that are verified, the last accepted one and a whole block of proposals."""

    whole_vocabulary: bool = True
    """Whether it can propose every token of the target."""

    bfloat16_only: bool = False
    """Whether SGLang computes it in bfloat16 alone: a Domino head."""

    confident: bool = True
    """Whether a DSpark drafter has a confidence head."""

    confidence_temperatures: tuple[float, ...] = ()
    """By which its confidences of each step are divided; empty: none were fitted."""


def read_target(model: str, config: Mapping[str, Any], revision: str | None = None) -> TargetCheckpoint:
    """Read a target's `config.json`. Raises Unlaunchable naming the missing field."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise Unlaunchable(f"target {model!r}: config.json has no `architectures`", "give a Hugging Face model")
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    if config.get("model_type") == "olmo3" and SLIDING in (config.get("rope_parameters") or {}):
        # SGLang's Olmo 3 configuration does not read this form and uses theta 10000 without a warning.
        raise Unlaunchable(f"target {model!r}: config.json has rope_parameters by layer type, as transformers 5 "
                           "saves them, which SGLang ignores", "write the full_attention entry as "
                           "rope_scaling and its rope_theta at the top level, as in the published checkpoints")
    return TargetCheckpoint(
        model=model, revision=revision, architecture=str(architectures[0]),
        num_layers=positive_integer(text, "num_hidden_layers", model), context_length=context_length(text, model),
        attention=needs_of(config),
        quantised=_quantised(config))


def read_drafter(directory: str, config: Mapping[str, Any]) -> DrafterCheckpoint:
    """Read an exported drafter's `config.json`. Raises Unlaunchable naming the missing field."""
    if holds_mtp_layers(config):  # windows are the target's, and SGLang's class for these layers knows them
        text = config.get("text_config")
        return DrafterCheckpoint(directory=directory, algorithm=checkpoint_algorithm(config), context_length=
                                 context_length(text if isinstance(text, Mapping) else config, directory),
                                 quantised=_quantised(config))
    own = config.get("eyrie")
    window = config.get("sliding_window")
    if window is None and isinstance(own, Mapping):
        window = own.get("sliding_window")
    if window is not None and (not isinstance(window, int) or window < 2):
        raise Unlaunchable(f"drafter {directory!r}: sliding_window is {window!r}, not a number of positions",
                           "export the drafter again")
    algorithm = checkpoint_algorithm(config)
    blocks = config.get("dflash_config")
    block_size = (blocks if isinstance(blocks, Mapping) else {}).get("block_size", config.get("block_size"))
    # Heads on the target's hidden state have no positions of their own.
    unlimited = algorithm is None and "max_position_embeddings" not in config
    return DrafterCheckpoint(
        directory=directory, context_length=_UNLIMITED if unlimited else context_length(config, directory),
        sliding_window=window, quantised=_quantised(config), algorithm=algorithm,
        block_size=block_size + (algorithm == "DSPARK") if isinstance(block_size, int) else None,
        whole_vocabulary=config.get("draft_vocab_size") in (None, config.get("vocab_size")),
        bfloat16_only=isinstance(blocks, Mapping) and blocks.get("projector_type") == "domino",
        confident=bool(config.get("enable_confidence_head")), confidence_temperatures=tuple(
            own.get("confidence_temperatures", ()) if isinstance(own, Mapping) else ()))


def checkpoint_algorithm(config: Mapping[str, Any]) -> SGLangAlgorithm | None:
    """SGLang's algorithm for a checkpoint of these `architectures`; None when there is none.

    A language model that SGLang supports as a target is a STANDALONE drafter; its MTP layers alone are an EAGLE one.
    """
    if holds_mtp_layers(config):
        return "EAGLE"
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    for row in FAMILIES.values():
        if not row.of_target and name in (row.architecture, *row.read_architectures):
            return row.sglang_algorithm
    return "STANDALONE" if name in SUPPORTED_BY_SGLANG else None


def _quantised(config: Mapping[str, Any]) -> str | None:
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return None
    return str(quantisation.get("quant_method") or "unknown")
