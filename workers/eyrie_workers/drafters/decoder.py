"""Decoder layers with a config of their own: what `standalone` and `dflash` consist of, and the parts of the others.

The layer of Llama, with Qwen3's norms on the heads of q and k where the config has them. Config and parameter names are
those of a target (`targets.config`, Hugging Face), so decoding runs such layers through the target's forward pass
(`targets.model`). Training needs gradients and uses the functions below, on `training.numerics`; tests compare the two.

    h = x + W_o attention(q, k, v),   [q k v] = W_qkv rms(x)        y = h + W_d (silu(g) * u),   [g u] = W_gu rms(h)

The family chooses the keys: the text before a token, or a block together with the features of a text.

    T rows, H hidden, I intermediate, K kv heads, W query heads per kv head, E head size
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.families import FAMILIES, VARIANT_FIELDS
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.target_config import FULL
from eyrie_workers.drafters import checkpoint
from eyrie_workers.drafters.card import Card
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.training.numerics import PostAttention, apply_rotary, linear, normed_linear, rms_norm

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class AttentionProjections(nn.Module):
    """Projections to q, k, v from inputs of `input_size`, and from the attended values to the residual stream."""

    def __init__(self, input_size: int, hidden_size: int, query_size: int, key_size: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=False)


class GatedMlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)


class _Attention(AttentionProjections):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__(config.hidden_size, config.hidden_size, config.num_heads * config.head_dim,
                         config.num_kv_heads * config.head_dim)
        if config.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(config.head_dim), nn.RMSNorm(config.head_dim)


class DecoderLayer(nn.Module):
    """The parameters of one layer, under the names engines load. Its modules are never called."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)

    def weights(self, dtype: torch.dtype) -> "LayerWeights":
        """Matrices joined where they share an input, in `dtype`; gradients flow to the parameters."""
        attention = self.self_attn
        return LayerWeights(
            config=self.config, input_layernorm=self.input_layernorm.weight,
            qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).to(dtype),
            head_norms=(attention.q_norm.weight, attention.k_norm.weight) if self.config.qk_norm else None,
            post_attention=self.post_attention(dtype))

    def post_attention(self, dtype: torch.dtype) -> PostAttention:
        return PostAttention(
            out=self.self_attn.o_proj.weight.to(dtype), norm=self.post_attention_layernorm.weight,
            gate_up=torch.cat([self.mlp.gate_proj.weight, self.mlp.up_proj.weight]).to(dtype),
            down=self.mlp.down_proj.weight.to(dtype), rms_eps=self.config.rms_eps)


@dataclass(frozen=True)
class LayerWeights:
    """One layer in training. Matrices in the compute dtype, norms as stored.

    qkv [q + 2k, H]   head_norms each [E]
    """

    config: TargetConfig
    input_layernorm: Tensor
    qkv: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    post_attention: PostAttention

    def heads(self, x_TH: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [T, K, W, E] and k [T, K, E], and v [T, K, E], of a residual stream; angles [T, 2, E / 2]."""
        return self.split(normed_linear(x_TH, self.input_layernorm, self.qkv, self.config.rms_eps), angles)

    def split(self, qkv_TQ: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the joint product [T, q + 2k]."""
        config = self.config
        q, kv = qkv_TQ.split([config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim], -1)
        q_TKWE = q.unflatten(-1, (config.num_kv_heads, -1, config.head_dim))
        if self.head_norms is not None:
            q_TKWE = self._normed(q_TKWE, self.head_norms[0])
        return apply_rotary(q_TKWE, angles), *self._keys(kv, angles)

    def keys(self, x_TH: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated k and v, each [T, K, E], of normalised features outside the residual stream."""
        first = self.config.num_heads * self.config.head_dim  # rows of k and v come after those of q
        return self._keys(linear(x_TH, self.qkv[first:]), angles)

    def _keys(self, kv_TQ: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        k_TKE, v_TKE = (part.unflatten(-1, (-1, self.config.head_dim)) for part in kv_TQ.chunk(2, -1))
        if self.head_norms is not None:
            k_TKE = self._normed(k_TKE, self.head_norms[1])
        return apply_rotary(k_TKE, angles), v_TKE

    def _normed(self, x: Tensor, norm: Tensor) -> Tensor:
        # Head norms run in float32 in every compute dtype, as in the target's forward pass.
        return rms_norm(x.float().reshape(-1, x.shape[-1]), norm, self.config.rms_eps).view(x.shape).to(x.dtype)


def head_counts(spec: DrafterSpec, target: TargetConfig, default: int) -> tuple[int, int]:
    """Query heads and key-value heads: the target's ratio of the two, as far as the number of query heads allows."""
    num_heads = spec.num_attention_heads or default
    return num_heads, max(divisor for divisor in range(1, num_heads + 1) if num_heads % divisor == 0
                          and divisor <= max(1, num_heads * target.num_kv_heads // target.num_heads))


def decoder_config(spec: DrafterSpec, target: TargetConfig, family: str, num_layers: int,
                   default_num_heads: int | None = None, **changes: Any) -> TargetConfig:
    """Config of a drafter's own layers: full attention without biases, sizes from the spec or the target.

    family             `model_type` of the layers: llama or qwen3
    default_num_heads  query heads where the spec gives none; None: the target's number
    changes            further fields of `TargetConfig`

    Raises InvalidInput for a variant field of `spec` that its family does not have.
    """
    for name in VARIANT_FIELDS:
        if getattr(spec, name) and name not in FAMILIES[spec.family].variant_fields:
            owners = ", ".join(row.name for row in FAMILIES.values() if name in row.variant_fields)
            raise InvalidInput(f"drafter.{name} is {getattr(spec, name)}, which a {spec.family} drafter does not have",
                               f"leave drafter.{name} out, or train {owners}")
    num_heads, num_kv_heads = head_counts(spec, target, default_num_heads or target.num_heads)
    own = replace(
        target, family=family, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
        intermediate_size=spec.intermediate_size or target.intermediate_size, tie_word_embeddings=False, qk_norm=False,
        attention_bias=False, output_bias=False, mlp_bias=False, layer_types=(FULL,) * num_layers, sliding_window=None,
        post_norm=False, rope=target.drafter_rope, full_rope=None, logit_scale=1.0, logit_soft_cap=None,
        rotary_size=None, unrotated_layers=(), fused_projections=False, attention_scale=None, embedding_scale=1.0,
        residual_scale=1.0,
        max_position_embeddings=spec.max_position_embeddings or target.max_position_embeddings)
    return replace(own, **changes)


def layer_flops(config: TargetConfig, num_rows: int, num_visible: int) -> int:
    """Floating-point operations of one layer, forward and backward.

    num_visible  visible keys, summed over all rows
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    per_row = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)  # q and o, k and v, the MLP
    return 6 * (num_rows * per_row + 2 * num_visible * q)  # 2 per multiply-add; backward is twice forward


def decoder_json(config: TargetConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """The `config.json` of these layers, as `targets.config.parse_drafter_config` and Hugging Face read it."""
    eos: Sequence[int] = config.eos_token_ids
    rope = checkpoint.rope_json(config.rope)
    written: dict[str, Any] = {
        "architectures": [architecture], "model_type": config.family, "hidden_act": "silu",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_eps, "rope_theta": config.rope.theta, "rope_parameters": rope,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "torch_dtype": dtype, "dtype": dtype}
    if config.rope.kind != "default":
        written["rope_scaling"] = rope
    return written


def save_layers(family: str, directory: Path, drafter: Any, dtype: str = "float32", card: Card | None = None,
                prefix: str = "", more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Export a drafter whose `config` is that of its layers.

    prefix   of the names of its tensors in the file
    more     members of config.json
    """
    written = decoder_json(drafter.config, FAMILIES[family].architecture, dtype) | dict(more)
    tensors = {prefix + name: tensor for name, tensor in drafter.state_dict().items()}
    checkpoint.write_checkpoint(directory, written, checkpoint.as_stored(tensors, dtype), card)


def load_layers(made_of: Callable[[TargetConfig], ModuleT], family: str, directory: Path,
                target: TargetConfig | None = None, prefix: str = "") -> ModuleT:
    """Read and check what `save_layers` wrote, for this target if one is given. Raises as `read_checkpoint`."""
    _, config, tensors = checkpoint.read_checkpoint(directory, family, target)
    with torch.device("meta"):
        drafter = made_of(config)
    drafter.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, assign=True)
    return drafter
