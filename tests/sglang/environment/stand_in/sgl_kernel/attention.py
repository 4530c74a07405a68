"""Attention over SGLang's key-value slots (stand-in; see the package's essay).

Two operations, called by srt/layers/attention/intel_amx_backend.py through `torch.ops.sgl_kernel`, so they are
registered with PyTorch's library under the names and argument orders used there. Both write into the output they get.

    decode_attention_cpu   one query per row: writes the row's key and value into its slot first (when given), then
                           attends over the row's first `seq_len` slots
    extend_attention_cpu   several new queries per request: attends over the slots before them and over the new tokens
                           among themselves: causally, all, or by the tree mask [B, N, N] that verification passes

Latent attention (MLA) comes in two forms. Decoding, verifying and continuing a prefix attend in the latent space: one
key-value head, whose values are the beginning of its keys. A prompt without a prefix passes keys and values of every
head, of another size than the cached latents, and attends to those alone.

Sums are taken in float64 and rounded once: a query's result then hardly depends on how many others shared its call, and
drafted and undrafted servers can be compared token by token in float32.

Not served, and refused: cross attention, soft-capped logits, scales of 8-bit caches, attention sinks.

    T tokens, R requests, W query heads, K key-value heads, E head size, L keys
"""

import torch
from torch import Tensor

_DECODE = ("decode_attention_cpu(Tensor query, Tensor(b!) k_buffer, Tensor(c!) v_buffer, float k_scale, "
           "float v_scale, Tensor(a!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, "
           "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, "
           "bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()")
_EXTEND = ("extend_attention_cpu(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, Tensor k_buffer, "
           "Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, "
           "Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, "
           "float logit_cap, bool is_cross_attn, int sliding_window, Tensor? encoder_lens, Tensor? sinks, "
           "Tensor? tree_mask, bool is_causal) -> ()")
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


def register_attention() -> None:
    """Make both operations known as `torch.ops.sgl_kernel.*`."""
    _LIBRARY.define(_DECODE)
    _LIBRARY.define(_EXTEND)
    _LIBRARY.impl("decode_attention_cpu", decode_attention, "CPU")
    _LIBRARY.impl("extend_attention_cpu", extend_attention, "CPU")


def decode_attention(query: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float, v_scale: float,
                     output: Tensor, key: Tensor | None, value: Tensor | None, loc: Tensor, attn_logits: Tensor,
                     req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, sm_scale: float,
                     logit_cap: float, is_cross_attn: bool, sliding_window: int, encoder_lens: Tensor | None,
                     sinks: Tensor | None) -> None:
    """query, output [R, W, E]; key, value [R, K, E] or None; buffers [slots, K, E]; loc [R] slots to write."""
    _refuse(k_scale, v_scale, logit_cap, is_cross_attn, sinks)
    if key is not None and value is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = max(0, length - sliding_window) if sliding_window > 0 else 0
        slots = req_to_token[request, first:length].long()
        output[row: row + 1] = _attend(query[row: row + 1], k_buffer[slots], v_buffer[slots], sm_scale, None)


def extend_attention(query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, k_buffer: Tensor,
                     v_buffer: Tensor, k_scale: float, v_scale: float, req_to_token: Tensor,
                     req_pool_indices: Tensor, seq_lens: Tensor, extend_seq_lens: Tensor, extend_start_loc: Tensor,
                     max_len_extend: int, sm_scale: float, logit_cap: float, is_cross_attn: bool,
                     sliding_window: int, encoder_lens: Tensor | None, sinks: Tensor | None,
                     tree_mask: Tensor | None, is_causal: bool) -> None:
    """query, output [T, W, E], requests one after another; the new tokens' keys are in their slots already, unless
    those are latents and `key` [T, K, E] has the heads' own."""
    unfolded = key is not None and value is not None and key.shape[1:] != k_buffer.shape[1:]
    _refuse(k_scale, v_scale, logit_cap, is_cross_attn, sinks)
    sizes = (req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist())
    for row, (request, length, num_new, start) in enumerate(zip(*sizes, strict=True)):
        if num_new == 0:
            continue
        if unfolded:
            assert length == num_new, "keys of the heads alone cannot attend to a cached prefix of latents"
            keys, values = key[start: start + num_new], value[start: start + num_new]
        else:
            slots = req_to_token[request, :length].long()
            keys, values = k_buffer[slots], v_buffer[slots]
        seen = torch.ones(num_new, length, dtype=torch.bool)
        if tree_mask is not None:
            nodes = tree_mask.flatten()[row * num_new * num_new: (row + 1) * num_new * num_new]
            seen[:, length - num_new:] = nodes.view(num_new, num_new).bool()
        elif is_causal:
            seen[:, length - num_new:] = torch.ones(num_new, num_new, dtype=torch.bool).tril()
        if sliding_window > 0:
            # A node's position is the count of what it sees before the window cuts, less one.
            positions = seen.sum(1) - 1
            seen &= torch.arange(length) > (positions - sliding_window)[:, None]
        output[start: start + num_new] = _attend(query[start: start + num_new], keys, values, sm_scale, seen)


def _attend(query: Tensor, keys: Tensor, values: Tensor, sm_scale: float, seen: Tensor | None) -> Tensor:
    """query [T, W, E], keys and values [L, K, E], seen [T, L] -> [T, W, E], in the query's dtype."""
    num_tokens, num_heads, head = query.shape
    kv_heads = keys.shape[1]
    q = query.double().view(num_tokens, kv_heads, -1, head)
    scores = torch.einsum("tkge,lke->kgtl", q, keys.double()) * sm_scale
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    weights = scores.softmax(dim=-1)
    attended = torch.einsum("kgtl,lke->tkge", weights, values.double())
    return attended.reshape(num_tokens, num_heads, values.shape[2]).to(query.dtype)


def _refuse(k_scale: float, v_scale: float, logit_cap: float, is_cross_attn: bool, sinks: Tensor | None) -> None:
    if k_scale != 1.0 or v_scale != 1.0 or logit_cap not in (0, 0.0) or is_cross_attn or sinks is not None:
        raise NotImplementedError("this stand-in has no 8-bit caches, soft caps, cross attention or sinks")
