"""The `packed_attention` kernel against its floor: `python -m benchmarks.kernels.packed_attention`."""


import torch

from benchmarks.kernels.timing import Machine, Timing, main, seconds
from eyrie_kernels.packed_attention import key_ranges, packed_attention


def bench(machine: Machine) -> list[Timing]:
    """The last of seven steps over documents of mixed lengths, forward and backward, against its arithmetic."""
    tokens, kv_heads, per_kv, head, dtype = (16_384, 8, 4, 128, torch.bfloat16) if machine.cuda else (
        1024, 2, 2, 64, torch.float32)
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens // 8]
    start = torch.repeat_interleave(torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths))
    start = start.to(machine.device)
    root = torch.arange(tokens, device=machine.device)
    q, k, v = (torch.randn(tokens, *shape, dtype=dtype, device=machine.device, requires_grad=True)
               for shape in ((kv_heads, per_kv, head), (kv_heads, head), (kv_heads, head)))
    own = [(torch.randn_like(k), torch.randn_like(k)) for _ in range(6)]
    ranges, upstream = key_ranges(root, start, len(own)), torch.randn_like(q)
    once = 4 * kv_heads * per_kv * head * int((root - start + 1 + len(own)).sum())
    shape = f"T={tokens} K={kv_heads} W={per_kv} E={head} {dtype}".replace("torch.", "")

    def both() -> None:
        torch.autograd.grad(packed_attention(q, k, v, own, ranges), (q, k, v), upstream)

    with torch.no_grad():
        forward = seconds(lambda: packed_attention(q, k, v, own, ranges), machine)
    rate = machine.flops(dtype)
    return [Timing("packed_attention.forward", shape, forward, once / rate, "flops"),
            # two products forward, four backward; computing the scores again is not counted
            Timing("packed_attention.both", shape, seconds(both, machine), 3 * once / rate, "flops")]


if __name__ == "__main__":
    main(bench)
