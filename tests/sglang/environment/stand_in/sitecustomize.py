"""Runs at the start of every Python process of the test server (it lies on their PYTHONPATH).

torchvision's published wheel is linked against CUDA. Beside a CPU build of torch its library does not load, and its
Python then fails at import, because it registers shapes for two operators that library should have declared. SGLang
imports torchvision for multimodal models and never calls those operators here. So their schemas are declared, and
nothing else, at the moment torchvision is looked for.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is asked for the first time."""

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _SCHEMAS:
                self.library.define(schema)
        return None


_KEPT = _DeclareOperators()  # the library unregisters its operators when it is collected
sys.meta_path.insert(0, _KEPT)
