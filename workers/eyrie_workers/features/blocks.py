"""Encodes states into the tensors of blocks, and decodes them; without the bytes.

`encode_states` works on the device that holds the states and on all tokens of a forward pass at once; `block_of` cuts
its result into blocks, which copies nothing. The store writes these tensors and reads them back; the stream decodes
them directly (`features.streaming`), so a drafter is trained on the same numbers either way.

Legend: N tokens, M supervised positions of them, A aux layers, H hidden, K top-k
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eyrie_api.v1alpha1.capture import Codec, final_codec
from eyrie_workers.features.codecs import decode_into, encode
from eyrie_workers.features.shard_format import StoreFormat, TopKLogits, block_sections

_TOPK_SECTIONS = ("ids", "logits", "tail", "mass", "choice")

_ENCODED_TOGETHER = 2048
"""Tokens encoded at a time: some codecs need several float32 temporaries of the states, which a device that holds a
large target has no room for at a whole pass's size."""


def encode_states(fmt: StoreFormat, aux_NAH: Tensor, last_NH: Tensor, supervised_M: Tensor,
                  topk_logits: TopKLogits | None = None) -> dict[str, Tensor]:
    """The sections of N tokens by name, on the device of the states: `aux_*` have a row per token, all others one per
    supervised position.

    supervised_M  the supervised positions, on the device of the states.
    topk_logits   of these positions, where the format stores them.
    """
    tensors = _encoded("aux", fmt.codec, aux_NAH)
    if fmt.final_state == "keep":
        return tensors | _encoded("final", final_codec(fmt.codec), last_NH.index_select(0, supervised_M))
    assert topk_logits is not None
    dtypes = {section.name: section.dtype for section in block_sections(fmt, 1, 1)}
    return tensors | {name: getattr(topk_logits, name).to(dtypes[name]) for name in _TOPK_SECTIONS}


def block_of(tensors: Mapping[str, Tensor], tokens: range, supervised: range) -> dict[str, Tensor]:
    """The sections of a block: these tokens and these supervised positions of what `encode_states` returned."""
    ranges = {name: tokens if name.startswith("aux_") else supervised for name in tensors}
    return {name: tensor[ranges[name].start:ranges[name].stop] for name, tensor in tensors.items()}


def decode_block(fmt: StoreFormat, tensors: Mapping[str, Tensor], supervised_N: Tensor, aux_NAH: Tensor,
                 last_NH: Tensor) -> None:
    """Write the states to `aux_NAH` and, where they are stored, the final states to `last_NH`, which holds zeros.

    supervised_N  on the CPU, also where everything else is on another device: its positions are needed on the host.
    """
    decode_into(fmt.codec, tensors["aux_codes"], tensors.get("aux_scales"), aux_NAH)
    if fmt.final_state == "keep":
        _place_final(fmt, tensors, supervised_N, last_NH)


def concat_topk_logits(parts: Sequence[Mapping[str, Tensor]]) -> TopKLogits:
    """Top-k logits of the blocks of some rows, in order."""
    ids, logits, tail, mass, choice = (torch.cat([part[name] for part in parts]) for name in _TOPK_SECTIONS)
    return TopKLogits(ids.to(torch.int64), logits, tail, mass, choice.to(torch.int64))


def _encoded(name: str, codec: Codec, states: Tensor) -> dict[str, Tensor]:
    if codec in ("float32", "bfloat16"):
        return {f"{name}_codes": encode(codec, states)[0]}
    parts = [encode(codec, part) for part in states.split(_ENCODED_TOGETHER)]
    return {f"{name}_codes": torch.cat([codes for codes, _ in parts]),
            f"{name}_scales": torch.cat([scales for _, scales in parts if scales is not None])}


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
    last_NH[where.to(last_NH.device)] = decoded
