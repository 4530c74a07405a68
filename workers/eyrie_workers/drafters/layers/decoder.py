"""Decoder layers of a drafter's own: what `standalone` and `dflash` are made of.

The layer of Llama, with Qwen3's norms on the heads of q and k where the configuration has them. Configuration and names
are those of a target (`targets.config`, Hugging Face), so that such layers are served by the same forward pass as a
target's (`targets.model`); only learning needs gradients and therefore this second face, in the functions of
`training.fused`. Tests hold the two together.

    h = x + W_o attention(q, k, v),   [q k v] = W_qkv rms(x)        y = h + W_d (silu(g) * u),   [g u] = W_gu rms(h)

How keys are found is the family's affair: a whole text behind itself, or a block over the features of a text.

    T rows, H hidden, I intermediate, K kv heads, W query heads per kv head, E head size
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_workers.drafters.checkpoint.files import rope_json
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.training.fused import apply_rotary, mlp, normed_linear, rms_norm
from eyrie_workers.training.matmul import linear

_INITIAL_STD = 0.02


class Norm(nn.Module):
    """The weight of one RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _Attention(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(config.head_dim), Norm(config.head_dim)


class _Mlp(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class DecoderLayer(nn.Module):
    """The parameters of one layer, under the names engines load."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = Norm(config.hidden_size)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.mlp = _Mlp(config)

    def weights(self, dtype: torch.dtype) -> "LayerWeights":
        """Matrices joined where they share an input, in `dtype`; gradients flow to the parameters."""
        attention, mlp = self.self_attn, self.mlp
        return LayerWeights(
            config=self.config, input_layernorm=self.input_layernorm.weight,
            qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).to(dtype),
            head_norms=(attention.q_norm.weight, attention.k_norm.weight) if self.config.qk_norm else None,
            out=attention.o_proj.weight.to(dtype), post_attention_layernorm=self.post_attention_layernorm.weight,
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype),
            down=mlp.down_proj.weight.to(dtype))


@dataclass(frozen=True)
class LayerWeights:
    """One layer as learning uses it. Matrices in the compute dtype, norms as stored.

    qkv [q + 2k, H]   head_norms each [E]   out [H, q]   gate_up [2I, H]   down [H, I]
    """

    config: TargetConfig
    input_layernorm: Tensor
    qkv: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    out: Tensor
    post_attention_layernorm: Tensor
    gate_up: Tensor
    down: Tensor

    def heads(self, x_TH: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turned q [T, K, W, E] and k [T, K, E], and v [T, K, E], of a residual stream; angles [T, 2, E / 2]."""
        config = self.config
        qkv_TQ = normed_linear(x_TH, self.input_layernorm, self.qkv, config.rms_eps)
        q, kv = qkv_TQ.split([config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim], -1)
        q_TKWE = q.unflatten(-1, (config.num_kv_heads, -1, config.head_dim))
        if self.head_norms is not None:
            q_TKWE = self._normed(q_TKWE, self.head_norms[0])
        return apply_rotary(q_TKWE, angles), *self._keys(kv, angles)

    def keys(self, x_TH: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Turned k and v, each [T, K, E], of what is no residual stream and comes normed."""
        first = self.config.num_heads * self.config.head_dim
        return self._keys(linear(x_TH, self.qkv[first:]), angles)

    def _keys(self, kv_TQ: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        k_TKE, v_TKE = (part.unflatten(-1, (-1, self.config.head_dim)) for part in kv_TQ.chunk(2, -1))
        if self.head_norms is not None:
            k_TKE = self._normed(k_TKE, self.head_norms[1])
        return apply_rotary(k_TKE, angles), v_TKE

    def _normed(self, x: Tensor, norm: Tensor) -> Tensor:
        return rms_norm(x.float().reshape(-1, x.shape[-1]), norm, self.config.rms_eps).view(x.shape).to(x.dtype)

    def finish(self, x_TH: Tensor, attended_TQ: Tensor, recompute: bool) -> Tensor:
        """What follows attention: [T, H] residual stream and [T, q] -> [T, H]."""
        x_TH = x_TH + linear(attended_TQ, self.out)
        return mlp(x_TH, self.post_attention_layernorm, self.gate_up, self.down, self.config.rms_eps, recompute)


def causal(q_TKWE: Tensor, k_TKE: Tensor, v_TKE: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention of documents laid end to end, each token over its own document up to itself: [T, Q * E]."""
    per_kv, parts = q_TKWE.shape[2], []
    heads = (q_TKWE.flatten(1, 2), *(x.repeat_interleave(per_kv, 1) for x in (k_TKE, v_TKE)))
    for q, k, v in zip(*(x.split(list(lengths)) for x in heads), strict=True):
        mixed = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k.transpose(0, 1)[None],
                                               v.transpose(0, 1)[None], is_causal=True)
        parts.append(mixed[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)


def heads_for(spec: DrafterSpec, target: TargetConfig, default: int) -> tuple[int, int]:
    """Query heads, and key-value heads: as many queries for each as the target has, as far as the number allows."""
    num_heads = spec.num_attention_heads or default
    return num_heads, max(divisor for divisor in range(1, num_heads + 1) if num_heads % divisor == 0
                          and divisor <= max(1, num_heads * target.num_kv_heads // target.num_heads))


def refuse_eagle_fields(spec: DrafterSpec, family: str) -> None:
    """Raises InvalidInput for a variant of EAGLE that these layers do not have."""
    for name in ("fc_norm", "norm_before_fc", "norm_output", "sliding_window"):
        if getattr(spec, name):
            raise InvalidInput(f"drafter.{name} is {getattr(spec, name)}, which a {family} drafter does not have",
                               f"leave drafter.{name} out, or use an eagle family")


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Every matrix normal(0, 0.02), every norm one."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(module.named_parameters()):
        if parameter.dim() == 2:
            parameter.normal_(0.0, _INITIAL_STD, generator=generator)
        else:
            parameter.fill_(1.0)


def layer_flops(config: TargetConfig, num_rows: int, seen: int) -> int:
    """Operations of one layer, forward and backward: rows computed, and keys seen by all of them together."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    per_row = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    return 6 * (num_rows * per_row + 2 * seen * q)


def decoder_json(config: TargetConfig, architecture: str, dtype: str) -> dict[str, Any]:
    """The `config.json` of these layers, as `targets.config.parse_config` and Hugging Face read it."""
    eos: Sequence[int] = config.eos_token_ids
    written: dict[str, Any] = {
        "architectures": [architecture], "model_type": config.family, "hidden_act": "silu",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_eps, "rope_theta": config.rope.theta, "rope_parameters": rope_json(config.rope),
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "torch_dtype": dtype, "dtype": dtype}
    if config.rope.kind != "default":
        written["rope_scaling"] = rope_json(config.rope)
    return written
