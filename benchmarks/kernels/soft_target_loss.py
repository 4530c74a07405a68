"""The `soft_target_loss` kernel against its floor: `python -m benchmarks.kernels.soft_target_loss`."""

import torch

from benchmarks.kernels.timing import Machine, Timing, main, seconds
from eyrie_kernels.soft_target_loss import launch_rows, soft_target_loss


def bench(machine: Machine) -> list[Timing]:
    """Forward with gradients: the whole against its arithmetic, the row kernel alone against its traffic."""
    rows, hidden, vocab, dtype = (16_384, 4096, 32_768, torch.bfloat16) if machine.cuda else (
        512, 512, 4096, torch.float32)
    x = torch.randn(rows, hidden, dtype=dtype, device=machine.device, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=dtype, device=machine.device).div_(hidden**0.5).requires_grad_()
    table = torch.randn(rows // 4, vocab, device=machine.device).softmax(-1).to(dtype)
    mass, ones = torch.ones(rows // 4, device=machine.device), torch.ones(rows, device=machine.device)
    index = torch.arange(rows, device=machine.device) // 4
    shape = f"T={rows} H={hidden} D={vocab} {dtype}".replace("torch.", "")

    def whole() -> None:
        torch.autograd.grad(soft_target_loss(x, weight, table, mass, index, ones).total, (x, weight))

    timings = [Timing("soft_target_loss", shape, seconds(whole, machine),
                      6 * rows * hidden * vocab / machine.flops(dtype), "flops")]
    if machine.cuda:
        logits = torch.randn(4096, vocab, device=machine.device)
        grads, losses = logits.to(dtype), logits[:, 0].clone()
        alone = seconds(lambda: launch_rows(logits, grads, losses, None, table, mass, index[:4096], ones[:4096], "kl"),
                        machine)
        # Four predictions share a row of the table: three of their reads are found in the cache and are no traffic.
        traffic = logits.nbytes + grads.nbytes + table[:1024].nbytes
        floor = traffic / machine.bandwidth()
        timings.append(Timing("soft_target_loss.rows", f"C=4096 D={vocab}", alone, floor, "traffic"))
    return timings


if __name__ == "__main__":
    main(bench)
