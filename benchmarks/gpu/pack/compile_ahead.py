"""Compiles SGLang's kernels for sm_90a without a GPU, by an image's Python: `compile_ahead jit [NAME ...] | triton`.

jit      JIT modules that serving with EAGLE-3 needs, kept in EYRIE_PACK_JIT, for two shapes in bfloat16: an 8B Llama
         (heads of 128, 8 for keys) and SmolLM2-135M (heads of 64, 3 for keys). Needs nvcc of the GPU machine's release.
triton   the Triton kernels of the EAGLE-3 path, by the installed Triton; nothing is kept.

Nothing is launched. An H100 is pretended: `is_cuda()` and the architecture are what the sources look at.
"""

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_H100 = {"major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 80 << 30,
         "name": "NVIDIA H100 80GB HBM3"}
BF16 = torch.bfloat16


def pretend() -> None:
    """An H100, for whoever asks torch."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: _H100["name"]
    cuda.get_device_properties = lambda device=None: type("Properties", (), _H100)()


def jit_modules() -> dict[str, Callable[[], Any]]:
    """By name: what compiles a module."""
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.attention import clamp_position, rope
    from sglang.kernels.ops.kvcache import kvcache
    from sglang.kernels.ops.layernorm import norm
    from sglang.kernels.ops.speculative import ngram_corpus, sampling, tree

    part = functools.partial
    return {
        "activation": part(activation.activation_module, BF16),
        "rmsnorm 4096": part(norm._jit_rmsnorm_module, 4096, BF16),
        "fused_add_rmsnorm": part(norm._jit_fused_add_rmsnorm_module, BF16, False),
        "fused_rope 128": part(rope._jit_fused_rope_module, True, 128, BF16, BF16),
        "fused_rope 64": part(rope._jit_fused_rope_module, True, 64, BF16, BF16),
        "kvcache 8 x 128": part(kvcache._jit_kvcache_module, 2048, 2048, 0),  # bytes of a row
        "kvcache 3 x 64": part(kvcache._jit_kvcache_module, 384, 384, 0),
        "tree": tree._jit_tree_module,
        "clamp int64": part(clamp_position._jit_clamp_position_module, torch.int64),
        "clamp int32": part(clamp_position._jit_clamp_position_module, torch.int32),
        "qknorm 128": part(norm._jit_qknorm_module, 128, BF16),  # Qwen3
        "ngram": ngram_corpus.get_ngram_corpus_cls,
        "sampling": part(sampling._jit_sampling_module, 4, True),  # temperature above 0; has flashinfer's headers
    }


# Types of the kernels' parameters by name, others are i32; pointers to nothing; constants.
_TYPES = {name: pointer for pointer, names in {
    "*i64": "bonus bonus_tokens_ptr candidate_tokens d1 d3 draft draft_tokens end_offset ids idx_ptr kv_indices "
            "accept_tokens INI new_seq_lens OUT out_cache_loc OUTI paged_kernel_lens positions post_lens pre_lens "
            "req_indices select req_pool_indices retrieve s1 s3 seq seq_lens seq_lens_ptr start_offset target_tokens "
            "tokens topk_index",
    "*i32": "accept_index accept_lens cache_seqlens_int32 correct cu_seqlens_k cu_seqlens_q extend_lens "
            "extend_prefix_lens extend_seq_lens extend_start_loc kv_indptr num_correct_drafts num_kv_splits_ptr "
            "output_indices page_table partial_indices predict predict_tokens prefix_lens req_to_token "
            "req_to_token_ptr source_indices start_locs",
    "*bf16": "d2 logits s2 X", "*fp32": "d0 INV OUTV partial_vals s0 topk_p", "*i1": "mask", "*u64": "prefix_tensors",
}.items() for name in names.split()}
_ABSENT = {"full_to_swa_index_mapping", "full_v2p", "last_steps", "mrope", "swa_out_cache_loc", "swa_page_table",
           "swa_v2p", "track_steps", "uneven_batch_ptr", "v2p"}
_CONSTANTS: dict[str, Any] = {
    "accept_stride": 6, "ACCEPT_STRIDE": 1, "BLOCK": 64, "BLOCK_COLS": 128, "BONUS_STRIDE": 1, "bs_upper": 64,
    "DRAFT_COL": 1, "DRAFT_ROW": 5, "DRAFT_WIDTH": 0, "ENTRY_PAGE_SIZE": 1, "FRONT": 0, "HAS3": True, "HAS_SWA": False,
    "has_prefix": True, "INDEX_STRIDE_0": 6, "INDEX_STRIDE_1": 1, "iter_upper": 8, "kv_indices_stride": 4096,
    "kv_indptr_stride": 65, "MAKE_MROPE": False, "MAKE_POSITIONS": True, "MAX_NUM_SEQ": 64, "NUM_STEPS": 5,
    "num_splits": 8, "num_tokens_upper": 256, "OUT_BLOCK": 128, "page_size": 1, "PAGE_SIZE": 1, "PAGE_SIZE_ONE": True,
    "pool_len": 4096, "PREDICT_STRIDE": 1, "REAL_TOKENS": False, "REQ_STRIDE": 1, "req_to_token_ptr_stride": 4096,
    "SEQ_LEN_DELTA": 0, "SEQ_STRIDE": 1, "SHIFT": 0, "sink_size": 0, "SKIP_PAGE_TABLE": False,
    "speculative_num_steps": 5, "SPLITS": 8, "STRIDE": 1, "TABLE_COL": 1, "TABLE_ROW": 4096, "topk": 4,
    "TRACK_INTERVAL": 0, "TRANSLATE": False, "vocab_size": 32000, "WIDTH": 6, "window_size": -1, "WRITE_CACHE": True,
    "WRITE_DRAFT_TOKEN": True, "WRITE_MROPE": False, "WRITE_POSITIONS": True, "ZERO_TAIL": False}
_KERNELS = {
    "attention.metadata": ("get_num_kv_splits_triton", "_fused_decode_metadata_kernel",
                           "_draft_extend_metadata_kernel"),
    "attention.position": ("compute_position_kernel",), "memory.common": ("write_req_to_token_pool_triton",),
    "speculative.cache_locs": ("assign_draft_cache_locs_contiguous", "generate_draft_decode_kv_indices",
                               "assign_extend_cache_locs"),
    "speculative.topk1": ("_draft_topk1_partial_argmax_kernel", "_draft_topk1_finalize_kernel"),
    "speculative.row_argmax": ("_argmax_partial_kernel", "_argmax_final_kernel"),
    "speculative.gather_spec_extras": ("_gather_rows_kernel",),
    "speculative.eagle": ("_verify_commit_outputs_kernel", "_prepare_draft_extend_lengths_kernel",
                          "_draft_extend_inputs_kernel", "_build_chain_tree_kernel", "fill_bonus_tokens"),
    "speculative.simulated_accept": ("_simulated_accept_kernel",)}
_OTHERWISE: dict[tuple[str, str], Any] = {  # a type, or None for a pointer to nothing
    ("write_req_to_token_pool_triton", "extend_lens"): "*i64", ("_draft_extend_metadata_kernel", "out_cache_loc"): None,
    **{("_verify_commit_outputs_kernel", name): None for name in ("correct", "select", "ids")}}


def triton_kernels(capability: int) -> dict[str, Callable[[], Any]]:
    """By name: what compiles a kernel for sm_90a or sm_100a, by its signature, or by its launcher with a driver that
    launches nothing."""
    import triton
    from sglang.kernels.ops.attention import decode_attention, extend_attention
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("cuda", capability, 32)  # for 90 Triton writes sm_90a, for 100 sm_100a

    def compiled(module: str, name: str) -> Any:
        kernel = getattr(importlib.import_module(f"sglang.kernels.ops.{module}"), name)
        signature, constants = {}, {}
        for number, parameter in enumerate(kernel.params):
            word = parameter.name
            kind = _OTHERWISE.get((name, word), None if word in _ABSENT else _TYPES.get(word, "i32"))
            if parameter.is_constexpr or kind is None:
                kind, constants[(number,)] = "constexpr", _CONSTANTS[word] if parameter.is_constexpr else None
            signature[word] = kind
        return triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=target)

    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
    triton.runtime.driver.set_active(SimpleNamespace(
        utils=SimpleNamespace(load_binary=lambda *_: (1, 1, 32, 0, 1024), get_device_properties=lambda _: properties),
        get_current_device=lambda: 0, get_current_stream=lambda _=None: 0, get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cpu"), launcher_cls=lambda *_: lambda *a, **k: None,
        get_device_interface=lambda: torch.cuda, get_benchmarker=lambda: None))
    i32, i64, f32 = torch.int32, torch.int64, torch.float32

    def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def decode() -> None:
        decode_attention.decode_attention_fwd(
            zeros(4, 32, 128), zeros(512, 8, 128), zeros(512, 8, 128), zeros(4, 32, 128), zeros(5, dtype=i32),
            zeros(512, dtype=i64), zeros(4, 32, 8, 128, dtype=f32), zeros(4, 32, 8, dtype=f32), zeros(4, dtype=i32),
            8, 0.088, 1.0, 1.0)

    def extend(tree: bool) -> None:
        extend_attention.extend_attention_fwd(
            zeros(16, 32, 128), zeros(16, 8, 128), zeros(16, 8, 128), zeros(16, 32, 128), zeros(512, 8, 128),
            zeros(512, 8, 128), zeros(5, dtype=i32), zeros(5, dtype=i32), zeros(512, dtype=i64),
            zeros(4096, dtype=torch.bool) if tree else None, not tree, zeros(5, dtype=i64) if tree else None,
            8, 1.0, 1.0, 0.088)

    return {"decode attention": decode, "extend attention": functools.partial(extend, False),
            "extend attention of a tree": functools.partial(extend, True),
            **{name: functools.partial(compiled, module, name) for module, names in _KERNELS.items() for name in names}}


def main(what: str, names: Iterable[str]) -> int:
    """Compile all, or those named; the number of failures."""
    pretend()
    if what == "jit":
        importlib.import_module("eyrie_gpu_pack").use_compiled(Path(os.environ["EYRIE_PACK_JIT"]))
        makers = jit_modules()
    else:
        makers = triton_kernels(int(os.environ["EYRIE_PACK_CAPABILITY"]))
    failures = 0
    for name in names or [name for name in makers if name != "sampling"]:
        began = time.perf_counter()
        try:
            makers[name]()
            outcome = "compiled"
        except Exception as error:  # noqa: BLE001 - whatever one raises, the others are compiled
            outcome = f"FAILED: {type(error).__name__}: {str(error)[-1500:]}"
            failures += 1
        print(f"  {name}: {outcome}, {time.perf_counter() - began:.1f} s", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
