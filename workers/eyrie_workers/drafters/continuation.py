"""Training that continues from a published drafter (`drafter.init_from`) instead of from new parameters.

The drafter is taken as it is: sizes, layers, variant flags and draft vocabulary are its own, because its weights mean
nothing with others. What the spec sets must agree with it. `drafters.published` converts its form and refuses one that
does not fit the target.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.drafter import DrafterSpec, PublishedDrafter
from eyrie_api.v1alpha1.families import VARIANT_FIELDS
from eyrie_workers.drafters.checkpoint.card import weights_digest
from eyrie_workers.drafters.family import FamilyImplementation, Layers
from eyrie_workers.drafters.published import adopt, fetch
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary

_FIELD = "drafter.init_from"
_ATTRIBUTES = {"num_attention_heads": "num_heads"} | {name: name for name in (
    "hidden_size", "intermediate_size", "num_layers", "draft_vocab_size", "aux_layers", "max_position_embeddings",
    *VARIANT_FIELDS)}
"""Fields of `DrafterSpec`, and attributes of a drafter's configuration that hold their values."""

_ABSENT = object()


@dataclass(frozen=True)
class Head:
    """A drafter that training continues from."""

    module: nn.Module
    """float32, on the default device."""

    spec: DrafterSpec
    """As requested, with the drafter's own variant flags."""

    layers: Layers | None
    """`hidden_states` indices it fuses; None for families that fuse none."""

    vocabulary: DraftVocabulary | None
    """None for families that predict over the whole vocabulary."""

    digest: str
    """Of its configuration and weights (`checkpoint.card.weights_digest`)."""


def load_head(spec: DrafterSpec, family: FamilyImplementation, target: Path) -> Head:
    """The drafter of `spec.init_from`, for the target in directory `target`.

    Raises InvalidInput for a drafter of another family, or of other values than the spec sets, naming both; and what
    `published.fetch` and `published.adopt` raise.
    """
    assert spec.head is not None
    if family.load is None:
        raise InvalidInput(f"{_FIELD} is set, and training of {family.name} drafters cannot continue from a checkpoint",
                           "leave it out, or train another family")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "head"
        found = adopt(fetch(_FIELD, spec.head.path, spec.head.revision), directory, target)
        if found.name != family.name:
            raise InvalidInput(f"{_FIELD} {spec.init_from!r} is of family {found.name!r}, and drafter.family is "
                               f"{family.name!r}", f"set drafter.family to {found.name!r}")
        module, digest = family.load(directory).float(), weights_digest(directory)
    config: Any = module.config
    for field, attribute in _ATTRIBUTES.items():
        wanted, own = getattr(spec, field), _value(config, attribute)
        if own is not _ABSENT and wanted not in (None, False) and wanted != own:
            raise InvalidInput(f"drafter.{field} is {wanted}, and that of {_FIELD} {spec.init_from!r} is {own}",
                               f"leave drafter.{field} out, or train without {_FIELD}")
    flags = {field: _value(config, field) for field in VARIANT_FIELDS if _value(config, field) is not _ABSENT}
    layers = _value(config, "aux_layers")
    vocabulary = None if family.row.whole_vocabulary else getattr(module, "vocabulary", None)
    return Head(module, spec.model_copy(update=flags), None if layers is _ABSENT else layers, vocabulary, digest)


def layers_of_head(head: PublishedDrafter, target: Path) -> Layers:
    """The `hidden_states` indices that a drafter fuses; empty for families that fuse none. Raises as `load_head`."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "head"
        family = adopt(fetch(_FIELD, head.path, head.revision), directory, target)
        layers = _ABSENT if family.load is None else _value(family.load(directory).config, "aux_layers")
    return tuple(layers) if isinstance(layers, tuple) else ()


def _value(config: Any, name: str) -> Any:
    decoder = getattr(config, "decoder", None)  # dflash: the layers' own configuration
    return getattr(config, name, getattr(decoder, name, _ABSENT))
