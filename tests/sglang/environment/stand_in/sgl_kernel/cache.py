"""Which slots of the cache a step reads and writes (stand-in; see the package's essay).

SGLang keeps one table, `req_to_token`: row = request, column = position in its text, value = slot in the key-value
buffers. A decode step with speculation has slots allocated beyond the text's end and uses them twice over: first the
drafter writes its branches there, then the target writes all nodes of the tree. The functions below copy stretches of
that table. They write into tensors they are given, because that is how they are called.

    B requests, P columns of the table, K top-k, S draft steps
"""

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor,
                                 end_offset: Tensor, out_cache_loc: Tensor, pool_len: int) -> None:
    """Enter newly allocated slots into the table: columns start to end of each request, requests one after another."""
    taken = 0
    for row, start, end in _stretches(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[taken: taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor,
                                 end_offset: Tensor, out_cache_loc: Tensor, pool_len: int) -> None:
    """Read slots from the table: columns start to end of each request, requests one after another."""
    written = 0
    for row, start, end in _stretches(req_pool_indices, start_offset, end_offset):
        out_cache_loc[written: written + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        written += end - start


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor,
                                           out_cache_loc: Tensor, pool_len: int, topk: int, num_steps: int) -> None:
    """Slots of the drafter's branches: the K * S columns behind each text, branch by branch."""
    width = topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, seq_lens + width, out_cache_loc, pool_len)


def build_draft_decode_metadata_cpu(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int,
                                    num_steps: int, pool_len: int) -> Tensor:
    """A table with one row per branch: the text's slots, then the slots this branch writes step by step.

    Branch k of a request writes columns length + k * S onwards (`assign_draft_cache_locs_contiguous_cpu`), and at step
    s reads `length + s + 1` columns of its row here. A branch thus sees the keys written at its own place in earlier
    steps, whether or not its node descends from them: SGLang does not move keys when it picks the next nodes
    (`select_top_k_tokens` reorders hidden states only), and its attention backends for GPUs read the same columns
    (`generate_draft_decode_kv_indices`).

    returns [B * K, P], dtype of the table
    """
    expanded = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    for row, length in enumerate(seq_lens.repeat_interleave(topk).tolist()):
        first = length + (row % topk) * num_steps
        own = expanded[row, first: first + num_steps].clone()
        expanded[row, length: length + len(own)] = own
    return expanded


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Slots of accepted nodes, packed to the front; -1 in `accept_index` is no node."""
    flat = accept_index.flatten()
    accepted = flat[flat > -1].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor,
                          accept_stride: int) -> None:
    """The last emitted token of each request. `accept_lens` counts it."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last].to(bonus_tokens.dtype))


def rotate_input_ids_cpu(input_ids: Tensor, extend_start_loc: Tensor, extend_seq_lens: Tensor, topk_index: Tensor,
                         select_index: Tensor | None = None) -> None:
    """Shift each request's tokens left by one; the new token goes to the end, or to `select_index`."""
    for row, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if length == 0:
            continue
        input_ids[start: start + length - 1] = input_ids[start + 1: start + length].clone()
        end = start + length - 1 if select_index is None else int(select_index[row])
        input_ids[end] = topk_index.flatten()[row].to(input_ids.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move slots within every key and value buffer, given by address and bytes per slot; all are read before any is
    written. The caller fills both lists up with slot 0."""
    if tgt_loc.numel() == 0:
        return
    num_slots = int(torch.cat([tgt_loc.flatten(), src_loc.flatten()]).max()) + 1
    target, source = tgt_loc.long(), src_loc.long()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_slots * stride)).from_address(address)
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, stride)
        slots[target] = slots[source]


def _stretches(rows: Tensor, starts: Tensor, ends: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
