"""Which Hugging Face configs the reference forward pass computes (`eyrie_workers.targets`): rules on `config.json`.

The API applies them before a job is accepted, the workers before they read weights. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eyrie_api.errors import UnsupportedTarget
from eyrie_api.v1alpha1.capture import StateSource, StateSourceName

FAMILIES = ("llama", "qwen2", "qwen3", "olmo2", "olmo3")
"""Values of `model_type`."""

FULL = "full_attention"
SLIDING = "sliding_attention"

_ROPE_TYPES = ("default", "linear", "llama3")


def check_config(data: Mapping[str, Any]) -> None:
    """Raises UnsupportedTarget, naming the field, for a config that the forward pass would compute wrongly."""
    family = str(data.get("model_type", ""))
    if family not in FAMILIES:
        raise UnsupportedTarget(f"model_type {family!r} is not supported", f"use a target of {', '.join(FAMILIES)}")
    if data.get("hidden_act", "silu") != "silu":
        raise UnsupportedTarget(f"hidden_act {data['hidden_act']!r} is not supported", "only silu is computed")
    _check_unquantised(data)
    check_sizes(data, "intermediate_size")
    _check_rope(data, family)
    layer_types(data)


def _check_unquantised(data: Mapping[str, Any]) -> None:
    if data.get("quantization_config") is not None:
        raise UnsupportedTarget("quantization_config is set: quantised weights cannot be read here",
                                "give the unquantised model")


def check_sizes(data: Mapping[str, Any], *others: str) -> None:
    """Raises UnsupportedTarget naming a size that is not a positive integer."""
    for field in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", *others):
        value = data.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedTarget(f"config.json: {field} is {value!r}, not a positive integer",
                                    "save the model again")


def computed_by_reference(data: Mapping[str, Any]) -> bool:
    """Whether the reference forward pass computes the model of a config."""
    try:
        check_config(data)
    except UnsupportedTarget:
        return False
    return True


def choose_source(data: Mapping[str, Any], wanted: StateSource) -> StateSourceName:
    """Which source computes a target's hidden states: the reference where it can, unless another is named.

    Raises UnsupportedTarget when the named one cannot.
    """
    _check_unquantised(data)
    if wanted == "transformers":
        return wanted
    if computed_by_reference(data):
        return "reference"
    if wanted == "reference":
        check_config(data)
    return "transformers"


def language_model(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: that of `text_config`, where a checkpoint has several models."""
    inner = data.get("text_config")
    return {**data, **inner} if isinstance(inner, Mapping) else data


def logit_transform(text: Mapping[str, Any]) -> tuple[float, float | None]:
    """Factor and bound of the logits (`eyrie_workers.targets.output_head`), under the names that configs use."""
    scale = float(text.get("logit_scale") or 1.0) / float(text.get("logits_scaling") or 1.0)
    soft_cap = text.get("final_logit_softcapping")
    return scale, float(soft_cap) if soft_cap else None


def _check_rope(data: Mapping[str, Any], family: str) -> None:
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedTarget(f"config.json: rope parameters are {scaling!r}, not an object", "correct config.json")
    if family != "olmo3":
        _check_rope_type(data, scaling, _ROPE_TYPES)
        return
    sliding, full = olmo3_ropes(scaling)
    _check_rope_type(data, sliding, ("default",))
    _check_rope_type(data, full, (*_ROPE_TYPES, "yarn"))


def olmo3_ropes(scaling: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Rope parameters of Olmo 3's sliding and full layers: by layer type since transformers 5; before,
    `rope_scaling` was for the full layers alone."""
    return scaling.get(SLIDING) or {}, scaling.get(FULL) or (scaling if "factor" in scaling else {})


def _check_rope_type(data: Mapping[str, Any], scaling: Mapping[str, Any], known: Sequence[str]) -> None:
    kind = rope_type(scaling)
    if kind not in known:
        raise UnsupportedTarget(f"rope type {kind!r} is not supported", f"only {', '.join(known)} are computed")
    if float(scaling.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        raise UnsupportedTarget("partial_rotary_factor is not 1", "only rotation of whole heads is computed")


def rope_type(scaling: Mapping[str, Any]) -> Any:
    """Name of the scaling, under either key."""
    return scaling.get("rope_type") or scaling.get("type") or "default"


def layer_types(data: Mapping[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """FULL or SLIDING per layer, and the window of the sliding ones in tokens. Raises UnsupportedTarget."""
    num_layers, window = int(data["num_hidden_layers"]), data.get("sliding_window")
    slides = bool(data.get("use_sliding_window", window is not None and data.get("model_type") == "llama"))
    listed = data.get("layer_types")
    types = tuple(str(kind) for kind in listed) if listed else None
    if types is None and data.get("model_type") == "olmo3":
        types = tuple(SLIDING if (i + 1) % 4 else FULL for i in range(num_layers))
    if types is None:
        first_sliding = int(data.get("max_window_layers", num_layers)) if slides and window else num_layers
        types = tuple(SLIDING if i >= first_sliding else FULL for i in range(num_layers))
    if len(types) != num_layers:
        raise UnsupportedTarget(f"layer_types has {len(types)} entries for {num_layers} layers", "correct config.json")
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedTarget(f"layer_types holds {unknown}", f"only {FULL} and {SLIDING} are computed")
    if SLIDING not in types:
        return types, None
    if not isinstance(window, int) or window < 1:
        raise UnsupportedTarget(f"sliding_window is {window!r} but layers slide", "correct config.json")
    return types, window
