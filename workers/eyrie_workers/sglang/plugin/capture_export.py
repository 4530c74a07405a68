"""Writes the hidden states that SGLang computes to files: aux layers and the final state of every prompt token.

SGLang 0.5.23 returns aux states over HTTP as JSON, six times their size, and never the final state. This module is part
of the model package that SGLang imports in each scheduler process (SGLANG_EXTERNAL_MODEL_PACKAGE). Where the variable
EYRIE_CAPTURE_DIR is set, it wraps the logits processor, which every model calls with all of them: the states after the
final norm, and the layers that `--return-aux-hidden-state-layer-ids` selects. What the model computes is not changed.

A request whose id begins with PREFIX is written, one file per part of its prompt (SGLang may prefill a long prompt in
several), named `<request id>.<first token>.safetensors`, under another name until it is whole. With tensor parallelism
every rank has the whole states; rank 0 writes.
"""

# M tokens of the batch, A aux layers, H hidden

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.layers.logits_processor import LogitsProcessor

PREFIX = "eyrie-states-"
_DIRECTORY = os.environ.get("EYRIE_CAPTURE_DIR")
_forward = LogitsProcessor.forward


def _exporting_forward(self: LogitsProcessor, input_ids: Any, hidden_states: Any, lm_head: Any, logits_metadata: Any,
                       aux_hidden_states: Any = None, *others: Any, **named: Any) -> Any:
    """The stock method, after the states of a prefill batch are written."""
    batch = logits_metadata
    if aux_hidden_states is not None and getattr(batch, "rids", None) and batch.forward_mode.is_extend():
        _write(hidden_states, aux_hidden_states, batch)
    return _forward(self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *others, **named)


def _write(last_MH: torch.Tensor, aux: Any, batch: Any) -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    layers = list(aux) if not isinstance(aux, torch.Tensor) else list(aux.split(last_MH.shape[-1], dim=-1))
    at = 0
    for name, begin, length in zip(batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False):
        here = slice(at, at + length)
        at += length
        if name.startswith(PREFIX):
            states = torch.stack([layer[here] for layer in (*layers, last_MH)], dim=1).contiguous().cpu()
            path = Path(str(_DIRECTORY)) / f"{name}.{begin}.safetensors"
            save_file({"states": states}, f"{path}.part")
            os.replace(f"{path}.part", path)


if _DIRECTORY is not None:
    LogitsProcessor.forward = _exporting_forward
