"""What SGLang 0.5.23 drafts for: the targets of EAGLE-3 and block drafters, its numbering of their layers, and the
targets whose own layers for multi-token prediction it drafts with. Pure.

An EAGLE-3 drafter reads hidden states of the target and shares its embedding, so the target's model class must have
the methods `set_eagle3_layers_to_capture` and `get_embed_and_head`. Without one of them, the server exits after loading
the weights. The list is the result of a static scan of the wheel's `srt/models`: every class named in an `EntryClass`,
followed through its bases to the first that defines the method (70 of 290 have both).
tests/sglang/test_capture_support.py scans the installed wheel again and compares, including how each method treats
explicit layer ids.

`PLUGIN_ARCHITECTURES` lack a method in SGLang and are served with Eyrie's own model package
(`eyrie_workers.sglang.plugin`).

Layer ids. Eyrie uses the indices of Hugging Face `hidden_states`: 0 is the embedding, k the output of the k-th layer.
In SGLang, `eagle_config.eagle_aux_hidden_state_layer_ids` means "output of layer v" counted from 0, so v = k - 1, and
its models capture the input of layer v + 1. Some DeepSeek-like families add that 1 only when the first id is 1 and
otherwise use the ids unchanged, so there v = k (the wrong choice cost 0.1 tokens per round on Kimi K2.5: sglang issue
25454). The state after the last layer cannot be captured: `hidden_states` has it after the final norm, SGLang before
that norm or not at all. (Only GPT-OSS can capture it, with ids that include its number of layers.)

MTP layers (multi-token prediction, "next-n"), with which some targets were trained, draft by the EAGLE algorithm: a
checkpoint that is given as draft model and names one of `MTP_ARCHITECTURES` is loaded as the MTP class of that
architecture (`ModelConfig._config_draft_model`; tests/sglang/test_mtp_layers.py asks the installed wheel for each). MTP
layers are not part of `num_hidden_layers`: published checkpoints store them under `mtp`, `model.mtp_layers` or similar,
or as layers with numbers behind the last (DeepSeek-V3 and its relatives). Embedding and output matrix are the target's.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eyrie_api.contract.families import FAMILIES
from eyrie_api.errors import InvalidInput, UnsupportedTarget

SGLANG_VERSION = "0.5.23"

QUANTISED_BY_SGLANG = (
    "auto-round", "awq", "bitsandbytes", "blockwise_int8", "compressed-tensors", "fp8", "gptq", "modelopt",
    "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "mxfp4", "mxfp8", "quark", "w4afp8", "w8a8_fp8", "w8a8_int8")
"""Values of `quant_method` whose checkpoints its CUDA build loads (`srt/layers/quantization`)."""

PLUGIN_ARCHITECTURES: tuple[str, ...] = ("Olmo2ForCausalLM", "Olmo3ForCausalLM", "Qwen2MoeForCausalLM")
"""Drafted for with Eyrie's model package; SGLang serves both Olmos with its class Olmo2ForCausalLM."""

CAPTURED_ARCHITECTURES: tuple[str, ...] = (
    "ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
    "Cosmos3ForConditionalGeneration", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
    "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm5NextForConditionalGeneration", "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "InternS1ProForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration", "InternS2PreviewForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM",
    "LongcatFlashForCausalLM", "MellumForCausalLM", "MindSporeForCausalLM", "MiniMaxM2ForCausalLM",
    "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "Ministral3ForCausalLM",
    "MistralForCausalLM", "MistralLarge3ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration", "SarvamMoEForCausalLM", "TeleFLMForCausalLM",
)
"""Without drafters (NextN, MTP, Eagle, Assistant) and an embedding model, which inherit the method: no targets."""

NO_BLOCKS_ARCHITECTURES: tuple[str, ...] = (
    "ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
    "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration",
    "Glm4MoeForCausalLM", "Llama4ForConditionalGeneration", "LongcatFlashForCausalLM", "MindSporeForCausalLM",
    "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM", "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "SarvamMoEForCausalLM",
)
"""Of CAPTURED_ARCHITECTURES, those without `set_dflash_layers_to_capture`, which block drafters (DFlash) require."""

RAW_UNLESS_FIRST_IS_ONE: tuple[str, ...] = (
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM", "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM",
)
"""Families that add 1 to explicit layer ids only when the first id is 1."""

SUPPORTED_BY_SGLANG: tuple[str, ...] = tuple(sorted((*CAPTURED_ARCHITECTURES, *PLUGIN_ARCHITECTURES)))


class Unlaunchable(InvalidInput):
    """A combination of target, drafter, setting and machine that SGLang refuses, or serves wrongly without an error."""


def require_capture(architecture: str) -> None:
    """Raises UnsupportedTarget, with the supported ones, when SGLang has no EAGLE-3 capture for this architecture."""
    if architecture not in SUPPORTED_BY_SGLANG:
        raise UnsupportedTarget(
            f"SGLang {SGLANG_VERSION} cannot capture hidden states of {architecture}, which an EAGLE-3 drafter reads",
            f"serve with the embedded engine, or use a target of {', '.join(SUPPORTED_BY_SGLANG)}")


def require_quantisation(data: Mapping[str, Any]) -> None:
    """Raises UnsupportedTarget, with the value, for a `quantization_config` that SGLang's CUDA build does not load."""
    method, hint = data.get("quant_method"), "give the unquantised model, or set engine to 'embedded'"
    if method not in QUANTISED_BY_SGLANG:
        raise UnsupportedTarget(f"quantization_config: quant_method {method!r} and engine 'sglang', which loads "
                                f"{', '.join(QUANTISED_BY_SGLANG)}", "give the unquantised model")
    # Its other kernel for GPTQ was removed; Marlin's is taken for these alone (`is_gptq_marlin_compatible`).
    described = {name: data.get(name) for name in ("bits", "sym", "group_size", "desc_act")}
    if method == "gptq" and (described["bits"] not in (4, 8) or described["sym"] is not True
                             or described["group_size"] not in (-1, 32, 64, 128) or described["desc_act"] is None):
        raise UnsupportedTarget(f"quantization_config: gptq with {described} and engine 'sglang', whose kernel takes 4 "
                                "or 8 bits, sym true, and a group_size of -1, 32, 64 or 128", hint)


def require_block_capture(architecture: str) -> None:
    """`require_capture` for DFlash, which requires a second method that fewer models have."""
    require_capture(architecture)
    if architecture in (*NO_BLOCKS_ARCHITECTURES, *PLUGIN_ARCHITECTURES):
        raise UnsupportedTarget(
            f"SGLang {SGLANG_VERSION} cannot capture hidden states of {architecture} for a drafter of blocks",
            "serve with the embedded engine, or train another family")


def require_layer_outputs(aux_layers: Sequence[int], field: str) -> None:
    """Raises InvalidInput for layers that capture through SGLang cannot record.

    field   that names them
    """
    if 0 in aux_layers:
        raise InvalidInput(f"{field} {list(aux_layers)} has layer 0, the embeddings, and capture.source is 'sglang', "
                           "which records outputs of layers", "name layers from 1, or set capture.source to "
                           "'transformers'")


def sglang_layer_ids(architecture: str, num_layers: int, aux_layers: Sequence[int]) -> tuple[int, ...]:
    """`eagle_aux_hidden_state_layer_ids` for SGLang, from ascending `hidden_states` indices. Raises InvalidInput when
    SGLang cannot capture one of them for this architecture. The general rule also applies to architectures that SGLang
    does not capture at all, since other engines load the same checkpoint directory."""
    beyond = [layer for layer in aux_layers if not 0 <= layer < num_layers]
    if beyond:
        raise InvalidInput(f"aux layers {beyond} of a target with {num_layers} layers cannot be captured by SGLang: "
                           "the last layer's output never leaves it",
                           f"set capture.aux_layers to hidden_states indices below {num_layers}")
    if architecture not in RAW_UNLESS_FIRST_IS_ONE:
        return tuple(layer - 1 for layer in aux_layers)
    if aux_layers and aux_layers[0] == 1:
        raise InvalidInput(f"aux layers {list(aux_layers)} begin with 1: SGLang adds one to every id of "
                           f"{architecture} when the first is 1, and so cannot be given these ids",
                           "begin with another layer")
    if aux_layers and aux_layers[0] == 2:
        return tuple(layer - 1 for layer in aux_layers)
    return tuple(aux_layers)


def captured_inputs(architecture: str, ids: Sequence[int], num_layers: int | None = None) -> tuple[int, ...]:
    """The `hidden_states` indices that SGLang captures for explicit ids: the inverse of `sglang_layer_ids`.

    `num_layers` of the target matters for GPT-OSS only, which uses ids unchanged when the largest equals it.
    """
    if architecture == "GptOssForCausalLM" and ids and max(ids) == num_layers:
        return tuple(ids)
    if architecture in RAW_UNLESS_FIRST_IS_ONE and not (ids and ids[0] == 1):
        return tuple(ids)
    return tuple(value + 1 for value in ids)


def context_length(config: Mapping[str, Any], name: str) -> int:
    """The longest text SGLang allows for a config: rope scaling counts, unless the config gives the original length.

    `get_context_length` of SGLang's hf_transformers: a `factor` multiplies max_position_embeddings, except with
    `original_max_position_embeddings` (the length given is then the scaled one) and for llama3.
    """
    longest = positive_integer(config, "max_position_embeddings", name)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or "original_max_position_embeddings" in scaling:
        return longest
    if (scaling.get("rope_type") or scaling.get("type")) == "llama3":
        return longest
    factor = scaling.get("factor")
    return int(longest * factor) if isinstance(factor, int | float) else longest


def positive_integer(config: Mapping[str, Any], field: str, name: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise Unlaunchable(f"{name!r}: config.json has {field} = {value!r}, not a positive integer",
                           "give a decoder-only text model's config")
    return value


# Layers for multi-token prediction.

MTP_ARCHITECTURES: tuple[str, ...] = (
    "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "HYV3ForCausalLM", "LongcatFlashForCausalLM", "MiMoForCausalLM",
    "NemotronHForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
)
"""Targets whose MTP layers SGLang drafts with."""

MTP_LAYER = "model.mtp_layers.0."
"""Prefix of the tensors that family `mtp` continues from."""

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
    tensors = tuple(name for name in names if _BY_NAME.match(name) or (
        isinstance(num_layers, int) and (layer := _BY_NUMBER.match(name)) and int(layer[1]) >= num_layers))
    if not tensors:
        raise UnsupportedTarget("nextn: the target's checkpoint has no MTP layers",
                                "leave nextn out, or use a checkpoint that was published with its MTP layers")
    return tensors


def require_mtp_layer(config: Mapping[str, Any], names: Iterable[str] | None) -> None:
    """Raises UnsupportedTarget for a target without a layer that drafters of family mtp are trained from.

    names   of its tensors; None: unknown
    """
    wanted, found = FAMILIES["mtp"].architecture, config.get("architectures")
    alternatives = "train another family (eagle3 and eagle1 need no such layer)"
    if found != [wanted] or config.get("model_type") != "qwen2":
        served = isinstance(found, list) and set(found) & set(MTP_ARCHITECTURES)
        raise UnsupportedTarget(
            f"drafter.family is mtp and config.json names architecture {found!r} with model_type "
            f"{config.get('model_type')!r}: MTP layers of {wanted} with model_type 'qwen2' are trained",
            alternatives + (", or add nextn to rivals, which serves its layers as they are" if served else ""))
    if names is not None and not any(name.startswith(MTP_LAYER) for name in names):
        raise UnsupportedTarget(f"drafter.family is mtp and the target's checkpoint has no tensors {MTP_LAYER}*",
                                f"{alternatives}, or give the checkpoint as it was published")


def require_mtp_architecture(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedTarget when SGLang does not draft with the MTP layers of this architecture."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in MTP_ARCHITECTURES:
        raise UnsupportedTarget(
            f"nextn: SGLang does not draft with MTP layers of {name}",
            f"leave nextn out; targets with MTP layers are {', '.join(MTP_ARCHITECTURES)}")
