"""A stand-in for the CPU build of SGLang's kernel package, in plain PyTorch.

SGLang 0.5.23 runs on a CPU only with a compiled package named `sgl_kernel`, which exists in its source tree
(sgl-kernel/csrc/cpu) and in its `xeon` container image, and on no package registry. The published wheels of that name
hold CUDA code. So that the unmodified SGLang wheel can be run where this repository's tests run, this package answers
to the same names with the same signatures and gives what the call sites in the wheel expect. Nothing here is fast.

What each function must do was read from those call sites and from the Triton kernels beside them, which state the same
contract for other devices:

    cache.py         cache slots a step reads and writes  kernels/ops/speculative/cache_locs.py and eagle.py,
                                                          kernels/ops/kvcache/cache_move.py, srt/mem_cache
    trees.py         the draft tree as SGLang lays it out kernels/ops/speculative/spec_tree.py, reconstruct_tree.py
    verification.py  the path of it that the target takes kernels/ops/speculative/spec_tree.py
    attention.py     attention over the paged cache       srt/layers/attention/intel_amx_backend.py
    mixture.py       the gate of a shared expert          kernels/ops/elementwise/elementwise.py

SGLang reaches the first three as functions of this package and attention through `torch.ops.sgl_kernel`. It is imported
by the server's processes alone (PYTHONPATH of `process.SglangServer` in the tests), never by Eyrie.

Because these are not SGLang's kernels, a run proves SGLang's Python: scheduling, drafting, tree building and selection,
checkpoint loading, layer capture, bookkeeping. It says nothing of the numerics of its compiled kernels.
"""

from sgl_kernel.attention import register_attention
from sgl_kernel.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.trees import build_tree_kernel_efficient_cpu
from sgl_kernel.verification import verify_tree_greedy_cpu

register_attention()

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
