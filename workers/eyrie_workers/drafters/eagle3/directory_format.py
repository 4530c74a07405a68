"""The tensors and config keys of an EAGLE-3 directory, as SGLang's `LlamaForCausalLMEagle3` loads it. Pure.

Read in SGLang 0.5.23 (`srt/models/llama_eagle3.py`) and vLLM 0.33 (`model_executor/models/llama_eagle3.py`), which
accepts the same architecture and the same tensors. Where the two differ, one directory satisfies both:

    layers beyond the first   SGLang norms their input with `hidden_norm`, vLLM with `input_layernorm`: equal copies
    d2t, t2d                  left out when the draft vocabulary is the target's: vLLM then refuses them
    layer ids                 one key for each engine (`eyrie_api.decisions.sglang_support`)
    sliding window            `sliding_window` and `layer_types` for vLLM; a launch flag for SGLang, one smaller

A window of w includes the current position; SGLang's `--speculative-draft-window-size` counts the positions before it:
w - 1. How exactly the window is applied depends on the draft attention backend (read in the wheel; intel_amx also run).
fa3 with chains and intel_amx apply it at every step. fa3 with trees counts it from the last settled token instead of
from the node: at depth d, d - 1 keys too many are visible. triton masks one key too many from the second step on.
flashinfer applies it at the first step only, which differs from training.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyrie_api.v1alpha1.families import FAMILIES

ARCHITECTURE = FAMILIES["eagle3"].architecture
ENGINES = {"sglang": "0.5.23", "vllm": "0.32.0"}
"""The versions that tests serve drafters with."""

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Config key of the aux layer ids; nested in `eagle_config` for SGLang, at the top level for vLLM."""

MAPS = ("d2t", "t2d")
"""Tensors that are not parameters."""

_OLD_NAMES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


@dataclass(frozen=True)
class Shape:
    """The sizes and flags of a config.json that determine the tensors."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    fc_norm: bool
    norm_before_fc: bool
    fc_bias: bool


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`eagle_config`; empty when it is missing or not an object."""
    inner = config.get("eagle_config")
    return inner if isinstance(inner, Mapping) else {}


def num_aux(config: Mapping[str, Any]) -> int:
    """Number of aux layers as SGLang reads it: the count, else the length of the nested ids, else 3."""
    count = config.get("num_aux_hidden_states")
    if isinstance(count, int):
        return count
    return len(nested(config).get(LAYER_IDS) or ()) or 3


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape of a config. Its keys must be present (`config_rules.key_rules` checks that)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    draft_vocab = config.get("draft_vocab_size")
    return Shape(
        hidden_size=hidden, target_hidden_size=config.get("target_hidden_size") or hidden,
        intermediate_size=config["intermediate_size"], num_layers=config["num_hidden_layers"], num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads, head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["vocab_size"] if draft_vocab is None else draft_vocab, num_aux=num_aux(config),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
        norm_before_fc=bool(nested(config).get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_bias=bool(config.get("bias", False)))


def canonical_name(name: str) -> str:
    """The name Eyrie writes for a tensor, from any spelling SGLang accepts."""
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.")
    for old, new in _OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def expected_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a checkpoint."""
    hidden, draft = shape.hidden_size, shape.draft_vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, shape.num_aux * shape.target_hidden_size), "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden)}
    for number in range(shape.num_layers):
        prefix = "midlayer." if number == 0 else f"layers.{number}."
        shapes |= {prefix + name: size for name, size in _layer_shapes(shape, 2 * hidden if number == 0 else hidden)}
    if draft != shape.vocab_size:
        shapes |= {"d2t": (draft,), "t2d": (shape.vocab_size,)}
    if shape.norm_before_fc:
        shapes["input_norm.weight"] = (shape.num_aux * shape.target_hidden_size,)
    if shape.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (shape.target_hidden_size,) for index in range(shape.num_aux)}
    if shape.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if shape.target_hidden_size != hidden:
        shapes["embed_tokens.weight"] = (shape.vocab_size, hidden)
    return shapes


def _layer_shapes(shape: Shape, width: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return (
        ("input_layernorm.weight", (hidden,)), ("hidden_norm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
        ("self_attn.q_proj.weight", (q, width)), ("self_attn.k_proj.weight", (kv, width)),
        ("self_attn.v_proj.weight", (kv, width)), ("self_attn.o_proj.weight", (hidden, q)),
        ("mlp.gate_proj.weight", (inner, hidden)), ("mlp.up_proj.weight", (inner, hidden)),
        ("mlp.down_proj.weight", (hidden, inner)))
