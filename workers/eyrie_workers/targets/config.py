"""The fields of a Hugging Face `config.json` that the forward pass needs, and the aux layers that drafters read.

The families share one block (attention with rotary positions, gated MLP) and differ in details that are data, not
code: Llama (rope scaling of Llama 3), Mistral (a window), Qwen2 (bias on q, k, v), Qwen3 (RMS norm on each head of q
and k), Olmo 2 and 3 (norms after attention and MLP instead of before them, and over all heads of q and of k together;
in Olmo 3 three layers of four have sliding-window attention, and only the rope of the fourth is scaled), Phi-3 (q, k,
v and gate, up stored as one tensor each; rotation of a part of each head), SmolLM3 (layers without rope), Granite
(multipliers). A config that the forward pass would compute wrongly is refused before weights are read
(`eyrie_api.planning.target_config`).

Both spellings of rope are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).

Aux layers. EAGLE-3 (arXiv:2503.01840, section 3.1) fuses a low, a middle and a high layer. Indices are Hugging Face
`hidden_states` indices: 0 is the embedding, i + 1 the output of layer i, num_layers the state after the final norm. The
default (2, num_layers // 2, num_layers - 3) is what SGLang captures for a target without a list of its own. On hybrid
targets most layers see only a window or a recurrent state, and their outputs hold little about distant context: there
each choice moves to the nearest full-attention layer's output. The last layer is left out: serving engines capture the
input of the next layer, and the last layer has none.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyrie_api.contract.reports import LayerChoice
from eyrie_api.errors import InvalidInput, TargetNotFound, UnsupportedTarget, reading
from eyrie_api.planning.target_config import (
    DEFAULT_ROPE_THETA,
    FULL,
    UNSCALED_OR_LINEAR,
    biases,
    check_config,
    check_drafter_config,
    check_sizes,
    computed_by_reference,
    end_token_ids,
    has_tied_embeddings,
    language_model,
    layer_types,
    logit_transform,
    olmo3_ropes,
    rope_type,
    rotary_size,
    unrotated_layers,
)

_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and the three supported scalings."""

    theta: float = DEFAULT_ROPE_THETA
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """yarn: frequencies with more than `beta_fast` turns within the original context are kept, those with fewer than
    `beta_slow` are scaled."""

    attention_factor: float = 1.0
    """yarn: factor on rotated queries and keys (arXiv:2309.00071, section 3.4)."""

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """head_dim / 2 angles per position. llama3, yarn: low frequencies are scaled, high ones kept, those in
        between interpolated, by frequency and by index."""
        plain = [self.theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.kind == "yarn":
            # The indices between which frequencies are interpolated, rounded outwards.
            first, last = (head_dim * math.log(self.original_max_position / (turns * 2 * math.pi))
                           / (2 * math.log(self.theta)) for turns in (self.beta_fast, self.beta_slow))
            low, high = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
            width = high - low or 0.001
            shares = [min(max((i - low) / width, 0.0), 1.0) for i in range(head_dim // 2)]
            return [f * (share / self.factor + 1.0 - share) for f, share in zip(plain, shares, strict=True)]
        return [self._scaled(frequency) for frequency in plain]

    def _scaled(self, frequency: float) -> float:
        waves = self.original_max_position * frequency / (2 * math.pi)  # full turns within the original context
        if waves < self.low_freq_factor:
            return frequency / self.factor
        if waves > self.high_freq_factor:
            return frequency
        smooth = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True)
class TargetConfig:
    """Shape and details of one target. Sizes are counts of numbers, heads or tokens.

    Norms, biases and windows describe the reference forward pass alone: `describe_config` leaves them out for
    architectures that it does not compute.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: RopeConfig
    """Rope of every layer except those of `full_rope`. A drafter uses this one (`drafter_rope`)."""

    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    """RMS norm on each head of q and k."""

    attention_bias: bool
    """Bias on q, k and v."""

    output_bias: bool
    """Bias on the attention output."""

    mlp_bias: bool
    layer_types: tuple[str, ...]
    """`full_attention`, `sliding_attention` or, outside the reference, another name per layer."""

    sliding_window: int | None
    """Tokens a sliding layer sees, itself included; None when no layer slides."""

    eos_token_ids: tuple[int, ...]
    post_norm: bool = False
    """Norms after attention and MLP instead of before them, and one over all heads of q, one over all of k."""

    full_rope: RopeConfig | None = None
    """Rope of the full-attention layers, where it differs."""

    logit_scale: float = 1.0
    """Factor on the products of final states and output matrix (`targets.operators`)."""

    logit_soft_cap: float | None = None
    """Bound of the logits; None: none."""

    rotary_size: int | None = None
    """Elements of each head that are rotated, from its first; None: all."""

    unrotated_layers: tuple[int, ...] = ()
    """Layers without rotary positions, counted from 0."""

    fused_projections: bool = False
    """q, k, v are stored as one tensor, and gate, up as another."""

    attention_scale: float | None = None
    """Factor on the products of queries and keys; None: 1 / sqrt(head_dim)."""

    embedding_scale: float = 1.0
    """Factor on the embeddings that the first layer reads; those that drafters read are not scaled."""

    residual_scale: float = 1.0
    """Factor on the outputs of attention and MLP before they are added."""

    @property
    def drafter_rope(self) -> RopeConfig:
        """Rope of a drafter's layers: the target's. Instead of YaRN's the unscaled one: engines spell its attention
        factor differently, and a drafter's rope need only be the same in training and serving."""
        return self.rope if self.rope.kind in UNSCALED_OR_LINEAR else RopeConfig(theta=self.rope.theta)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model directory. Raises TargetNotFound or UnsupportedTarget."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise TargetNotFound(f"{path} does not exist", "give a Hugging Face model directory") from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, thousands of digits, deep nesting
        raise UnsupportedTarget(f"{path} is not JSON: {error}", "save the model again") from None
    if not isinstance(value, dict):
        raise UnsupportedTarget(f"{path} holds {type(value).__name__}, not an object", "save the model again")
    return value


def read_config(directory: Path) -> TargetConfig:
    """The config of the model in `directory`, of any architecture; `generation_config.json` adds end tokens when it is
    there. Raises UnsupportedTarget when a size is missing."""
    with reading(directory):
        return describe_config(*read_config_files(directory))


def read_config_files(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and `generation_config.json` of a directory, the second empty where there is none."""
    generation = directory / "generation_config.json"
    return read_json(directory / "config.json"), read_json(generation) if generation.exists() else {}


def describe_config(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> TargetConfig:
    """Reduce a `config.json` object to what capture and drafters need, whoever computes the target.

    A drafter takes shapes and rope from it. Where the target's attention has no heads of queries and keys (MLA), or a
    rope that drafters do not have, the drafter gets heads that fill the hidden size, or an unscaled rope: it need not
    have the target's, only the same in training and serving.
    """
    if computed_by_reference(data):
        return parse_config(data, generation)
    text = language_model(data)
    check_sizes(text)
    hidden, num_heads, num_layers = (
        int(text[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim, num_kv_heads = int(text.get("head_dim") or hidden // num_heads), text.get("num_key_value_heads")
    if text.get("kv_lora_rank"):
        head_dim = next(size for size in (128, 64, 32, hidden) if hidden % size == 0)
        num_heads = num_kv_heads = hidden // head_dim
    scale, soft_cap = logit_transform(text)
    types = text.get("layer_types")
    # The rope of full-attention layers, unscaled where its scaling is not one of `RopeConfig`.
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    scaling = scaling.get(FULL) or scaling
    rope = _rope(text, scaling) if rope_type(scaling) in UNSCALED_OR_LINEAR else RopeConfig(
        theta=float(scaling.get("rope_theta") or text.get("rope_theta") or RopeConfig.theta))
    return TargetConfig(
        family=str(text.get("model_type", "")), hidden_size=hidden, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=int(num_kv_heads or num_heads), head_dim=head_dim,
        intermediate_size=int(text.get("intermediate_size") or 4 * hidden), vocab_size=int(text["vocab_size"]),
        rms_eps=float(next((text[name] for name in _EPSILONS if text.get(name)), 1e-6)), rope=rope,
        max_position_embeddings=int(text.get("max_position_embeddings") or 2048),
        tie_word_embeddings=has_tied_embeddings(text), qk_norm=False, attention_bias=False,
        output_bias=False, mlp_bias=False,
        layer_types=tuple(map(str, types)) if isinstance(types, list) and len(types) == num_layers
        else (FULL,) * num_layers,
        sliding_window=None, eos_token_ids=end_token_ids(text, generation or {}), logit_scale=scale,
        logit_soft_cap=soft_cap)


def parse_config(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> TargetConfig:
    """Reduce a `config.json` object. Raises UnsupportedTarget, naming the field, for what cannot be computed."""
    check_config(data)
    family = str(data["model_type"])
    hidden, num_heads = int(data["hidden_size"]), int(data["num_attention_heads"])
    types, window = layer_types(data)
    attention_bias, output_bias, mlp_bias = biases(data)
    rope, full_rope = _ropes(data)
    scales: Mapping[str, Any] = data if family == "granite" else {}
    return TargetConfig(
        family=family, hidden_size=hidden, num_layers=len(types), num_heads=num_heads,
        num_kv_heads=int(data.get("num_key_value_heads") or num_heads),
        head_dim=int(data.get("head_dim") or hidden // num_heads),
        intermediate_size=int(data["intermediate_size"]), vocab_size=int(data["vocab_size"]),
        rms_eps=float(data.get("rms_norm_eps", 1e-6)), rope=rope,
        max_position_embeddings=int(data.get("max_position_embeddings", 2048)),
        tie_word_embeddings=has_tied_embeddings(data), qk_norm=family == "qwen3", attention_bias=attention_bias,
        output_bias=output_bias, mlp_bias=mlp_bias, layer_types=types, sliding_window=window,
        eos_token_ids=end_token_ids(data, generation or {}), post_norm=family in ("olmo2", "olmo3"),
        full_rope=full_rope, rotary_size=rotary_size(data), unrotated_layers=unrotated_layers(data),
        fused_projections=family == "phi3",
        attention_scale=float(scales.get("attention_multiplier", 1.0)) if scales else None,
        embedding_scale=float(scales.get("embedding_multiplier", 1.0)),
        residual_scale=float(scales.get("residual_multiplier", 1.0)), logit_scale=logit_transform(scales)[0],
    )


def parse_drafter_config(data: Mapping[str, Any]) -> TargetConfig:
    """`parse_config` for the layers of a drafter. Raises UnsupportedTarget also for a rope that drafters lack here."""
    check_drafter_config(data)
    return parse_config(data)


def _ropes(data: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of all layers, and that of the full-attention layers where they differ (Olmo 3)."""
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    family = data.get("model_type")
    if family != "olmo3":
        return _rope(data, scaling, theta=2_000_000.0 if family == "smollm3" else 10_000.0), None
    sliding, full = olmo3_ropes(scaling)
    rope = _rope(data, sliding if "rope_theta" in sliding else {"rope_theta": full.get("rope_theta")} | dict(sliding),
                 theta=500_000.0)
    full_rope = _rope(data, full, theta=rope.theta)
    return rope, full_rope if full_rope != rope else None


def _rope(data: Mapping[str, Any], scaling: Mapping[str, Any], theta: float = 10_000.0) -> RopeConfig:
    kind = rope_type(scaling)
    factor = float(scaling.get("factor", 1.0))
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if kind == "yarn" and factor > 1.0 else 1.0
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or data.get("rope_theta") or theta), kind=kind,
        factor=factor, low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=int(scaling.get("original_max_position_embeddings") or (
            data.get("max_position_embeddings", 8192) if kind in ("llama3", "yarn") else 8192)),
        beta_fast=float(scaling.get("beta_fast") or 32.0), beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=float(attention_factor) if kind == "yarn" else 1.0,
    )


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle, high for a target of this depth; fewer when it has fewer than four layers. The last layer's output
    is left out, as for hybrids, so of two layers the embeddings are the other state."""
    if num_layers < 4:
        return tuple(range(num_layers))[-2:]
    wanted = sorted((2, num_layers // 2, num_layers - 3))
    lowest = 1
    chosen: list[int] = []
    for index, value in enumerate(wanted):
        highest = num_layers - len(wanted) + index  # the layers after this one need higher indices
        chosen.append(min(max(value, lowest), highest))
        lowest = chosen[-1] + 1
    return tuple(chosen)


def choose_aux_layers(num_layers: int, layer_types: Sequence[str] | None = None,
                      override: Sequence[int] | None = None) -> LayerChoice:
    """Choose aux layers for a target of `num_layers` whose attention types are `layer_types` (None: all full). Raises
    InvalidInput when an override is empty, out of 0..num_layers, repeated or not ascending."""
    if override is not None:
        hint = f"give distinct ascending indices between 0 (embeddings) and {num_layers} (after the final norm)"
        if not override:
            raise InvalidInput("capture.aux_layers is empty", hint)
        outside = [index for index in override if not 0 <= index <= num_layers]
        if outside:
            raise InvalidInput(f"capture.aux_layers {outside} are outside the target's {num_layers} layers", hint)
        if list(override) != sorted(set(override)):
            raise InvalidInput(f"capture.aux_layers {list(override)} are not distinct and ascending", hint)
        return LayerChoice(aux_layers=tuple(override), reason="given by the spec")
    default = default_aux_layers(num_layers)
    if layer_types is None or all(kind == FULL for kind in layer_types):
        return LayerChoice(aux_layers=default,
                           reason=f"low, middle and high of {num_layers} layers, all with full attention")
    outputs = [i + 1 for i, kind in enumerate(layer_types) if kind == FULL and i + 1 < num_layers]
    if len(outputs) < 2:  # with a single state SGLang would skip the drafter's fc
        return LayerChoice(aux_layers=default, reason=f"low, middle and high of {num_layers} layers; before the last, "
                                                      f"{len(outputs)} has full attention")
    # For each default the nearest output not yet taken, the lower on a tie.
    free, taken = list(outputs), []
    for index in default[:len(outputs)]:
        taken.append(min(free, key=lambda candidate: (abs(candidate - index), candidate)))
        free.remove(taken[-1])
    moved = tuple(sorted(taken))
    kinds = ", ".join(sorted(set(layer_types) - {FULL}))
    return LayerChoice(aux_layers=moved, reason=(
        f"hybrid target ({layer_types.count(FULL)} of {num_layers} layers have full attention, the others {kinds}): "
        f"{list(default)} moved to the outputs of full-attention layers {list(moved)}"))


