"""A Llama for training on two CPU cores, and its export to the Hugging Face layout.

Mathematically `LlamaForCausalLM`, or with `olmo` `Olmo3ForCausalLM`; the difference is bookkeeping. Query, key and
value are one matrix, gate and up are one matrix, and attention is masked by document, so several conversations share
a row without seeing each other. Weights are stored as transformers names them only on export; a test compares the
logits of both.

Shapes: B rows, T tokens in a row, H hidden, N heads, G key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The target's architecture.

    Sixteen layers at this width are chosen for speculation, not for quality: a drafter of one layer then costs about a
    sixteenth of a target pass, which is the ratio a large model has. Head size 64 is the smallest that the attention
    kernels of serving engines accept.
    """

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_length: int = 2048
    sliding_window: int | None = None
    """Tokens that a sliding layer sees, itself included; None: every layer sees everything."""

    full_attention_every: int = 4
    """With a window: of so many layers the last has full attention, as in Olmo 3."""

    olmo: bool = False
    """Norms behind attention and MLP instead of before them, and over all queries and all keys: Olmo 3."""

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Attention by layer, in the words of `config.json`."""
        if self.sliding_window is None:
            return ("full_attention",) * self.num_layers
        return tuple("sliding_attention" if (i + 1) % self.full_attention_every else "full_attention"
                     for i in range(self.num_layers))


class Block(nn.Module):
    """Attention and gated MLP, each added to the residual; a norm before each, or with `olmo` behind."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, head = shape.hidden_size, shape.head_dim
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.post_norm = nn.Parameter(torch.ones(hidden))
        if shape.olmo:
            self.q_norm = nn.Parameter(torch.ones(shape.num_heads * head))
            self.k_norm = nn.Parameter(torch.ones(shape.num_kv_heads * head))
        self.qkv = nn.Linear(hidden, (shape.num_heads + 2 * shape.num_kv_heads) * head, bias=False)
        self.o = nn.Linear(shape.num_heads * head, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, hidden, bias=False)

    def forward(self, x_BTH: Tensor, cos_TD: Tensor, sin_TD: Tensor, mask_B1TT: Tensor) -> Tensor:
        s = self.shape
        rows, length, _ = x_BTH.shape
        qkv = self.qkv(x_BTH if s.olmo else self._normed(x_BTH, self.input_norm))
        q, k, v = qkv.split([n * s.head_dim for n in (s.num_heads, s.num_kv_heads, s.num_kv_heads)], dim=-1)
        if s.olmo:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        q, k, v = (part.view(rows, length, -1, s.head_dim).transpose(1, 2) for part in (q, k, v))
        q, k = rotate(q, cos_TD, sin_TD), rotate(k, cos_TD, sin_TD)
        repeats = s.num_heads // s.num_kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT)
        attended = self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        x_BTH = x_BTH + (self._normed(attended, self.input_norm) if s.olmo else attended)
        gate, up = self.gate_up(x_BTH if s.olmo else self._normed(x_BTH, self.post_norm)).chunk(2, -1)
        added = self.down(F.silu(gate) * up)
        return x_BTH + (self._normed(added, self.post_norm) if s.olmo else added)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.norm_eps)


class Llama(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Matrices that write to the residual start smaller: 2 * num_layers of them add up.
                narrow = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.num_layers) ** 0.5 if narrow else 0.02)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Logits [B, T, V]. A token attends to earlier tokens of the same document."""
        x_BTH = self.embed(tokens_BT)
        cos_TD, sin_TD = rotary(tokens_BT.shape[1], self.shape, x_BTH.dtype)
        masks = {"full_attention": attention_mask(documents_BT, x_BTH.dtype)}
        if self.shape.sliding_window is not None:
            masks["sliding_attention"] = attention_mask(documents_BT, x_BTH.dtype, self.shape.sliding_window)
        for block, kind in zip(self.blocks, self.shape.layer_types, strict=True):
            x_BTH = block(x_BTH, cos_TD, sin_TD, masks[kind])
        logits: Tensor = self.head(F.rms_norm(x_BTH, (self.shape.hidden_size,), self.norm, self.shape.norm_eps))
        return logits


def rotary(length: int, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D] in the half-rotation layout of transformers."""
    inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angle = torch.arange(length).float()[:, None] * inverse[None]
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos_TD + torch.cat((-right, left), -1) * sin_TD


def attention_mask(documents_BT: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[B, 1, T, T]: 0 where a token may attend, minus infinity elsewhere. `window` tokens back, itself included."""
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    allowed = same.tril()[:, None]
    if window is not None:
        allowed = allowed.triu(1 - window)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, float("-inf"))


def hugging_face_weights(model: Llama) -> dict[str, Tensor]:
    """The weights under the names of transformers' class for the shape, in the model's own dtype."""
    s = model.shape
    own = model.state_dict()
    out = {"model.embed_tokens.weight": own["embed.weight"], "model.norm.weight": own["norm"],
           "lm_head.weight": own["head.weight"]}
    for i in range(s.num_layers):
        to, source = f"model.layers.{i}.", f"blocks.{i}."
        q, k, v = own[source + "qkv.weight"].split([n * s.head_dim for n in (s.num_heads, s.num_kv_heads,
                                                                             s.num_kv_heads)])
        gate, up = own[source + "gate_up.weight"].chunk(2)
        out |= {
            to + "self_attn.q_proj.weight": q, to + "self_attn.k_proj.weight": k, to + "self_attn.v_proj.weight": v,
            to + "self_attn.o_proj.weight": own[source + "o.weight"],
            to + "mlp.gate_proj.weight": gate, to + "mlp.up_proj.weight": up,
            to + "mlp.down_proj.weight": own[source + "down.weight"],
        }
        if s.olmo:
            out |= {to + "post_attention_layernorm.weight": own[source + "input_norm"],
                    to + "post_feedforward_layernorm.weight": own[source + "post_norm"],
                    to + "self_attn.q_norm.weight": own[source + "q_norm"],
                    to + "self_attn.k_norm.weight": own[source + "k_norm"]}
        else:
            out |= {to + "input_layernorm.weight": own[source + "input_norm"],
                    to + "post_attention_layernorm.weight": own[source + "post_norm"]}
        if s.sliding_window is not None and not s.olmo:  # Qwen2 has biases on these three
            out |= {f"{to}self_attn.{name}_proj.bias": torch.zeros(weight.shape[0], dtype=weight.dtype)
                    for name, weight in (("q", q), ("k", k), ("v", v))}
    return {name: weight.detach().contiguous() for name, weight in out.items()}


def hugging_face_config(shape: Shape, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """`config.json`. `rope_theta` is written in both the old and the new place, for transformers 4 and 5.

    With a window it is a Qwen2, the family that is this one but for biases (zero here) and may slide by layer. With
    `olmo` it is an Olmo 3 as its published checkpoints spell it.
    """
    sliding: dict[str, Any] = {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": shape.sliding_window,
        "layer_types": list(shape.layer_types), "rope_scaling": None,
    } if shape.olmo else {} if shape.sliding_window is None else {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
        "sliding_window": shape.sliding_window, "layer_types": list(shape.layer_types),
        # read where `layer_types` is not: transformers checks that the two agree in kind
        "max_window_layers": 0,
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_length, "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "use_cache": True,
        "initializer_range": 0.02, "bos_token_id": None, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id,
        "torch_dtype": "bfloat16", "dtype": "bfloat16",
    } | sliding
    if shape.olmo:
        del config["rope_parameters"]
    return config


def describe(shape: Shape) -> dict[str, Any]:
    return asdict(shape)
