"""The EAGLE-3 drafter: one decoder layer that reads the target's mind at three depths (arXiv:2503.01840).

At position i the target has left its hidden states of a low, a middle and a high layer, and has chosen token i+1. The
drafter fuses the three into one vector, sets the chosen token's embedding beside it, and predicts token i+2:

    f_i   = fc(concat of the A aux states at i)                                  the residual stream begins here
    x_i   = concat(input_layernorm(embed(token i+1)), hidden_norm(f_i))          attention alone sees the token
    h_i   = f_i + attention(x_i);  h_i = h_i + mlp(post_attention_layernorm(h_i))
    logits over the draft vocabulary = lm_head(norm(h_i))

To go deeper it feeds itself: h_i, as it stands before `norm`, takes the place of f, and its own proposed token takes
the place of token i+1. Names, shapes and arithmetic are those of SGLang's `LlamaForCausalLMEagle3`, to the letter:
what is trained here loads there. The embedding is the target's: shared, frozen, not saved.

Four variants the engines serve are flags, each doing in training exactly what it does there. `fc_norm` (EAGLE-3.1)
normalises each aux state before `fc`; `norm_before_fc` (NVIDIA's GPT-OSS drafters) all of them as one vector, before
`fc`; both are skipped, like `fc`, when the drafter reads its own state. `norm_output` (EAGLE-3.1) feeds back the state
after `norm`; one trained without it and served with it, or the reverse, drafts well once and then badly.
`sliding_window` W lets position p attend to keys p-W+1 .. p, its own included; draft steps are positions like any
other, so with every step the window leaves one more settled key behind. SGLang knows the window only as a launch flag,
and counts the keys before the current one: `--speculative-draft-window-size` is W - 1. vLLM reads `sliding_window` and
`layer_types` from config.json and counts as we do.

Training and serving are two faces of the same handful of functions below: `Eagle3Weights` joins the projections that
share an input, and `fuse`, `embed_half`, `hidden_half`, `finish` and `normed` are the layer cut at its attention,
which is where the two faces differ (`eyrie_workers.drafters.eagle3.unroll` against
`eyrie_workers.drafters.layers.serving`).

One cut pays more than it looks: the q, k and v projections are linear in the two halves of x, and the token's half does
not depend on the step. It is computed once per token and looked up at every unrolled step; in serving, where the
vocabulary is small, it becomes a table.

    T tokens or rows, A aux layers, H hidden, Q = q + k + v widths, I intermediate, D draft vocabulary, V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from eyrie_workers.targets.config import RopeConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.training.fused import mlp, normed_linear, rms_norm
from eyrie_workers.training.matmul import linear


@dataclass(frozen=True)
class Eagle3Config:
    """Everything a drafter's shape and arithmetic depend on."""

    hidden_size: int
    """Equal to the target's: the embedding is shared."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """The target's."""

    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    """`hidden_states` indices (0 = embeddings), ascending."""

    rms_eps: float
    rope: RopeConfig
    """The target's, so that positions mean the same to both."""

    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    fc_norm: bool = False
    """Normalise each aux state before fusing them (EAGLE-3.1)."""

    norm_before_fc: bool = False
    """Normalise the concatenated aux states, as one vector of A * H, before fusing them."""

    norm_output: bool = False
    """BatchLoader back the state after `norm` instead of before it (EAGLE-3.1). Logits always come from after it."""

    sliding_window: int | None = None
    """Keys a position attends to, its own included; None: all."""

    @property
    def num_aux(self) -> int:
        """A."""
        return len(self.aux_layers)

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Widths of q, k and v."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        q, k, v = config.qkv_widths
        self.q_proj = nn.Linear(2 * config.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, k, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, v, bias=False)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size)
        self.hidden_norm = _Norm(config.hidden_size)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config.hidden_size)
        self.mlp = _Mlp(config)


class Eagle3Drafter(nn.Module):
    """The parameters, under the names the serving engines load. The arithmetic is in this module's functions."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, vocabulary: DraftVocabulary) -> None:
        """Parameters at torch's default initialisation; `drafters.initialisation` copies from the target."""
        super().__init__()
        assert (config.vocab_size, config.draft_vocab_size) == (vocabulary.vocab_size, vocabulary.size)
        self.config = config
        self.fc = nn.Linear(config.num_aux * config.hidden_size, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = _Norm(config.num_aux * config.hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(_Norm(config.hidden_size) for _ in config.aux_layers)
        self.midlayer = _MidLayer(config)
        self.norm = _Norm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocabulary.d2t)
        self.register_buffer("t2d", vocabulary.t2d)

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The draft vocabulary, from the buffers."""
        return DraftVocabulary.from_buffers(self.d2t, self.t2d)

    def weights(self, dtype: torch.dtype | None = None) -> "Eagle3Weights":
        """The projections joined by input, in `dtype` (default: as they are); gradients flow to the parameters."""
        attention, mlp, hidden = self.midlayer.self_attn, self.midlayer.mlp, self.config.hidden_size
        dtype = dtype or self.fc.weight.dtype
        qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        return Eagle3Weights(
            config=self.config,
            fc=self.fc.weight.to(dtype),
            input_norm=self.input_norm.weight if self.config.norm_before_fc else None,
            fc_norm=tuple(norm.weight for norm in self.fc_norm) if self.config.fc_norm else (),  # type: ignore[misc]
            input_layernorm=self.midlayer.input_layernorm.weight,
            hidden_norm=self.midlayer.hidden_norm.weight,
            post_attention_layernorm=self.midlayer.post_attention_layernorm.weight,
            norm=self.norm.weight,
            embed_qkv=torch.cat([weight[:, :hidden] for weight in qkv]).to(dtype),
            hidden_qkv=torch.cat([weight[:, hidden:] for weight in qkv]).to(dtype),
            out=attention.o_proj.weight.to(dtype),
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype),
            down=mlp.down_proj.weight.to(dtype),
            lm_head=self.lm_head.weight.to(dtype),
        )


@dataclass(frozen=True)
class Eagle3Weights:
    """One layer's matrices, joined where they share an input. Matrices in the compute dtype, norms as stored.

    fc [H, A*H]   embed_qkv [Q, H]   hidden_qkv [Q, H]   out [H, q]   gate_up [2I, H]   down [H, I]   lm_head [D, H]
    """

    config: Eagle3Config
    fc: Tensor
    input_norm: Tensor | None
    fc_norm: tuple[Tensor, ...]
    input_layernorm: Tensor
    hidden_norm: Tensor
    post_attention_layernorm: Tensor
    norm: Tensor
    embed_qkv: Tensor
    hidden_qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    lm_head: Tensor

    def unrolled(self) -> tuple[Tensor, ...]:
        """The weights that every unrolled step uses, in the order `with_unrolled` takes them."""
        return (self.hidden_norm, self.post_attention_layernorm, self.norm, self.hidden_qkv, self.out, self.gate_up,
                self.down, self.lm_head)

    def with_unrolled(self, tensors: Sequence[Tensor]) -> "Eagle3Weights":
        """These weights with others in the place of `unrolled`."""
        hidden_norm, post_attention_layernorm, norm, hidden_qkv, out, gate_up, down, lm_head = tensors
        return replace(self, hidden_norm=hidden_norm, post_attention_layernorm=post_attention_layernorm, norm=norm,
                       hidden_qkv=hidden_qkv, out=out, gate_up=gate_up, down=down, lm_head=lm_head)

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        """[T, A, H] aux states -> [T, H], the beginning of the residual stream."""
        if self.fc_norm:
            chunks = aux_TAH.to(self.norm.dtype).unbind(1)
            aux_TAH = torch.stack([self._rms(chunk, w) for chunk, w in zip(chunks, self.fc_norm, strict=True)], 1)
        joined_TC = aux_TAH.flatten(-2)  # C = A * H
        if self.input_norm is not None:
            return normed_linear(joined_TC.to(self.norm.dtype), self.input_norm, self.fc,
                                 self.config.rms_eps).to(self.norm.dtype)
        return linear(joined_TC, self.fc).to(self.norm.dtype)

    def embed_half(self, embed_TH: Tensor) -> Tensor:
        """The token's share of q, k and v: [T, H] embeddings -> [T, Q]."""
        return normed_linear(embed_TH.to(self.norm.dtype), self.input_layernorm, self.embed_qkv, self.config.rms_eps)

    def hidden_half(self, hidden_TH: Tensor) -> Tensor:
        """The state's share of q, k and v: [T, H] residual stream -> [T, Q]."""
        return normed_linear(hidden_TH, self.hidden_norm, self.hidden_qkv, self.config.rms_eps)

    def finish(self, hidden_TH: Tensor, attended_TQ: Tensor, recompute: bool = False) -> Tensor:
        """What follows attention: [T, H] residual stream and [T, q] attention output -> [T, H] residual stream."""
        hidden_TH = hidden_TH + linear(attended_TQ, self.out)
        return mlp(hidden_TH, self.post_attention_layernorm, self.gate_up, self.down, self.config.rms_eps, recompute)

    def normed(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] residual stream -> what the output matrix reads, and with `norm_output` the next step too."""
        return self._rms(hidden_TH, self.norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_eps)
