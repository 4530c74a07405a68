"""A GPU that is not there: tensors live on the processor, and each records which device it stands for.

A machine with a GPU cannot be had here, so this fakes the one thing about it that breaks programs most: that a tensor
of one device does not meet a tensor of another. `PretendedGpu` is a mode of torch's function calls. It remembers for
every storage where it was put (`.to`, `device=`, or made from what was there), answers `x.device` and `x.is_cuda`
accordingly, and raises where the real one would: operands apart, a CUDA index into the processor's tensor, `.numpy()`
of what is not here. A copy to the host that is not waited for arrives when an event or stream is synchronised, and not
before. Numbers are the processor's. Kernels, the order of streams, memory and speed are not pretended; `make test-gpu`
has those.

It also counts the calls after which the host waits for the GPU (`num_syncs`, and where they are: `syncs`), by the rules
of `torch.cuda.set_sync_debug_mode`: numbers that the host reads, shapes that depend on data, and copies between the
two that are not `non_blocking`.

Autograd makes tensors out of this mode's sight; they belong to whoever touches them first.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")

_DEVICE, _IS_CUDA, _IS_CPU = (getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu"))
_ANYWHERE = {Tensor.copy_, Tensor.item, Tensor.tolist, Tensor.__repr__, Tensor.size, Tensor.dim, Tensor.numel,
             Tensor.__len__, Tensor.is_contiguous, Tensor.stride, Tensor.untyped_storage, Tensor.data_ptr,
             Tensor.element_size, Tensor.data.__set__, torch._has_compatible_shallow_copy_type}
_INDEXING = {Tensor.__getitem__, torch.Tensor.index}
_HERE_ALONE = {Tensor.numpy, Tensor.__array__}
_READ_BY_THE_HOST = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__",
                     "__format__", "is_nonzero", "equal", "allclose"}
_SHAPED_BY_DATA = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "new_tensor"}
_MAY_WAIT = _READ_BY_THE_HOST | _SHAPED_BY_DATA | {"copy_", "index", "__getitem__", "__setitem__", "where",
                                                   "repeat_interleave"}
_PINNING = {Tensor.pin_memory, Tensor.is_pinned}


class Apart(RuntimeError):
    """Tensors of several devices met."""


class PretendedEvent:
    """`torch.cuda.Event` of a GPU that computes while it is launched."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self) -> None:
        """This point of the stream."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Whether the GPU has passed it."""
        return True

    def synchronize(self) -> None:
        """Wait until the GPU has passed it."""

    def elapsed_time(self, end: "PretendedEvent") -> float:
        """Milliseconds."""
        return 1000 * (end._at - self._at)


def pretended_flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, _: Tensor, longest: int, __: int, *,
                    window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as its documentation defines it; its kernel needs a GPU."""
    assert (starts.dtype, enable_gqa, window_size[1]) == (torch.int32, True, 0)
    with torch._C.DisableTorchFunction():
        ends = starts.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    assert longest == max(lengths)
    text = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device, non_blocking=True)
    at = torch.arange(q.shape[0], device=q.device)
    left = q.shape[0] if window_size[0] < 0 else window_size[0]
    seen = (text[:, None] == text) & (at[:, None] >= at) & (at[:, None] - at <= left)
    k, v = (x.unsqueeze(2).expand(-1, -1, q.shape[1] // x.shape[1], -1).flatten(1, 2).double() for x in (k, v))
    scores = torch.einsum("tqe,sqe->qts", q.double(), k) / q.shape[2]**0.5
    return torch.einsum("qts,sqe->tqe", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).to(q.dtype)


class PretendedGpu(TorchFunctionMode):
    """While it is entered, `torch.device("cuda", 0)` is a place."""

    def __init__(self) -> None:
        super().__init__()
        self._where: dict[int, torch.device] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that no address is given out twice
        self.met = 0
        """Calls in which tensors of the GPU took part."""

        self.syncs: list[str] = []
        """Each call after which the host waits for the GPU: its name, and the line that made it."""

        self.used_elsewhere = 0
        """Tensors that were recorded as used in another stream."""

        self._coming: list[tuple[Tensor, Tensor]] = []
        """Copies to the host that nobody has waited for yet."""

    @property
    def num_syncs(self) -> int:
        """Calls after which the host waits for the GPU."""
        return len(self.syncs)

    def __torch_function__(self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        if func in (_DEVICE, _IS_CUDA, _IS_CPU):
            where = self.device_of(args[0]) or CPU
            return where if func == _DEVICE else (where.type == "cuda") == (func == _IS_CUDA)
        if func == Tensor.backward:
            with self:  # what is written in Python of the way back is watched as well
                return torch.autograd.backward(args[0], *args[1:2] or (options.get("gradient"),))
        if func in _PINNING:
            return args[0] if func == Tensor.pin_memory else False
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu) and not args[0].is_meta:
            return self._moved(func, args, options)
        if func == Tensor.copy_ and options.pop("non_blocking", False) and self._is_download(*args[:2]):
            with torch._C.DisableTorchFunction():
                self._coming.append((args[0], args[1].clone()))
            return args[0]
        if torch.device(options.get("device") or CPU).type == "meta":
            return func(*args, **options)
        if self._waits(func, args, options):
            self.syncs.append(f"{_name(func)} at {_caller()}")
        asked = options.pop("device", None)
        options.pop("pin_memory", None)
        if asked is not None and any(x.is_meta for x in _tensors(args[:1])):
            options["device"] = CPU  # `empty_like` of what has no memory
        where = torch.device(asked) if asked is not None else self._agreed(func, args, options)
        if func in _HERE_ALONE and where.type == "cuda":
            raise Apart(f"{_name(func)} of a tensor that is on {where}")
        if func is torch.mm and "out_dtype" in options:  # CUDA's alone: float32 sums of bfloat16 products
            wide = options.pop("out_dtype")
            args = tuple(part.to(wide) for part in args)
        result = func(*args, **options)
        if asked is not None and isinstance(result, Tensor) and self.device_of(result) not in (None, _numbered(where)):
            result = result.clone()  # `as_tensor` of what is elsewhere
        self._settle(result, where, args, options)
        return result

    def stand_ins(self) -> dict[str, object]:
        """What `torch.cuda` offers of streams and events, by name: everything is done at once, except copies to the
        host."""
        mode = self

        class Event(PretendedEvent):
            """Copies arrive when it is waited for."""

            def synchronize(self) -> None:
                mode.deliver()

        class Stream:
            """The same of a stream."""

            def __init__(self, device: torch.device) -> None:
                self.device = device

            def synchronize(self) -> None:
                mode.deliver()

        return {"Event": Event, "Stream": Stream, "current_stream": Stream, "stream": nullcontext,
                "synchronize": lambda _: mode.deliver()}

    def deliver(self) -> None:
        """Finish the copies to the host."""
        coming, self._coming = self._coming, []
        with torch._C.DisableTorchFunction():
            for place, value in coming:
                place.copy_(value)

    def record_stream(self, _: object) -> None:
        """In place of `Tensor.record_stream`."""
        self.used_elsewhere += 1

    def _is_download(self, to: Tensor, source: Tensor) -> bool:
        return (self.device_of(to) or CPU) == CPU and self.device_of(source) == GPU

    def device_of(self, x: Tensor) -> torch.device | None:
        """Where a tensor was put; None: nobody has seen its storage."""
        return CPU if x.is_mkldnn else x.device if x.is_meta else self._where.get(_storage(x))

    def _waits(self, func: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
        """Whether the host would wait for the GPU in this call; copies by `.to` are counted where they are made."""
        name = _name(func)
        if func in (torch.tensor, torch.as_tensor) and options.get("device") is not None:
            return torch.device(options["device"]).type == "cuda" and not isinstance(args[0], Tensor)
        if name not in _MAY_WAIT:  # nearly all calls, and looking at their operands takes time
            return False
        places = [self.device_of(x) for x in _tensors((args, options))]
        if GPU not in places:
            return False
        if func == Tensor.copy_:
            return CPU in places and not (options.get("non_blocking") or True in args[2:])
        if func in _INDEXING or func is Tensor.__setitem__:
            filled = func is Tensor.__setitem__ and not (isinstance(args[2], Tensor) and args[2].dim() > 0)
            return any(self._index_waits(one, filled) for one in (args[1] if isinstance(args[1], tuple) else args[1:2]))
        if name == "where":
            return len(args) + len(options) == 1
        if name == "repeat_interleave":
            return isinstance(args[-1], Tensor) and options.get("output_size") is None
        return True

    def _index_waits(self, index: Any, filled: bool) -> bool:
        """Whether one index of a tensor on the GPU makes the host wait. filled: a number is written there."""
        if not isinstance(index, Tensor):
            return not (index is None or index is Ellipsis or isinstance(index, int | slice))
        if index.dtype == torch.bool:  # its count is a shape, unless the elements are only overwritten
            return not filled
        return index.dim() == 0 or self.device_of(index) == CPU

    def _moved(self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        x, rest = args[0], list(args[1:])
        to = {Tensor.cpu: CPU, Tensor.cuda: GPU}.get(func)  # type: ignore[call-overload]
        if "device" in options:
            to = torch.device(options.pop("device"))
        elif rest and isinstance(rest[0], str | torch.device):
            to = torch.device(rest.pop(0))
        elif rest and isinstance(rest[0], Tensor):
            other = rest.pop(0)
            to, rest = self.device_of(other) or CPU, [other.dtype]
        dtype = options.get("dtype") or next((one for one in rest if isinstance(one, torch.dtype)), x.dtype)
        was = self.device_of(x) or CPU
        to = was if to is None else _numbered(to)
        if to != was and (to == CPU or not (options.get("non_blocking") or any(one is True for one in rest))):
            self.syncs.append(f"{_name(func)} at {_caller()}")
        moved = x.to(dtype)
        if moved is x and (to != was or options.get("copy")):
            moved = x.clone()
        self._put(moved, to)
        return moved

    def _put(self, x: Tensor, where: torch.device) -> None:
        if not x.is_mkldnn and not x.is_meta:
            self._where[_storage(x)] = _numbered(where)
            with torch._C.DisableTorchFunction():
                self._kept.append(x.untyped_storage())

    def _agreed(self, func: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> torch.device:
        """The operands' device. Raises Apart."""
        tensors = list(_tensors((args, options)))
        known = [(x, where) for x in tensors if (where := self.device_of(x)) is not None]
        if any(where.type == "cuda" for _, where in known):
            self.met += 1
        if not known:
            return CPU
        if func is Tensor.__setitem__ or func in _INDEXING or func in _ANYWHERE:
            own = self.device_of(args[0]) or CPU
            index = [where for x, where in known if any(x is one for one in _tensors(args[1:2]))]
            if (func in _INDEXING or func is Tensor.__setitem__) and own == CPU and GPU in index:
                raise Apart(f"{_name(func)}: an index on {GPU} into a tensor on {CPU}")
            value = [(x, where) for x, where in known if any(x is one for one in _tensors(args[2:3]))]
            if func is Tensor.__setitem__ and index and any(where != own and x.dim() for x, where in value):
                raise Apart(f"{_name(func)}: values on another device than {own}")
            return own
        wide = {where for x, where in known if x.dim() > 0}
        if len(wide) > 1:
            shapes = ", ".join(f"{tuple(x.shape)} on {where}" for x, where in known)
            raise Apart(f"{_name(func)}: {shapes}")
        if wide:
            # A single number of the processor may meet anything on a GPU, but not the other way round.
            (only,) = wide
            if only == CPU and any(where == GPU for _, where in known):
                raise Apart(f"{_name(func)}: a number on {GPU} beside tensors on {CPU}")
            return only
        return GPU if any(where == GPU for _, where in known) else CPU

    def _settle(self, result: Any, where: torch.device, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        given = {_storage(x): self.device_of(x) for x in _tensors((args, options))}
        for x in _tensors(result):
            if given.get(_storage(x)) is None:  # new, or unknown until now; views and what changed in place stay
                self._put(x, where)


def _numbered(device: torch.device) -> torch.device:
    return GPU if device.type == "cuda" else CPU


def _storage(x: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        # Packed weights (mkldnn) have none: they are the processor's own affair.
        return 0 if x.is_mkldnn or x.is_meta else int(x.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)


def _caller() -> str:
    """The innermost line that is neither torch's nor this file's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))
