"""The largest tensor that a piece of code allocates."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """While it is entered, the number of elements of the largest new tensor; views and writes in place are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {place(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and place(x) not in given:
                self.num_elements = max(self.num_elements, x.numel())
        return result


def place(x: Tensor) -> int:
    """Identifies the storage."""
    return 0 if x.is_mkldnn else int(x.untyped_storage()._cdata)


def largest(work: Any) -> int:
    """Elements of the largest tensor that `work()` allocates."""
    with torch.inference_mode(), Largest() as seen:
        work()
    return seen.num_elements
