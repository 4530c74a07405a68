"""Rules for the values of a drafter's parameters, the same for every family."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from eyrie_workers.drafters.checkpoint.file_format import DTYPES
from eyrie_workers.drafters.validation.finding import Finding, error


def value_rules(parameters: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Non-finite values, and matrices whose elements are all equal. Tensors of other dtypes are skipped."""
    for name, tensor in sorted(parameters.items()):
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES or tensor.numel() == 0:
            continue
        least, most = tensor.min().item(), tensor.max().item()
        if not abs(least) + abs(most) < float("inf"):  # nan compares false
            yield error("not-finite", f"{name} holds nan or infinity", "take an earlier checkpoint; training diverged")
        elif tensor.dim() > 1 and least == most:
            yield error("constant-tensor", f"every element of {name} is {least:g}: it was never trained or written",
                        "export the drafter again")
