"""Which Hugging Face configs the reference forward pass computes (`eyrie_workers.targets`): rules on `config.json`.

The API applies them before a job is accepted, the workers before they read weights. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eyrie_api.contract.capture import StateSource, StateSourceName
from eyrie_api.contract.engine import EngineKind
from eyrie_api.errors import UnsupportedTarget
from eyrie_api.planning.quantised import quantisation_config, read_quantisation
from eyrie_api.planning.sglang_support import SUPPORTED_BY_SGLANG

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "phi3", "smollm3", "granite")
"""Values of `model_type`."""

FULL = "full_attention"
SLIDING = "sliding_attention"

UNSCALED_OR_LINEAR = ("default", "linear", "llama3")
"""Rope types whose rotations have length 1, which drafters may have as well."""

DEFAULT_ROPE_THETA = 10_000.0
"""Rotary base of configs that name none."""

_ROPE_TYPES = (*UNSCALED_OR_LINEAR, "yarn")
_WITHOUT_ATTENTION_BIAS = ("mistral", "qwen2", "phi3")
_WITH_MLP_BIAS = ("llama", "smollm3", "granite")
_ONE_TYPE_OF_LAYER = ("mistral", "phi3")
_TIED_BY_DEFAULT = ("smollm3",)
_MAX_LAYERS, _MAX_SIZE = 10_000, 2**32
"""Work and memory of the checks grow with the layers that a config names."""

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def check_config(data: Mapping[str, Any]) -> None:
    """Raises UnsupportedTarget, naming the field, for a config that the forward pass would compute wrongly."""
    family = str(data.get("model_type", ""))
    if family not in FAMILIES:
        raise UnsupportedTarget(f"model_type {family!r} is not supported", f"use a target of {', '.join(FAMILIES)}")
    if data.get("hidden_act", "silu") != "silu":
        raise UnsupportedTarget(f"hidden_act {data['hidden_act']!r} is not supported", "only silu is computed")
    read_quantisation(data)
    check_sizes(data, "intermediate_size")
    for field in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        value = data.get(field)
        if field in data and (value is not None or field == "max_position_embeddings"):
            check_size("config.json", field, value)
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedTarget(f"config.json: rope parameters are {scaling!r}, not an object", "correct config.json")
    for field, value in (("rms_norm_eps", data.get("rms_norm_eps", 1e-6)), *(
            (field, part[field]) for part in (data, scaling) for field in ("rope_theta", "partial_rotary_factor")
            if part.get(field) is not None)):
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise UnsupportedTarget(f"config.json: {field} is {value!r}, not a positive number", "correct config.json")
    if family == "olmo3":
        sliding, full = olmo3_ropes(scaling)
        _check_rope_type(sliding, ("default",))
        _check_rope_type(full, _ROPE_TYPES)
    else:
        # transformers takes any scaling of Phi-3 for longrope, whose factors depend on the length of the text.
        _check_rope_type(scaling, ("default",) if family == "phi3" else _ROPE_TYPES)
    rotary_size(data)
    layer_types(data)
    unrotated_layers(data)
    if family == "granite":
        for field in _MULTIPLIERS:
            value = data.get(field, 1.0)
            if not isinstance(value, int | float) or value <= 0:
                raise UnsupportedTarget(f"config.json: {field} is {value!r}, not a positive number",
                                        "save the model again")


def check_sizes(data: Mapping[str, Any], *others: str) -> None:
    """Raises UnsupportedTarget naming a size that is not a positive integer, or that no model has."""
    for field in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", *others):
        check_size("config.json", field, data.get(field))


def check_size(file: str, field: str, value: object) -> int:
    """The value of a size in a config file. Raises UnsupportedTarget."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedTarget(f"{file}: {field} is {value!r}, not a positive integer",
                                "give the config of a decoder-only text model, as it was saved")
    most = _MAX_LAYERS if field == "num_hidden_layers" else _MAX_SIZE
    if value > most:
        raise UnsupportedTarget(f"{file}: {field} is larger than {most:,}, which no model has",
                                "give the config of a decoder-only text model, as it was saved")
    return value


def check_drafter_config(data: Mapping[str, Any]) -> None:
    """`check_config` for the layers of a drafter. Raises UnsupportedTarget also for a rope that drafters lack here."""
    check_config(data)
    kind = rope_type(data.get("rope_parameters") or data.get("rope_scaling") or {})
    if kind not in UNSCALED_OR_LINEAR:
        raise UnsupportedTarget(f"rope type {kind!r} of a drafter is not supported",
                                f"only {', '.join(UNSCALED_OR_LINEAR)} are computed")


def computed_by_reference(data: Mapping[str, Any]) -> bool:
    """Whether the reference forward pass computes the model of a config."""
    try:
        check_config(data)
    except UnsupportedTarget:
        return False
    return True


def choose_source(data: Mapping[str, Any], wanted: StateSource, *, engine: EngineKind = "embedded",
                  streams: bool = False, fits_device: bool = True) -> StateSourceName:
    """Which source computes a target's hidden states, unless one is named: the reference where it can, else
    transformers; a server of the job's engine for a target that it computes with other numbers, because it is
    quantised, or that neither can hold.

    engine        of the job: `sglang` can start servers
    streams       whether training computes the states, which starts none
    fits_device   whether one device, on which the reference and transformers compute, can hold the target

    Raises UnsupportedTarget when the named source cannot.
    """
    if wanted == "sglang":
        return wanted
    alike, named = fits_device and quantisation_config(data) is None, data.get("architectures")
    is_captured = isinstance(named, list) and bool(named) and named[0] in SUPPORTED_BY_SGLANG
    if wanted == "auto" and engine == "sglang" and not streams and not alike and is_captured:
        return "sglang"
    read_quantisation(data)
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
    """Factor and bound of the logits (`eyrie_workers.targets.operators`), under the names that configs use."""
    scale = float(text.get("logit_scale") or 1.0) / float(text.get("logits_scaling") or 1.0)
    soft_cap = text.get("final_logit_softcapping")
    return scale, float(soft_cap) if soft_cap else None


def olmo3_ropes(scaling: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Rope parameters of Olmo 3's sliding and full layers: by layer type since transformers 5; before,
    `rope_scaling` was for the full layers alone."""
    return scaling.get(SLIDING) or {}, scaling.get(FULL) or (scaling if "factor" in scaling else {})


def _check_rope_type(scaling: Mapping[str, Any], known: Sequence[str]) -> None:
    kind = rope_type(scaling)
    if kind not in known:
        raise UnsupportedTarget(f"rope type {kind!r} is not supported", f"only {', '.join(known)} are computed")
    if kind != "yarn":
        return
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or factor <= 0:
        raise UnsupportedTarget(f"config.json: the factor of rope type 'yarn' is {factor!r}, not a positive number",
                                "correct config.json")
    if scaling.get("attention_factor") is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        raise UnsupportedTarget("rope type 'yarn' with mscale and mscale_all_dim is not supported",
                                "only the attention factor of the paper, or an explicit one, is computed")
    if not scaling.get("truncate", True):
        raise UnsupportedTarget("rope type 'yarn' without truncate is not supported",
                                "only ranges rounded outwards are computed")


def rotary_size(data: Mapping[str, Any]) -> int | None:
    """Elements of each head that are rotated, from its first; None: all. Raises UnsupportedTarget."""
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    factor = float(scaling.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0)) or 1.0)
    if factor == 1.0:
        return None
    if data.get("model_type") != "phi3":
        raise UnsupportedTarget("partial_rotary_factor is not 1", "only rotation of whole heads is computed")
    size = int(int(data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"]) * factor)
    if not 0 < factor < 1 or size < 2 or size % 2:
        raise UnsupportedTarget(f"partial_rotary_factor is {factor}, which rotates {size} elements of a head",
                                "only an even number of them, from 2 to the size of a head, is computed")
    return size


def unrotated_layers(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without rotary positions, counted from 0 (SmolLM3). Raises UnsupportedTarget."""
    if data.get("model_type") != "smollm3":
        return ()
    num_layers, rotated = int(data["num_hidden_layers"]), data.get("no_rope_layers")
    if rotated is None:
        interval = data.get("no_rope_layer_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise UnsupportedTarget(f"no_rope_layer_interval is {interval!r}, not a positive integer",
                                    "correct config.json")
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(rotated, list) or len(rotated) < num_layers:
        raise UnsupportedTarget(f"no_rope_layers is {rotated!r}, not a list of {num_layers} entries",
                                "correct config.json")
    # The name says the opposite of the values: 1 is a layer with rotary positions.
    return tuple(i for i, has_rope in enumerate(rotated[:num_layers]) if not has_rope)


def biases(data: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Whether q, k and v, the attention output, and the MLP of a supported model have biases."""
    family = data.get("model_type")
    attention = bool(data.get("attention_bias", False)) and family not in _WITHOUT_ATTENTION_BIAS
    return (attention or family == "qwen2", attention, bool(data.get("mlp_bias", False)) and family in _WITH_MLP_BIAS)


def has_tied_embeddings(data: Mapping[str, Any]) -> bool:
    """Whether the output matrix is the embedding. Configs may omit the default of their class."""
    return bool(data.get("tie_word_embeddings", data.get("model_type") in _TIED_BY_DEFAULT))


def rope_type(scaling: Mapping[str, Any]) -> Any:
    """Name of the scaling, under either key."""
    return scaling.get("rope_type") or scaling.get("type") or "default"


def layer_types(data: Mapping[str, Any]) -> tuple[tuple[str, ...], int | None]:
    """FULL or SLIDING per layer, and the window of the sliding ones in tokens. Raises UnsupportedTarget."""
    num_layers, family = int(data["num_hidden_layers"]), data.get("model_type")
    # Mistral's class has a window by default; a config without one gives null.
    window = data.get("sliding_window", 4096 if family == "mistral" else None)
    slides = bool(data.get("use_sliding_window", False))
    listed = data.get("layer_types")
    types = tuple(str(kind) for kind in listed) if listed else None
    if family in _ONE_TYPE_OF_LAYER:
        same = (FULL if window is None else SLIDING,) * num_layers
        if types is not None and types != same:
            raise UnsupportedTarget(f"layer_types is given, which the class of {family} ignores",
                                    "remove layer_types, or give the model_type of the class that reads it")
        types = same
    if types is None and family == "olmo3":
        types = tuple(SLIDING if (i + 1) % 4 else FULL for i in range(num_layers))
    if types is None and family == "smollm3":
        sliding = unrotated_layers(data) if slides and window else ()
        types = tuple(SLIDING if i in sliding else FULL for i in range(num_layers))
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


def end_token_ids(data: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end answers, of `generation_config.json` first."""
    ids: list[int] = []
    for source in (generation, data):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and token not in ids:
                ids.append(token)
    return tuple(ids)
