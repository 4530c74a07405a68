"""Bytes of tensors that are alive while a program runs: what a GPU's allocator would hold, counted without a GPU.

`LiveBytes` is a mode of torch's dispatcher: it sees every operation, in Python and in autograd's backward pass, counts
each storage once when an operation returns it, and subtracts it when it is freed. What an operation allocates inside
and frees before it returns is not seen; fragmentation and rounding of a real allocator are not either.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations return while it is entered; tensors made before do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counted: set[int] = set()
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                    self.count(leaf)
        return result

    def count(self, x: Tensor) -> None:
        """Count the storage of a tensor from now on, if it is not counted yet."""
        storage = x.untyped_storage()
        if storage._cdata in self._counted or storage.device.type == "meta":
            return
        self._counted.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block, nothing new is counted: for what stands in for a kernel."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _freed(self, key: int, num_bytes: int) -> None:
        self._counted.discard(key)
        self.live -= num_bytes
