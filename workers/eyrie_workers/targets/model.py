"""The target's forward pass in plain PyTorch: one code path for capture, prefill and verification.

These differ only in how attention finds its keys, so attention is a parameter: `run` iterates over the layers and
passes rotated queries, keys and values to an `Attend`. Capture uses `causal_attention` over whole texts, end to end;
the decode engine passes attention over a cache and a draft tree.

Optimised for few tokens, where launching operations costs more than arithmetic:

- q, k, v and gate, up are one product each; the norm's weight is folded into the product that follows (float32 only:
  in bfloat16 the folded weight would be rounded once more);
- rows of q and k are reordered so that the two halves of a rotary pair are adjacent, and the rotation is one complex
  multiplication; q.k does not change, because both are permuted alike;
- residual additions are fused into the products (`operators.Linear.add`).

Olmo normalises after attention and MLP, so nothing can be folded or fused there; its rope may differ by layer type.

Elements of a head that are not rotated are multiplied by 1, and a scale of the attention scores is a factor of the
rotations of queries and keys, so that no family has an operation of its own in attention.

Logits and every hidden state equal Hugging Face's for each of `target_config.FAMILIES` (tests/workers/targets).
"""

# M tokens of all texts, T tokens of one, H hidden, V vocabulary, A aux layers, Q query heads, G key-value heads,
# E head dimension

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_api.planning.target_config import FULL
from eyrie_workers.targets.causal_attention import CausalAttention
from eyrie_workers.targets.config import RopeConfig, TargetConfig
from eyrie_workers.targets.operators import Linear, OutputHead, rms_normalise


class Attend(Protocol):
    """Attention of one layer over the keys of its implementation."""

    dtype: torch.dtype
    """Type in which q, k and v are rotated and passed."""

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """heads [M, Q + 2G, E] (queries and keys rotated, then values) -> [M, Q * E] in the model's dtype."""
        ...


class Around(Protocol):
    """What a drafter computes around attention and MLP of its layers (`drafters.dflash2`)."""

    def before(self, layer: int, sublayer: str, x_MH: Tensor) -> tuple[Tensor, Tensor]:
        """From the normed input of `attention` or `mlp`: what enters it, and what `after` needs."""
        ...

    def after(self, x_MH: Tensor, kept: Tensor) -> Tensor:
        """From its output, what is added to the residual stream."""
        ...


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor | None
    """None when folded into `qkv`, or when the norm follows attention (`attention_norm`)."""
    qkv: Linear
    head_norm: Tensor | None
    """[Q + G, E]: the weights of q_norm and k_norm, repeated per head where they are for one head."""
    output: Linear
    attention_norm: Tensor | None
    """[H]: norm of the attention output; None for norms before attention."""
    mlp_norm: Tensor | None
    """Norm before the MLP, or after it (Olmo); None when folded into `gate_up`."""
    gate_up: Linear
    down: Linear


class TargetModel:
    """A frozen target of one of `target_config.FAMILIES`. Immutable: state is in the caller's cache."""

    def __init__(self, config: TargetConfig, weights: Mapping[str, Tensor], path: Path | None = None, *,
                 head: bool = True, around: Around | None = None) -> None:
        """`weights` by their Hugging Face names, all of one dtype and device.

        Each is requested once and dropped when its layer is built: a mapping that reads on request
        (`loading.CheckpointTensors`) never holds more than one layer's tensors in addition to the finished ones.

        head    whether `logits` will be called, which needs a packed copy of the output matrix
        around  of a drafter; its norms come before attention and MLP
        """
        self.config = config
        self.path = path
        self.embed_weight = weights["model.embed_tokens.weight"]
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        self.lm_head_weight = self.embed_weight if tied else weights["lm_head.weight"]
        self.dtype = self.embed_weight.dtype
        self.device = self.embed_weight.device
        self._final_norm = weights["model.norm.weight"]
        self._head = Linear(self.lm_head_weight if head else self.lm_head_weight[:1])
        self._eps = torch.tensor(config.rms_eps, dtype=self.dtype, device=self.device)
        self._around = around
        self._layers = [_layer(config, weights, i, folds=around is None) for i in range(config.num_layers)]
        ropes = [None if index in config.unrotated_layers else
                 config.full_rope if config.full_rope is not None and config.layer_types[index] == FULL else config.rope
                 for index in range(config.num_layers)]
        distinct = tuple(dict.fromkeys(ropes))
        self._rope_of_layer = [distinct.index(rope) for rope in ropes]
        self._ropes = [_lengths_and_frequencies(config, rope).to(self.device) for rope in distinct]

    def _rotations(self, positions: Tensor, rope: Tensor, dtype: torch.dtype) -> Tensor:
        """length * exp(i * position * frequency): [M] -> [M, 1, E / 2] complex, for float32 or float64 heads."""
        lengths, frequencies = rope
        angles = positions.to(torch.float64)[:, None, None] * frequencies
        rotation = torch.polar(lengths.expand_as(angles), angles)
        return rotation if dtype == torch.float64 else rotation.to(torch.complex64)

    @torch.inference_mode()
    def run(self, token_ids: Tensor, positions: Tensor, attend: Attend,
            aux_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """One forward pass over the tokens of all texts, end to end.

        token_ids, positions  [M] int64
        aux_layers            `hidden_states` indices to return
        returns  aux [M, A, H] and last [M, H], the state after the final norm
        """
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        num_tokens = token_ids.shape[0]
        # bfloat16 has no complex numbers: such heads are rotated in float32, as Hugging Face does.
        wide = torch.float64 if attend.dtype == torch.float64 else torch.float32
        rotations = [self._rotations(positions, rope, wide) for rope in self._ropes]
        head_eps = self._eps.to(wide)
        x = F.embedding(token_ids, self.embed_weight)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        kept = {0: x} if 0 in aux_layers else {}
        for index, layer in enumerate(self._layers):
            normed = x if config.post_norm else self._norm(x, layer.input_norm)
            if self._around is not None:
                normed, kept_input = self._around.before(index, "attention", normed)
            heads = layer.qkv(normed).to(wide)
            heads = heads.view(num_tokens, -1, config.head_dim)
            rotated = heads[:, :num_rotated]
            # Qwen3 normalises each head; Olmo all heads of q together and all of k together.
            if layer.head_norm is not None and layer.attention_norm is None:
                rotated.copy_(rms_normalise(rotated, head_eps) * layer.head_norm)
            elif layer.head_norm is not None:
                for group in rotated.split([config.num_heads, config.num_kv_heads], dim=1):
                    group.copy_(rms_normalise(group.flatten(1), head_eps).view_as(group))
                rotated.mul_(layer.head_norm)
            # Rotary embedding: adjacent pairs as complex numbers, multiplied in place; values are not rotated.
            torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(rotations[self._rope_of_layer[index]])
            attended = attend(index, heads.to(attend.dtype))
            if self._around is not None:
                x = x + self._around.after(layer.output(attended), kept_input)
                normed, kept_input = self._around.before(index, "mlp", self._norm(x, layer.mlp_norm))
                gate, up = layer.gate_up(normed).chunk(2, dim=-1)
                x = x + self._around.after(layer.down(F.silu(gate).mul_(up)), kept_input)
            elif layer.attention_norm is None:
                x = self._add(x, layer.output, attended)
                gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
                x = self._add(x, layer.down, F.silu(gate).mul_(up))
            else:
                x = x + self._norm(layer.output(attended), layer.attention_norm)
                gate, up = layer.gate_up(x).chunk(2, dim=-1)
                x = x + self._norm(layer.down(F.silu(gate).mul_(up)), layer.mlp_norm)
            if index + 1 in aux_layers:
                kept[index + 1] = x
        last = F.rms_norm(x, (config.hidden_size,), self._final_norm, config.rms_eps)
        kept[config.num_layers] = last
        if not aux_layers:
            return x.new_empty(num_tokens, 0, x.shape[1]), last
        return torch.stack([kept[i] for i in aux_layers], dim=1), last

    def hidden_states(self, token_ids_list: Sequence[Tensor], aux_layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Teacher-forced states of whole texts, unpadded.

        token_ids_list  of [T_i] int64
        returns         per text: aux [T_i, A, H] and last [T_i, H]; `logits(last)[t]` predicts token t + 1
        """
        if not token_ids_list:
            return []
        aux, last = self.packed_states(token_ids_list, aux_layers)
        lengths = [len(tokens) for tokens in token_ids_list]
        return list(zip(aux.split(lengths), last.split(lengths), strict=True))

    def packed_states(self, token_ids_list: Sequence[Tensor], aux_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`hidden_states` of the texts end to end: aux [M, A, H] and last [M, H]."""
        lengths = [len(tokens) for tokens in token_ids_list]
        # Composed on the host: one copy to the device each instead of one per text.
        positions = torch.cat([torch.arange(length, device="cpu") for length in lengths])
        tokens = torch.cat([tokens.to(torch.int64) for tokens in token_ids_list])
        positions, tokens = (x.to(self.device, non_blocking=True) for x in (positions, tokens))
        return self.run(tokens, positions, CausalAttention(self.config, lengths, self.dtype, self.device), aux_layers)

    def logits(self, last: Tensor) -> Tensor:
        """[..., H] states after the final norm -> [..., V], in the model's dtype."""
        logits = self._head(last.reshape(-1, last.shape[-1])).view(*last.shape[:-1], -1)
        return logits if self.config.logit_scale == 1.0 else logits.mul_(self.config.logit_scale)

    @property
    def output_head(self) -> OutputHead:
        return OutputHead.of(self.lm_head_weight, self.config.logit_scale, self.config.logit_soft_cap)

    def _add(self, x: Tensor, linear: Linear, inputs: Tensor) -> Tensor:
        """x plus the product of `inputs`, scaled where the target scales it."""
        if self.config.residual_scale == 1.0:
            return linear.add(inputs, x)
        return torch.add(x, linear(inputs), alpha=self.config.residual_scale)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return rms_normalise(x, self._eps)
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_eps)


def _lengths_and_frequencies(config: TargetConfig, rope: RopeConfig | None) -> Tensor:
    """Of the rotations of queries and keys, [2, E / 2] float64; elements that are not rotated have frequency 0."""
    scale = config.attention_scale or config.head_dim ** -0.5
    # Attention divides scores by sqrt(E). Each factor is the square root: it multiplies both queries and keys.
    rope_of_heads = torch.zeros(2, config.head_dim // 2, dtype=torch.float64, device="cpu")
    rope_of_heads[0] = math.sqrt(scale * math.sqrt(config.head_dim)) if config.attention_scale else 1.0
    if rope is not None:
        size = config.rotary_size or config.head_dim
        rope_of_heads[0, :size // 2] *= rope.attention_factor
        rope_of_heads[1, :size // 2] = torch.tensor(rope.inverse_frequencies(size), dtype=torch.float64, device="cpu")
    return rope_of_heads


def pairs_together(rows: Tensor, head_dim: int, rotary_size: int | None = None) -> Tensor:
    """Reorder the rows of q or k so that elements i and i + head_dim / 2 of each head become adjacent.

    rotary_size  where only the first elements of each head are rotated, their number, in the place of head_dim
    """
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    size = rotary_size or head_dim
    pairs = heads[:, :size].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, size:]], dim=1).view(rows.shape)


def _layer(config: TargetConfig, weights: Mapping[str, Tensor], index: int, folds: bool) -> _Layer:
    def get(name: str) -> Tensor:
        return weights[f"model.layers.{index}.{name}"]

    def together(rows: Tensor) -> Tensor:
        return pairs_together(rows, config.head_dim, config.rotary_size)

    attention, mlp = "self_attn.{}_proj.{}", "mlp.{}_proj.{}"
    if config.fused_projections:
        q, k, v = get(attention.format("qkv", "weight")).split(
            [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)])
    else:
        q, k, v = (get(attention.format(name, "weight")) for name in "qkv")
    qkv = torch.cat([together(q), together(k), v])
    del q, k, v
    qkv_bias = torch.cat([together(get(attention.format("q", "bias"))), together(get(attention.format("k", "bias"))),
                          get(attention.format("v", "bias"))]) if config.attention_bias else None
    fold = folds and qkv.dtype == torch.float32 and not config.post_norm
    input_norm = None if config.post_norm else get("input_layernorm.weight")
    # Olmo applies this tensor to the attention output, the other families before the MLP.
    after_attention = get("post_attention_layernorm.weight")
    mlp_norm = get("post_feedforward_layernorm.weight") if config.post_norm else after_attention
    head_norm = None
    if config.qk_norm or config.post_norm:
        norms = [together(get(f"self_attn.{name}_norm.weight")).view(-1, config.head_dim) for name in "qk"]
        head_norm = torch.cat([norm.expand(heads, -1) for norm, heads in zip(
            norms, (config.num_heads, config.num_kv_heads), strict=True)])
    # In place: the concatenations are this layer's own.
    qkv_linear = Linear(qkv.mul_(input_norm) if fold and input_norm is not None else qkv, qkv_bias)
    del qkv  # where the weight is packed this was a copy, freed before the MLP is read
    gate_up = torch.cat([get(mlp.format(name, "weight"))
                         for name in (("gate_up",) if config.fused_projections else ("gate", "up"))])
    gate_up_bias = torch.cat([get(mlp.format(name, "bias")) for name in ("gate", "up")]) if config.mlp_bias else None
    gate_up_linear = Linear(gate_up.mul_(mlp_norm) if fold else gate_up, gate_up_bias)
    del gate_up
    return _Layer(
        input_norm=None if fold else input_norm, qkv=qkv_linear, head_norm=head_norm,
        output=Linear(get(attention.format("o", "weight")),
                      get(attention.format("o", "bias")) if config.output_bias else None),
        attention_norm=after_attention if config.post_norm else None, mlp_norm=None if fold else mlp_norm,
        gate_up=gate_up_linear,
        down=Linear(get(mlp.format("down", "weight")), get(mlp.format("down", "bias")) if config.mlp_bias else None))
