"""Rules for the tensors of an EAGLE-3 drafter against its `config.json`.

SGLang's loader skips unknown names and leaves missing tensors at their initial values, so the sets of names must be
equal; then shapes, dtypes, the vocabulary maps and the values are checked.

    D draft vocabulary, V target vocabulary
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from eyrie_workers.drafters.checkpoint.file_format import DTYPES
from eyrie_workers.drafters.eagle3.directory_format import MAPS, Shape, canonical_name, expected_shapes
from eyrie_workers.drafters.validation.finding import Finding, error, warning
from eyrie_workers.drafters.validation.values import value_rules

# Prefixes of tensors that exist only when a flag is set: a finding then names the flag.
_FLAGS = {"fc_norm.": "fc_norm", "input_norm.": "norm_before_fc", "fc.bias": "bias"}


def tensor_rules(shape: Shape, shares_head: bool, stored: Mapping[str, Tensor]) -> Iterator[Finding]:
    """All rules for the tensors. `shares_head`: draft_vocab_size is null, lm_head is the target's."""
    counted = Counter(canonical_name(name) for name in stored)
    for name, times in sorted(counted.items()):
        if times > 1:
            yield error("tensor-twice", f"{name} is stored {times} times under different spellings",
                        "keep the one that was trained")
    if any(name.startswith("model.") for name in stored):
        yield warning("tensor-prefix", "tensor names begin with 'model.': SGLang reads them, vLLM does not",
                      "write the names without it")
    tensors = {canonical_name(name): tensor for name, tensor in stored.items()}
    shapes = expected_shapes(shape)
    if shares_head:
        shapes.pop("lm_head.weight")
    yield from _name_rules(shape, shapes, tensors)
    for name in sorted(set(shapes) & set(tensors)):
        if tuple(tensors[name].shape) != shapes[name]:
            yield error("tensor-shape", f"{name} has shape {list(tensors[name].shape)}, config.json implies "
                        f"{list(shapes[name])}", "config.json and weights belong to different drafters: export again")
    yield from _dtype_rules(tensors)
    yield from value_rules({name: tensor for name, tensor in tensors.items() if name not in MAPS})
    if "d2t" in tensors:
        yield from _vocabulary_rules(shape, tensors["d2t"], tensors.get("t2d"))


def _name_rules(shape: Shape, shapes: Mapping[str, tuple[int, ...]],
                tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Missing and unknown names. Names with a more specific finding are reported there and removed from the sets."""
    missing, unknown = set(shapes) - set(tensors), set(tensors) - set(shapes)
    yield from _flag_rules(missing, unknown)
    yield from _map_rules(shape, missing, unknown, tensors)
    yield from _layer_norm_rules(shape, missing, tensors)
    if "embed_tokens.weight" in unknown:
        unknown.remove("embed_tokens.weight")
        yield warning("embedding-ignored", "embed_tokens.weight is stored: SGLang drafts with the target's embedding, "
                      "and a hot swap of these weights would write this one into the target",
                      "leave it out, unless hidden_size differs from the target's")
    if missing:
        yield error("tensor-missing", f"tensors are missing: {', '.join(sorted(missing))}: SGLang would leave them at "
                    "random", "export the drafter again")
    if unknown:
        yield error("tensor-unknown", f"unknown tensors: {', '.join(sorted(unknown))}: SGLang would skip them",
                    "export the drafter again, or set the flag in config.json that asks for them")


def _flag_rules(missing: set[str], unknown: set[str]) -> Iterator[Finding]:
    for prefix, flag in _FLAGS.items():
        extra = sorted(name for name in unknown if name.startswith(prefix))
        if extra:
            unknown -= set(extra)
            yield error("flag-missing", f"{', '.join(extra)} are there but {flag} is not set: SGLang would skip them",
                        f"write {flag} true, as it was trained")
        lacking = sorted(name for name in missing if name.startswith(prefix))
        if lacking:
            missing -= set(lacking)
            yield error("flag-without-tensors", f"{flag} is set but {', '.join(lacking)} are missing: SGLang would "
                        "leave them as initialised", f"write {flag} false if it was trained without, else export again")


def _map_rules(shape: Shape, missing: set[str], unknown: set[str],
               tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    if "t2d" in missing and "d2t" in tensors:
        missing.remove("t2d")
        yield warning("t2d-missing", "t2d is missing: SGLang and vLLM do not read it, trainers do",
                      "store it with d2t")
    if "d2t" in missing:
        missing -= set(MAPS)
        yield error("d2t-missing", f"d2t is missing for a draft vocabulary of {shape.draft_vocab_size} in "
                    f"{shape.vocab_size}: draft ids would be used as target ids", "export the drafter again")
    if shape.draft_vocab_size == shape.vocab_size:
        if "d2t" in unknown:
            yield warning("maps-needless", "d2t is stored although the draft vocabulary is the target's: vLLM "
                          "refuses to load it", "leave d2t and t2d out")
        unknown -= set(MAPS)


def _layer_norm_rules(shape: Shape, missing: set[str], tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    for number in range(1, shape.num_layers):
        norm, other = f"layers.{number}.hidden_norm.weight", f"layers.{number}.input_layernorm.weight"
        if norm in missing and other in tensors:
            missing.remove(norm)
            yield error("layer-norm-name", f"layer {number} has input_layernorm but no hidden_norm, which is the norm "
                        "SGLang applies there", f"store a copy of {other} as {norm}")
        elif other in missing and norm in tensors:
            missing.remove(other)
            yield warning("layer-norm-vllm", f"layer {number} has hidden_norm but no input_layernorm, which is the "
                          "norm vLLM applies there", f"store a copy of {norm} as {other}")
        elif norm in tensors and other in tensors and not torch.equal(tensors[norm], tensors[other]):
            yield warning("layer-norm-vllm", f"hidden_norm and input_layernorm of layer {number} differ: SGLang "
                          "applies the first, vLLM the second", "store the trained one under both names")


def _dtype_rules(tensors: Mapping[str, Tensor]) -> Iterator[Finding]:
    for name, wanted in (("d2t", torch.int64), ("t2d", torch.bool)):
        if name in tensors and tensors[name].dtype != wanted:
            yield error("map-dtype", f"{name} is {_dtype_name(tensors[name].dtype)}, not {_dtype_name(wanted)}",
                        f"store {name} as {_dtype_name(wanted)}")
    dtypes = {_dtype_name(tensor.dtype) for name, tensor in tensors.items() if name not in MAPS}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        yield error("tensor-dtype", f"parameters are stored as {', '.join(sorted(dtypes))}",
                    f"store all of them as one of {', '.join(DTYPES)}")


def _vocabulary_rules(shape: Shape, d2t: Tensor, t2d: Tensor | None) -> Iterator[Finding]:
    vocab = shape.vocab_size
    if d2t.dtype != torch.int64 or d2t.shape != (shape.draft_vocab_size,):
        return
    if t2d is not None and (t2d.dtype != torch.bool or t2d.shape != (vocab,)):
        t2d = None
    ids = d2t + torch.arange(d2t.numel())
    outside = int(ids.min()) < 0 or int(ids.max()) >= vocab
    # Target ids stored in place of offsets are ascending and in range, and as offsets leave the vocabulary or disagree
    # with t2d.
    like_ids = _ascending(d2t) and int(d2t.min()) >= 0 and int(d2t.max()) < vocab
    agrees = t2d is None or (not outside and _names(ids, t2d))
    if like_ids and (outside or (t2d is not None and not agrees and _names(d2t, t2d))):
        yield error("d2t-absolute", "d2t holds target ids, not offsets: SGLang adds the draft id to each, so token "
                    f"{int(d2t[-1])} would become {int(ids[-1])}", "store d2t - arange(D)")
    elif outside:
        yield error("d2t-range", f"d2t leaves the target's vocabulary of {vocab}: ids {int(ids.min())} to "
                    f"{int(ids.max())}", "d2t holds offsets, target id minus draft id: export the drafter again")
    elif not _ascending(ids):
        yield error("d2t-order", "the target ids of d2t are not strictly ascending",
                    "sort the draft vocabulary, and lm_head's rows with it")
    elif not agrees:
        yield error("t2d-disagrees", "t2d and d2t name different tokens", "export the drafter again")
    elif t2d is None and like_ids and d2t.numel() > 1:
        yield warning("d2t-unconfirmed", "d2t is strictly ascending, as ids are and offsets rarely are, and without "
                      "t2d the two cannot be distinguished", "confirm that it holds offsets, and store t2d")


def _ascending(values: Tensor) -> bool:
    return bool((values.diff() > 0).all())


def _names(ids: Tensor, t2d: Tensor) -> bool:
    """t2d marks exactly these ids."""
    if int(ids.min()) < 0 or int(ids.max()) >= t2d.numel():
        return False
    member = torch.zeros_like(t2d)
    member[ids] = True
    return torch.equal(member, t2d)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def embedding_rules(tensors: Mapping[str, Tensor], target_rows: Tensor | None) -> Iterator[Finding]:
    """A stored embedding must be the target's: the drafter is served with the target's."""
    own = tensors.get("embed_tokens.weight", tensors.get("model.embed_tokens.weight"))
    if own is None or target_rows is None or own.dim() != 2 or own.shape[1] != target_rows.shape[1]:
        return
    rows = min(own.shape[0], target_rows.shape[0])
    if not torch.equal(own[:rows].bfloat16(), target_rows[:rows].bfloat16()):
        yield error("embedding-differs", "embed_tokens.weight is not the target's: SGLang replaces it by the target's, "
                    "which the drafter was not trained on", "train with the target's embedding, frozen")
