"""SGLang's workers for blocks (DFLASH, DSPARK) on a CPU: what must be replaced so that they run unmodified.

SGLang 0.5.23 refuses both algorithms on a CPU, though its workers have PyTorch forms of most of their GPU steps and
choose them by device. Replaced are:

    the refusals         `_handle_dflash` and `_handle_dspark` see a CUDA device; nothing else of the resolution does.
                         A Domino head, which is refused outside CUDA and bfloat16, is not (`validate_domino_runtime`)
    the backend          `intel_amx` is added to the backends of block drafters, through SGLang's own extension point
    streams              `Tensor.record_stream` does nothing: it is not defined on a CPU, which has no streams
    the block's width    `intel_amx` reads `tree_topk` of what is verified, which blocks do not state: 1, a chain
    embedded blocks      DFLASH rounds them to bfloat16, whatever the dtype of the layers; they are brought back to it
    one Triton kernel    the write of the accepted rows' keys and values into the cache (`set_kv_buffer_prefix_valid`)

All else of a round is SGLang's: features of the target, their keys and values, the block's forward, the proposals, the
target's verification, acceptance, and the scheduler around them. Attention is `sgl_kernel.attention`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
from sglang.srt.mem_cache import memory_pool
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.speculative import dflash_worker_v2
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor


class _OnCuda:
    """A view of the resolved arguments, with another device."""

    device = "cuda"

    def __init__(self, view: object) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def _seeing_cuda(handle: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(handle)
    def handled(server_args: Any) -> None:
        view = speculative_hook.resolving_view
        speculative_hook.resolving_view = lambda args: _OnCuda(view(args))
        try:
            handle(server_args)
        finally:
            speculative_hook.resolving_view = view

    return handled


def _in_dtype_of_the_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(self: DFlashDraftModel, input_ids: Tensor, positions: Tensor, forward_batch: Any,
            input_embeds: Tensor | None = None, **more: Any) -> Any:
        if input_embeds is not None:
            input_embeds = input_embeds.to(self.fc.weight.dtype)
        return forward(self, input_ids, positions, forward_batch, input_embeds, **more)

    return run


def write_accepted_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, loc_2d: Tensor, commit_lens: Tensor,
                        row_dim: int, store_dtype: torch.dtype) -> None:
    """The first `commit_lens` rows of each block go to their slots; the others are not written.

    k, v  [B * C, K, E], caches [slots, K, E], loc_2d [B, C], commit_lens [B]
    """
    accepted = torch.arange(loc_2d.shape[1]) < commit_lens[:, None]
    slots = loc_2d[accepted].long()
    k_cache[slots] = k[accepted.flatten()]
    v_cache[slots] = v[accepted.flatten()]


def run_block_workers_on_cpu() -> None:
    """Replace what the module's text names. To be called in every process of the server."""
    speculative_hook._handle_dflash = _seeing_cuda(speculative_hook._handle_dflash)
    speculative_hook._handle_dspark = _seeing_cuda(speculative_hook._handle_dspark)
    dflash_worker_v2.validate_domino_runtime = lambda **_facts: None
    add_draft_attention_backend_choices(["intel_amx"])
    torch.Tensor.record_stream = lambda self, stream: None
    DFlashDraftModel.forward = _in_dtype_of_the_weights(DFlashDraftModel.forward)
    DFlashVerifyInput.tree_topk = 1
    memory_pool._set_kv_buffer_prefix_valid_impl = write_accepted_rows
