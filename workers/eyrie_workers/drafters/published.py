"""Published drafters: fetched, converted to the form that Eyrie and SGLang load, and checked; training from them.

    fetch            directory or Hub id -> directory
    adopt            directory -> a checkpoint of one of Eyrie's families; what does not fit is refused
    load_head        the drafter that training continues from (`drafter.init_from`)
    copy_mtp_layers  the MTP layers of a target, as a drafter directory

The forms that are converted are those of `eyrie_api.planning.drafter_forms`, which decides by config.json and the names
of the tensors; submission applies the same rules. Pickled or sharded weights become one safetensors file. A drafter
without a card has no digest of its target: its sizes, layers and vocabulary are compared, and whether it is of exactly
this model is shown by its acceptance alone.

A drafter that training continues from is taken as it is: sizes, layers, variant flags and draft vocabulary are its own,
because its weights mean nothing with others. What the spec sets must agree with it.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from eyrie_api.contract.drafter import DrafterSpec, PublishedDrafter
from eyrie_api.contract.families import VARIANT_FIELDS
from eyrie_api.errors import ArtifactMissing, InvalidInput
from eyrie_api.planning.drafter_forms import INIT_FROM, UNSERVED, own_settings, require_agreement
from eyrie_api.planning.drafter_rules import Target
from eyrie_api.planning.sglang_support import MARK, mtp_tensors
from eyrie_workers.drafters.card import weights_digest
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.checkpoint import CheckpointInvalid, read_config, write_checkpoint
from eyrie_workers.drafters.export import convert_directory
from eyrie_workers.drafters.family import FamilyImplementation, Layers, family_of
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.device import CPU
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import CheckpointTensors, fetch_snapshot


def copy_mtp_layers(target: Path, out: Path) -> None:
    """Write the MTP layers of the target in `target` to `out`, replacing an existing directory. Raises
    UnsupportedTarget when it has none or SGLang does not draft with them, ArtifactCorrupt for weights that cannot be
    read."""
    config, stored = read_json(target / "config.json"), CheckpointTensors(target, None, CPU, stored=True)
    tensors = {name: stored[name] for name in mtp_tensors(stored, config)}
    write_checkpoint(out, dict(config) | {"eyrie": {"drafter": MARK}}, tensors)


def fetch(field: str, path: str, revision: str | None = None) -> Path:
    """The directory of a drafter; a Hub id is fetched into the Hub's cache.

    field   of the job, for the messages

    Raises ArtifactMissing for a path that does not exist, TargetNotFound for a Hub id that cannot be fetched.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ArtifactMissing(f"{field} {path!r} is not a directory", "give a drafter's directory or a Hub id org/name")
    return fetch_snapshot(field, path, revision)


def adopt(source: Path, out: Path, target: Path) -> FamilyImplementation:
    """Write the drafter in `source` to `out` as a checkpoint, replacing an existing one; returns its family. Raises
    CheckpointInvalid for a drafter that does not fit `target` or whose form no family reads, with all faults;
    ArtifactMissing and ArtifactCorrupt for files that cannot be read."""
    described = Target(target, read_json(target / "config.json"))
    try:
        convert_directory(source, out, described.architecture, described.num_layers)
    except InvalidInput as fault:
        raise CheckpointInvalid(f"drafter {source.name}: {fault.message}", fault.hint) from fault
    faults = [finding for finding in check_directory(out, target_dir=target)
              if finding.severity == "error" and finding.code not in UNSERVED]
    if faults:
        raise CheckpointInvalid(f"drafter {source.name}: {'; '.join(fault.what for fault in faults)}", faults[0].hint)
    family = family_of(read_config(out))
    assert family is not None, "the validator refuses unknown architectures"
    return family


@dataclass(frozen=True)
class Head:
    module: nn.Module
    """float32, on the default device."""

    spec: DrafterSpec
    """As requested, with the drafter's own variant flags."""

    layers: Layers | None
    """`hidden_states` indices it fuses; None for families that fuse none."""

    vocabulary: DraftVocabulary | None
    """None for families that predict over the whole vocabulary."""

    digest: str
    """Of its configuration and weights (`card.weights_digest`)."""


def load_head(spec: DrafterSpec, family: FamilyImplementation, target: Path) -> Head:
    """The drafter of `spec.init_from`, for the target in directory `target`. Raises InvalidInput for a drafter of
    another family, or of other values than the spec sets, naming both; and what `published.fetch` and `published.adopt`
    raise."""
    assert spec.head is not None
    if not family.row.continues:
        raise InvalidInput(f"{INIT_FROM} is set, and training of {family.name} drafters cannot continue from a "
                           "checkpoint", "leave it out, or train another family")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "head"
        actual = adopt(fetch(INIT_FROM, spec.head.path, spec.head.revision), directory, target)
        config = read_config(directory)
        require_agreement(spec, actual.name, config)
        module, digest = family.load(directory, None).float(), weights_digest(directory)
    own = own_settings(family.name, config)
    vocabulary = None if family.row.whole_vocabulary else getattr(module, "vocabulary", None)
    flags = {field: own[field] for field in VARIANT_FIELDS if field in own}
    return Head(module, spec.model_copy(update=flags), own.get("aux_layers"), vocabulary, digest)


def layers_of_head(head: PublishedDrafter, target: Path) -> Layers:
    """The `hidden_states` indices that a drafter fuses; empty for families that fuse none. Raises as `load_head`."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "head"
        family = adopt(fetch(INIT_FROM, head.path, head.revision), directory, target)
        if not family.row.continues:
            return ()
        family.load(directory, None)  # refuses what training would refuse
        return own_settings(family.name, read_config(directory)).get("aux_layers", ())
