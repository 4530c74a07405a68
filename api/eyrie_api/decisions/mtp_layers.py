"""The layers for multi-token prediction (MTP, "next-n") that some targets were trained with, as a drafter. Pure.

SGLang 0.5.23 drafts with them by its EAGLE algorithm: a checkpoint that is given as draft model and names one of
`MTP_ARCHITECTURES` is loaded as the MTP class of that architecture (`ModelConfig._config_draft_model`;
tests/sglang/test_mtp_layers.py asks the installed wheel for each). MTP layers are not part of `num_hidden_layers`:
published checkpoints store them under `mtp`, `model.mtp_layers` or similar, or as layers with numbers behind the last
(DeepSeek-V3 and its relatives). Embedding and output matrix are the target's.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from eyrie_api.errors import UnsupportedTarget

MTP_ARCHITECTURES: tuple[str, ...] = (
    "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "HYV3ForCausalLM", "LongcatFlashForCausalLM", "MiMoForCausalLM",
    "NemotronHForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
)
"""Targets whose MTP layers SGLang drafts with."""

MARK = "mtp"
"""Value of `eyrie.drafter` in the config.json of a directory of MTP layers; its `architectures` is the target's."""

_BY_NAME = re.compile(r"^(?:model\.)?mtp[._]")
_BY_NUMBER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")


def holds_mtp_layers(config: Mapping[str, Any]) -> bool:
    """Whether this config.json is of a directory of MTP layers."""
    own = config.get("eyrie")
    return isinstance(own, Mapping) and own.get("drafter") == MARK


def mtp_tensors(names: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a target's tensors that are of its MTP layers, in the given order.

    config   the target's config.json

    Raises UnsupportedTarget when SGLang does not draft with this architecture's, or there is none.
    """
    require_mtp_architecture(config)
    text = config.get("text_config")
    num_layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    found = tuple(name for name in names if _BY_NAME.match(name) or (
        isinstance(num_layers, int) and (layer := _BY_NUMBER.match(name)) and int(layer[1]) >= num_layers))
    if not found:
        raise UnsupportedTarget("rivals: nextn: the target's checkpoint has no MTP layers",
                                "leave the rival out, or use a checkpoint that was published with its MTP layers")
    return found


def require_mtp_architecture(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedTarget when SGLang does not draft with the MTP layers of this architecture."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in MTP_ARCHITECTURES:
        raise UnsupportedTarget(
            f"rivals: nextn: SGLang does not draft with MTP layers of {name}",
            f"leave the rival out; targets with MTP layers are {', '.join(MTP_ARCHITECTURES)}")
