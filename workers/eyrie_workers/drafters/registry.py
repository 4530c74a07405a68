"""Look up drafter families by name or checkpoint.

The families are the rows of `eyrie_api.v1alpha1.families`. The module of a row is imported when the family is first
used, so that a program loads only the families it needs.
"""

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from eyrie_api.decisions.sglang_support import holds_mtp_layers
from eyrie_api.errors import InvalidInput, UnsupportedTarget
from eyrie_api.v1alpha1.families import FAMILIES, DrafterFamily
from eyrie_workers.drafters.checkpoint.files import CheckpointInvalid, read_config
from eyrie_workers.drafters.family import FamilyImplementation, Layers
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.model import TargetModel

UNTRAINED: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
"""`Setting.method` -> constructor, for drafters without a checkpoint."""


def family_named(name: str) -> FamilyImplementation:
    """The implementation of a `DrafterSpec.family`. Raises InvalidInput for an unknown name."""
    if name not in FAMILIES:
        raise InvalidInput(f"drafter.family {name!r} is not known", f"use one of {', '.join(FAMILIES)}")
    return _implementation(FAMILIES[name])


def family_of(architectures: object) -> FamilyImplementation | None:
    """The family of a checkpoint, from `architectures` in its config.json; None when it is of no family."""
    for row in FAMILIES.values():
        if architectures == [row.architecture]:
            return _implementation(row)
    return None


def _implementation(row: DrafterFamily) -> FamilyImplementation:
    family = import_module(row.module).FAMILY
    # A wrong row is a programming error: the family would be trained or served as another one.
    assert isinstance(family, FamilyImplementation), f"{row.module}.FAMILY is not a FamilyImplementation"
    assert family.name == row.name, f"{row.module}.FAMILY is {family.name!r}, its row in FAMILIES is {row.name!r}"
    return family


def layers_of(families: Iterable[str], fused: Layers, num_layers: int) -> Layers:
    """Layers to capture for these families: every layer that one of them reads, ascending.

    fused  layers selected for families that fuse several
    """
    return tuple(sorted({layer for name in families for layer in family_named(name).layers(fused, num_layers)}))


def open_drafter(directory: Path, target: TargetModel) -> Drafter:
    """Load the drafter in `directory` for decoding with `target`.

    Raises ArtifactMissing when files are missing, CheckpointInvalid when it is damaged, of no known family or trained
    for another target, UnsupportedTarget for the target's own MTP layers.
    """
    config = read_config(directory)
    if holds_mtp_layers(config):
        raise UnsupportedTarget(f"{directory} holds MTP layers of the target, which Eyrie does not compute",
                                "use engine sglang")
    architectures = config.get("architectures")
    family = family_of(architectures)
    if family is None:
        raise CheckpointInvalid(f"{directory} holds a drafter of architecture {json.dumps(architectures)}",
                                f"use one of {', '.join(row.architecture for row in FAMILIES.values())}")
    with device_scope(target.device):
        return family.load_proposer(directory, target)


def open_method(method: str, directory: Path | None, target: TargetModel) -> Drafter | None:
    """The drafter of a `Setting.method`: the one in `directory`, an untrained one, or None for `off`.

    Raises InvalidInput for an unknown method or a missing directory, and what `open_drafter` raises.
    """
    if method == "off":
        return None
    if method in UNTRAINED:
        return UNTRAINED[method]()
    if method != "drafter":
        raise InvalidInput(f"method {method!r} is not known", f"use drafter, {', '.join(UNTRAINED)} or off")
    if directory is None:
        raise InvalidInput("method 'drafter' has no drafter directory", "name it, or use another method")
    return open_drafter(directory, target)
