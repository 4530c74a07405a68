"""The shared expert of Qwen's mixtures (stand-in; see the package's essay).

With AMX, SGLang computes this gate by its packed linear layers; without packed weights, as here, by a Triton kernel
(kernels/ops/elementwise/elementwise.py), which no CPU runs. The launcher puts this function in its place.

    T tokens, H hidden
"""

from torch import Tensor


def fused_gate_sigmoid_mul_add(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor,
                               final_hidden_states: Tensor) -> None:
    """Add the gated shared expert to the routed experts' sum [T, H], in place; gate_weight [H]."""
    gate = (hidden_states.double() @ gate_weight.double()).sigmoid()
    final_hidden_states += (gate[:, None] * shared_output.double()).to(final_hidden_states.dtype)
