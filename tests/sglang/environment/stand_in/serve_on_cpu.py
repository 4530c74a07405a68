"""`python -m sglang.launch_server`, on a machine without AMX instructions.

Speculation on CPU needs SGLang's `intel_amx` attention backend (`torch_native` has no draft decode), and SGLang allows
that backend only where the processor has AMX. With the stand-in kernels no such instruction is executed, so the machine
is declared to have it, through SGLang's own hook for saying what kind of machine this is. The one Triton kernel that a
served class uses without such instructions is replaced as well, and so is the wait for the GPU that classes for MTP
layers end their loading with. All of it stands at module level because the server's child processes are spawned and
import this module again, under another name.
"""

import os
import sys

import torch
from block_workers import run_block_workers_on_cpu
from sgl_kernel.mixture import fused_gate_sigmoid_mul_add
from sglang.kernels.ops.elementwise import elementwise
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args

override_platform(has_amx=True).install()
elementwise.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add  # before a model's module imports it by name
torch.cuda.synchronize = lambda device=None: None  # a torch without CUDA raises
run_block_workers_on_cpu()


def main() -> None:
    """Serve until SIGTERM, with the flags of SGLang's own launcher; with `--guarded` before them by our launcher."""
    if sys.argv[1:2] == ["--guarded"]:
        from eyrie_workers.sglang.plugin import guarded

        del sys.argv[1]
        return guarded.main()
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
