"""The one kernel SGLang looks for under this name (n-gram drafting, kernels/ops/speculative/reconstruct_tree.py)."""

from sgl_kernel.trees import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
