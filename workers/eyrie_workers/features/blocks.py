"""Encodes a row's states into the tensors of a block, and decodes them; without the bytes.

The store writes these tensors and reads them back; the stream passes them on directly (`features.streaming`), so a
drafter is trained on the same numbers either way.

Legend: N tokens of a block, M supervised positions of it, A aux layers, H hidden, K top-k
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eyrie_api.v1alpha1.codecs import final_codec
from eyrie_workers.features.codecs import decode_into, encode
from eyrie_workers.features.shard_format import (
    FeatureRow,
    StoreFormat,
    TopKLogits,
    block_sections,
    supervised_positions,
)

_TOPK_SECTIONS = ("ids", "logits", "tail", "mass", "choice")


def encode_block(row: FeatureRow, fmt: StoreFormat, tokens: range) -> tuple[dict[str, Tensor], int]:
    """The sections of a row's tokens by name, and the number of supervised positions among them."""
    here = slice(tokens.start, tokens.stop)
    is_supervised = supervised_positions(row.loss_mask.to(torch.bool))
    before, num_supervised = int(is_supervised[:tokens.start].sum()), int(is_supervised[here].sum())
    tensors = _named("aux", *encode(fmt.codec, row.aux[here]))
    if fmt.final_state == "keep":
        tensors |= _named("final", *encode(final_codec(fmt.codec), row.last[here][is_supervised[here]]))
    else:
        assert row.topk_logits is not None
        dtypes = {section.name: section.dtype for section in block_sections(fmt, 1, 1)}
        tensors |= {name: getattr(row.topk_logits, name)[before:before + num_supervised].to(dtypes[name])
                    for name in _TOPK_SECTIONS}
    return tensors, num_supervised


def decode_block(fmt: StoreFormat, tensors: Mapping[str, Tensor], supervised_N: Tensor, aux_NAH: Tensor,
                 last_NH: Tensor) -> None:
    """Write the states to `aux_NAH` and, where they are stored, the final states to `last_NH`, which holds zeros."""
    decode_into(fmt.codec, tensors["aux_codes"], tensors.get("aux_scales"), aux_NAH)
    if fmt.final_state == "keep":
        _place_final(fmt, tensors, supervised_N, last_NH)


def concat_topk_logits(parts: Sequence[Mapping[str, Tensor]]) -> TopKLogits:
    """Top-k logits of the blocks of some rows, in order."""
    ids, logits, tail, mass, choice = (torch.cat([part[name] for part in parts]) for name in _TOPK_SECTIONS)
    return TopKLogits(ids.to(torch.int64), logits, tail, mass, choice.to(torch.int64))


def _named(name: str, codes: Tensor, scales: Tensor | None) -> dict[str, Tensor]:
    return {f"{name}_codes": codes} | ({} if scales is None else {f"{name}_scales": scales})


def _place_final(fmt: StoreFormat, tensors: Mapping[str, Tensor], supervised_N: Tensor, last_NH: Tensor) -> None:
    codes, scales, codec = tensors["final_codes"], tensors.get("final_scales"), final_codec(fmt.codec)
    where = supervised_N.nonzero().squeeze(1)
    if where.numel() == 0:
        return
    first, final = int(where[0]), int(where[-1])
    if final - first + 1 == where.numel():  # one contiguous answer: decoded in place, without a temporary
        decode_into(codec, codes, scales, last_NH[first:final + 1])
        return
    decoded = last_NH.new_empty(where.numel(), last_NH.shape[1])
    decode_into(codec, codes, scales, decoded)
    last_NH[where] = decoded
