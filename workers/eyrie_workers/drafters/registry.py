"""The table of drafter families. Stages name none of them: they ask here, and see rows (`drafters.family`).

Adding a family means a file with its architecture, objective and row, and a line here. A family that is not trained has
neither checkpoint nor objective: a function that makes the drafter, in a table of its own.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters import dflash, eagle1, hydra, medusa, standalone
from eyrie_workers.drafters.checkpoint.files import CheckpointInvalid, read_config
from eyrie_workers.drafters.eagle3 import family as eagle3_family
from eyrie_workers.drafters.family import Family, Layers
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.model import TargetModel

FAMILIES: dict[str, Family] = {family.name: family for family in (
    eagle3_family.FAMILY,
    eagle1.FAMILY,
    medusa.FAMILY,
    hydra.FAMILY,
    standalone.FAMILY,
    dflash.FAMILY,
)}


UNTRAINED: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
"""`Setting.method` -> a drafter that needs no checkpoint."""


def family_named(name: str) -> Family:
    """The family of a `DrafterSpec.family`. Raises InvalidInput for an unknown one."""
    if name not in FAMILIES:
        raise InvalidInput(f"drafter.family {name!r} is not known", f"use one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def layers_of(families: Iterable[str], chosen: Layers, num_layers: int) -> Layers:
    """What has to be captured for these families: every layer that one of them reads, ascending.

    chosen  the layers chosen for families that fuse several.
    """
    return tuple(sorted({layer for name in families for layer in family_named(name).layers(chosen, num_layers)}))


def open_drafter(directory: Path, target: TargetModel) -> Drafter:
    """Load the drafter in `directory`, of whatever family, ready for the engine.

    Raises ArtifactMissing without one, CheckpointInvalid when it is damaged, of no known family or for another target.
    """
    architectures = read_config(directory).get("architectures")
    for family in FAMILIES.values():
        if architectures == [family.architecture]:
            with device_scope(target.device):
                return family.serve(directory, target)
    raise CheckpointInvalid(f"{directory} holds a drafter of architecture {json.dumps(architectures)}",
                            f"use one of {', '.join(family.architecture for family in FAMILIES.values())}")


def open_method(method: str, directory: Path | None, target: TargetModel) -> Drafter | None:
    """The drafter of a `Setting.method`: the one in `directory`, an untrained one, or none for `off`.

    Raises InvalidInput for a method that is not known or lacks its directory, and what `open_drafter` raises.
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
