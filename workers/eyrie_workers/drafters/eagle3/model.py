"""The EAGLE-3 drafter: one decoder layer over fused hidden states of the target (arXiv:2503.01840).

At position i there are the target's hidden states of a low, a middle and a high layer, and the token i+1 it chose. The
drafter fuses the states into one vector, concatenates it with the token's embedding, and predicts token i+2:

    f_i   = fc(concat of the A aux states at i)                                  start of the residual stream
    x_i   = concat(input_layernorm(embed(token i+1)), hidden_norm(f_i))          input of attention only
    h_i   = f_i + attention(x_i);  h_i = h_i + mlp(post_attention_layernorm(h_i))
    logits over the draft vocabulary = lm_head(norm(h_i))

For deeper steps h_i (before `norm`) replaces f, and the proposed token replaces token i+1. Names, shapes and arithmetic
are exactly those of SGLang's `LlamaForCausalLMEagle3`, so that trained weights load there. The embedding is the
target's: shared, frozen, not saved.

Four variants that the engines serve are flags, with the same arithmetic in training. `fc_norm` (EAGLE-3.1) normalises
each aux state before `fc`; `norm_before_fc` (NVIDIA's GPT-OSS drafters) all of them as one vector; both are skipped,
like `fc`, when the drafter reads its own state. `norm_output` (EAGLE-3.1) feeds back the state after `norm`; with a
different setting in serving than in training, only the first draft step is good. `sliding_window` W lets position p
attend to keys p-W+1 .. p, its own included; draft steps are positions like any other, so each step moves the window by
one settled key. SGLang has the window only as a launch flag, and counts the keys before the current one:
`--speculative-draft-window-size` is W - 1. vLLM reads `sliding_window` and `layer_types` from config.json and counts as
Eyrie does.

Training (`drafters.eagle3.unroll`) and decoding (`drafters.eagle3.proposer`) differ in how attention finds its keys.
`Eagle3Weights` joins the projections that share an input, and splits the layer at its attention.

The q, k and v projections are linear in the two halves of x, and the token's half does not depend on the step. Training
computes it once per token and looks it up at every unrolled step; decoding stores it as a table where the vocabulary is
small.

    T tokens or rows, A aux layers, H hidden, Q = q + k + v widths, I intermediate, D draft vocabulary, V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from eyrie_workers.drafters.layers.modules import AttentionProjections, GatedMlp, Norm, PostAttention
from eyrie_workers.targets.config import RopeConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.training.fused import normed_linear, rms_norm
from eyrie_workers.training.matmul import linear


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and variant of a drafter."""

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
    """The target's."""

    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    fc_norm: bool = False
    """Normalise each aux state before fusing them (EAGLE-3.1)."""

    norm_before_fc: bool = False
    """Normalise the concatenated aux states, as one vector of A * H, before fusing them."""

    norm_output: bool = False
    """Feed back the state after `norm` instead of before it (EAGLE-3.1). Logits always come from after it."""

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


class _MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size)
        q, k, _ = config.qkv_widths
        self.self_attn = AttentionProjections(2 * config.hidden_size, config.hidden_size, q, k)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)


class Eagle3Drafter(nn.Module):
    """The parameters, under the names the serving engines load. The arithmetic is in this module's functions."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, vocabulary: DraftVocabulary) -> None:
        """Parameters at torch's default initialisation; `initialisation` copies from the target."""
        super().__init__()
        assert (config.vocab_size, config.draft_vocab_size) == (vocabulary.vocab_size, vocabulary.size)
        self.config = config
        self.fc = nn.Linear(config.num_aux * config.hidden_size, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = Norm(config.num_aux * config.hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.hidden_size) for _ in config.aux_layers)
        self.midlayer = _MidLayer(config)
        self.norm = Norm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocabulary.d2t)
        self.register_buffer("t2d", vocabulary.t2d)

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The draft vocabulary, from the buffers."""
        return DraftVocabulary.from_buffers(self.d2t, self.t2d)

    def weights(self, dtype: torch.dtype | None = None) -> "Eagle3Weights":
        """The projections joined by input, in `dtype` (default: as they are); gradients flow to the parameters."""
        layer, attention, hidden = self.midlayer, self.midlayer.self_attn, self.config.hidden_size
        dtype = dtype or self.fc.weight.dtype
        qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        return Eagle3Weights(
            config=self.config,
            fc=self.fc.weight.to(dtype),
            input_norm=self.input_norm.weight if self.config.norm_before_fc else None,
            fc_norm=tuple(norm.weight for norm in self.fc_norm) if self.config.fc_norm else (),  # type: ignore[misc]
            input_layernorm=self.midlayer.input_layernorm.weight,
            hidden_norm=self.midlayer.hidden_norm.weight,
            norm=self.norm.weight,
            embed_qkv=torch.cat([weight[:, :hidden] for weight in qkv]).to(dtype),
            hidden_qkv=torch.cat([weight[:, hidden:] for weight in qkv]).to(dtype),
            post_attention=PostAttention.of(attention, layer.post_attention_layernorm, layer.mlp, self.config.rms_eps,
                                            dtype),
            lm_head=self.lm_head.weight.to(dtype),
        )


@dataclass(frozen=True)
class Eagle3Weights:
    """One layer's matrices, joined where they share an input. Matrices in the compute dtype, norms as stored.

    fc [H, A*H]   embed_qkv [Q, H]   hidden_qkv [Q, H]   lm_head [D, H]
    """

    config: Eagle3Config
    fc: Tensor
    input_norm: Tensor | None
    fc_norm: tuple[Tensor, ...]
    input_layernorm: Tensor
    hidden_norm: Tensor
    norm: Tensor
    embed_qkv: Tensor
    hidden_qkv: Tensor
    post_attention: PostAttention
    lm_head: Tensor

    def unrolled(self) -> tuple[Tensor, ...]:
        """The weights that every unrolled step uses, in the order `with_unrolled` takes them."""
        after = self.post_attention
        return (self.hidden_norm, after.norm, self.norm, self.hidden_qkv, after.out, after.gate_up, after.down,
                self.lm_head)

    def with_unrolled(self, tensors: Sequence[Tensor]) -> "Eagle3Weights":
        """A copy with these tensors in the place of `unrolled`."""
        hidden_norm, post_attention_layernorm, norm, hidden_qkv, out, gate_up, down, lm_head = tensors
        after = replace(self.post_attention, norm=post_attention_layernorm, out=out, gate_up=gate_up, down=down)
        return replace(self, hidden_norm=hidden_norm, norm=norm, hidden_qkv=hidden_qkv, post_attention=after,
                       lm_head=lm_head)

    def fuse(self, aux_TAH: Tensor) -> Tensor:
        """[T, A, H] aux states -> [T, H], the start of the residual stream."""
        if self.fc_norm:
            chunks = aux_TAH.to(self.norm.dtype).unbind(1)
            aux_TAH = torch.stack([self._rms(chunk, w) for chunk, w in zip(chunks, self.fc_norm, strict=True)], 1)
        concatenated_TC = aux_TAH.flatten(-2)  # C = A * H
        if self.input_norm is not None:
            return normed_linear(concatenated_TC.to(self.norm.dtype), self.input_norm, self.fc,
                                 self.config.rms_eps).to(self.norm.dtype)
        return linear(concatenated_TC, self.fc).to(self.norm.dtype)

    def embed_half(self, embed_TH: Tensor) -> Tensor:
        """The token's share of q, k and v: [T, H] embeddings -> [T, Q]."""
        return normed_linear(embed_TH.to(self.norm.dtype), self.input_layernorm, self.embed_qkv, self.config.rms_eps)

    def hidden_half(self, hidden_TH: Tensor) -> Tensor:
        """The state's share of q, k and v: [T, H] residual stream -> [T, Q]."""
        return normed_linear(hidden_TH, self.hidden_norm, self.hidden_qkv, self.config.rms_eps)

    def normed(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] residual stream -> input of the output matrix, and with `norm_output` of the next step."""
        return self._rms(hidden_TH, self.norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_eps)
