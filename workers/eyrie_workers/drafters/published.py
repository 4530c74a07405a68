"""Published drafters: fetched, converted to the form that Eyrie and SGLang load, and checked; training from them.

    fetch            directory or Hub id -> directory
    adopt            directory -> a checkpoint of one of Eyrie's families; what does not fit is refused
    load_head        the drafter that training continues from (`drafter.init_from`)
    copy_mtp_layers  the MTP layers of a target, as a drafter directory

Forms that are converted:

- EAGLE-3 in speculators format, EAGLE-1/2 in its authors' format (`drafters.export`);
- EAGLE-3 under another architecture name (`LlamaForCausalLM` as its authors write, `Eagle3LlamaForCausalLM`). Layer ids
  that the config leaves out are SGLang's defaults, because those are the states a server would give it; a stored copy
  of the target's embedding is dropped, since every engine reads the target's;
- a Llama whose output matrix is its embedding: written out, as a draft model;
- weights that are pickled or sharded: one safetensors file.

Eyrie's own exports and DFlash directories are copied as they are. A drafter without a card has no digest of its target:
its sizes, layers and vocabulary are compared, and whether it is of exactly this model is shown by its acceptance alone.

A drafter that training continues from is taken as it is: sizes, layers, variant flags and draft vocabulary are its own,
because its weights mean nothing with others. What the spec sets must agree with it.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from eyrie_api.contract.drafter import DrafterSpec, PublishedDrafter
from eyrie_api.contract.families import VARIANT_FIELDS
from eyrie_api.errors import ArtifactMissing, InvalidInput
from eyrie_api.planning.sglang_support import MARK, mtp_tensors
from eyrie_workers.drafters.card import CARD, README, weights_digest
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.checkpoint import CheckpointInvalid, read_config, read_weights, write_checkpoint
from eyrie_workers.drafters.eagle3.directory import ARCHITECTURE, LAYER_IDS, MAPS, canonical_name, nested
from eyrie_workers.drafters.export import to_sglang
from eyrie_workers.drafters.family import FamilyImplementation, Layers, family_of
from eyrie_workers.drafters.validation import Target, read_target
from eyrie_workers.targets.config import read_json
from eyrie_workers.targets.device import CPU
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import CheckpointTensors, fetch_snapshot


def copy_mtp_layers(target: Path, out: Path) -> None:
    """Write the MTP layers of the target in `target` to `out`, replacing an existing directory.

    Raises UnsupportedTarget when it has none or SGLang does not draft with them, ArtifactCorrupt for weights that
    cannot be read.
    """
    config, stored = read_json(target / "config.json"), CheckpointTensors(target, None, CPU, stored=True)
    tensors = {name: stored[name] for name in mtp_tensors(stored, config)}
    write_checkpoint(out, dict(config) | {"eyrie": {"drafter": MARK}}, tensors)


_OTHER_NAMES = (["LlamaForCausalLM"], ["Eagle3LlamaForCausalLM"])
_UNSERVED = frozenset({"target-not-captured"})
"""Findings about SGLang alone; `planning.preflight` refuses such jobs where SGLang is the engine."""


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
    """Write the drafter in `source` to `out` as a checkpoint, replacing an existing one; returns its family.

    Raises CheckpointInvalid for a drafter that does not fit `target` or whose form no family reads, with all faults;
    ArtifactMissing, InvalidInput and ArtifactCorrupt for files that cannot be read or converted.
    """
    _convert(source, out, read_target(target))
    faults = [finding for finding in check_directory(out, target_dir=target)
              if finding.severity == "error" and finding.code not in _UNSERVED]
    if faults:
        raise CheckpointInvalid(f"drafter {source.name}: {'; '.join(fault.what for fault in faults)}", faults[0].hint)
    family = family_of(read_config(out).get("architectures"))
    assert family is not None, "the validator refuses unknown architectures"
    return family


def _convert(source: Path, out: Path, target: Target) -> None:
    config = read_config(source)
    architectures = config.get("architectures")
    if "speculators_model_type" in config:
        to_sglang(source, out, architecture=target.architecture or "LlamaForCausalLM", num_layers=target.num_layers)
        return
    family = family_of(architectures)
    if architectures not in _OTHER_NAMES and family is None:
        raise CheckpointInvalid(f"drafter {source.name} is of architecture {architectures!r}, which no family of Eyrie "
                                "reads", "name a drafter of a family that `eyrie check-drafter` knows")
    tensors = {canonical_name(name) if "fc.weight" in name or family is None else name: tensor
               for name, tensor in read_weights(source).items()}
    fc = tensors.get("fc.weight")
    if architectures == ["LlamaForCausalLM"] and fc is None:
        # A draft model. Where its output matrix is its embedding, it is written out.
        embedding = tensors.get("model.embed_tokens.weight")
        if config.get("tie_word_embeddings") and embedding is not None:
            tensors["lm_head.weight"] = embedding.clone()
        config = config | {"tie_word_embeddings": False}
    elif architectures == ["LlamaForCausalLM"] and fc is not None and fc.shape[1] == 2 * fc.shape[0]:
        to_sglang(source, out)  # EAGLE-1/2 in its authors' format
        return
    elif fc is not None and architectures in (*_OTHER_NAMES, [ARCHITECTURE]):
        config |= {"architectures": [ARCHITECTURE], "model_type": "llama"}
        layers, inner = target.num_layers, nested(config).get(LAYER_IDS)
        if inner is None and LAYER_IDS not in config and layers is not None:
            inner = [1, layers // 2 - 1, layers - 4]
            config |= {LAYER_IDS: [layer + 1 for layer in inner],
                       "eagle_config": dict(nested(config)) | {LAYER_IDS: inner}}
        whole = config.get("draft_vocab_size") == config.get("vocab_size")
        tensors = {canonical_name(name): tensor for name, tensor in tensors.items()
                   if not (whole and canonical_name(name) in MAPS)}
        if config.get("target_hidden_size", config.get("hidden_size")) == config.get("hidden_size"):
            tensors.pop("embed_tokens.weight", None)
    # The card, where there is one, is part of the checkpoint: it names the target's digest.
    write_checkpoint(out, config, tensors, copies=[source / name for name in (CARD, README)])


_FIELD = "drafter.init_from"
_ATTRIBUTES = {"num_attention_heads": "num_heads"} | {name: name for name in (
    "hidden_size", "intermediate_size", "num_layers", "draft_vocab_size", "aux_layers", "max_position_embeddings",
    *VARIANT_FIELDS)}
"""Fields of `DrafterSpec`, and attributes of a drafter's configuration that hold their values."""

_ABSENT = object()


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
        actual = adopt(fetch(_FIELD, spec.head.path, spec.head.revision), directory, target)
        if actual.name != family.name:
            raise InvalidInput(f"{_FIELD} {spec.init_from!r} is of family {actual.name!r}, and drafter.family is "
                               f"{family.name!r}", f"set drafter.family to {actual.name!r}")
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
