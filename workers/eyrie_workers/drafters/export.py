"""Convert drafters between formats: EAGLE-3 to and from speculators format, EAGLE-1/2 from its authors' format.

Eyrie's directories load in SGLang and in vLLM (`--speculative-config`). The speculators library (0.9.0) has another
format, which `vllm serve DIR` loads without naming the target: the layer's config is nested, the layer is named
`layers.0`, and the target is named in the config. This program converts to that format and back.

    python -m eyrie_workers.drafters.export --to speculators DIR OUT [--target NAME] [--num-steps N]
    python -m eyrie_workers.drafters.export --to sglang      DIR OUT [--target-architecture NAME --num-layers N]

The second form also converts EAGLE-1/2 as its authors publish it (SafeAILab: pickled weights, architecture
`LlamaForCausalLM`, a stored embedding, fc with or without a bias): the architecture is renamed, a missing bias, which
SGLang would leave random, is written as zeros, and the embedding, which is the target's, is left out.

Drafters that cannot be converted are refused: with `norm_before_residual` (vLLM's default when the key is absent)
SGLang would compute another function. Layer ids in speculators format are vLLM's, as Eyrie's; `num_aux_hidden_states`
is in the nested config, where vLLM reads it when there are not three.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from eyrie_api.errors import EyrieError, InvalidInput, report_error
from eyrie_api.planning.drafter_forms import LAYER_KEYS, Form, convert
from eyrie_api.planning.drafter_rules import LAYER_IDS
from eyrie_api.planning.eagle3_rules import canonical_name, nested, num_aux
from eyrie_workers.drafters.card import CARD, CONFIG, README, read_card
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.checkpoint import (
    CheckpointInvalid,
    headers_of,
    read_config,
    read_weights,
    write_checkpoint,
)
from eyrie_workers.drafters.eagle3.directory import validate
from eyrie_workers.drafters.validation import ValidationRequest
from eyrie_workers.targets.config import read_json

SPECULATORS_VERSION = "0.9.0"


def to_speculators(directory: Path, out: Path, *, target: str | None = None, num_steps: int = 5) -> None:
    """Write the drafter in `directory` to `out` in speculators format, replacing an existing directory. Raises
    InvalidInput for a drafter with errors, or when neither `target` nor a card names the target."""
    faults = [finding for finding in check_directory(directory) if finding.severity == "error"]
    if faults:
        raise InvalidInput(f"{directory} has errors: {faults[0].what}", faults[0].hint)
    config, card = read_json(directory / CONFIG), read_card(directory)
    name = target or (card.target.name if card else None)
    if name is None:
        raise InvalidInput(f"{directory} has no card, so its target is not known", "name it with --target")
    verifier = {"name_or_path": name, "architectures": [card.target.architecture] if card else []}
    layer = {key: config[key] for key in LAYER_KEYS if key in config}
    written: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION, "dtype": config.get("dtype", "float32"),
        "transformer_layer_config": layer | {"model_type": "llama", "num_aux_hidden_states": num_aux(config)},
        "draft_vocab_size": config["draft_vocab_size"], "target_hidden_size": None, "norm_before_residual": False,
        LAYER_IDS: config[LAYER_IDS], "fc_norm": bool(config.get("fc_norm", False)),
        "norm_before_fc": bool(nested(config).get("norm_before_fc", config.get("norm_before_fc", False))),
        "norm_output": bool(config.get("norm_output", False)), "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": verifier,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_steps}]},
    }
    tensors = {canonical_name(name).replace("midlayer.", "layers.0."): tensor
               for name, tensor in read_weights(directory).items()}
    write_checkpoint(out, written, tensors)


def to_sglang(directory: Path, out: Path, *, architecture: str = "LlamaForCausalLM",
              num_layers: int | None = None) -> None:
    """Write a drafter in speculators format, or EAGLE-1/2 in its authors' format, to `out` as SGLang loads it,
    replacing an existing directory.

    Raises InvalidInput for another format, for variants SGLang does not compute, and for a result with errors;
    CheckpointInvalid for tensors that are not those of EAGLE-1/2.
    """
    source = read_json(directory / CONFIG)
    in_speculators = "speculators_model_type" in source
    if not in_speculators and source.get("architectures") != ["LlamaForCausalLM"]:
        raise InvalidInput(f"{directory} holds speculators_model_type None",
                           "give an eagle3 drafter in speculators format")
    config, tensors, form = _converted(directory, architecture, num_layers)
    if form.family == "eagle3":
        if not in_speculators:
            raise CheckpointInvalid("fc.weight does not join one state with one embedding: not an EAGLE-1/2 drafter",
                                    "an EAGLE-3 drafter only needs another architecture name; see "
                                    "`eyrie certify --check-only`")
        faults = [finding for finding in validate(ValidationRequest(config, tensors)) if finding.severity == "error"]
        if faults:
            raise InvalidInput("; ".join(fault.what for fault in faults), faults[0].hint)
    elif form.family != "eagle1":
        raise CheckpointInvalid("fc.weight is missing: not an EAGLE-1/2 drafter",
                                "SGLang serves a draft model as it is")
    write_checkpoint(out, config, tensors)


def convert_directory(source: Path, out: Path, architecture: str | None, num_layers: int | None) -> None:
    """Write the drafter in `source`, in any form that a family reads, to `out` as a checkpoint of the family, replacing
    an existing directory. It is not checked.

    architecture, num_layers   of the target

    Raises InvalidInput for other forms; ArtifactMissing, ArtifactCorrupt and CheckpointInvalid for unreadable files.
    """
    config, tensors, _ = _converted(source, architecture, num_layers)
    # The card, where there is one, is part of the checkpoint: it names the target's digest.
    write_checkpoint(out, config, tensors, copies=[source / name for name in (CARD, README)])


def _converted(source: Path, architecture: str | None,
               num_layers: int | None) -> tuple[dict[str, Any], dict[str, Tensor], Form]:
    config, stored = read_config(source), read_weights(source)
    form = convert(config, headers_of(stored), architecture, num_layers)
    tensors = {name: tensor for key, tensor in stored.items() if (name := form.name_of(key)) is not None}
    fc, embedding = tensors.get("fc.weight"), tensors.get("model.embed_tokens.weight")
    if form.family == "eagle1" and fc is not None:
        tensors.setdefault("fc.bias", fc.new_zeros(fc.shape[0]))  # SGLang's class has one, and would leave it random
    if form.ties_head and embedding is not None:
        tensors["lm_head.weight"] = embedding.clone()
    return form.config, tensors, form


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eyrie_workers.drafters.export")
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--to", choices=("speculators", "sglang"), required=True)
    parser.add_argument("--target", help="name of the target, for vLLM to load; default: as the card has it")
    parser.add_argument("--num-steps", type=int, default=5, help="tokens vLLM drafts per round")
    parser.add_argument("--target-architecture", default="LlamaForCausalLM")
    parser.add_argument("--num-layers", type=int, help="layers of the target")
    options = parser.parse_args(arguments)
    try:
        if options.to == "speculators":
            to_speculators(options.directory, options.out, target=options.target, num_steps=options.num_steps)
        else:
            to_sglang(options.directory, options.out, architecture=options.target_architecture,
                      num_layers=options.num_layers)
    except EyrieError as error:
        return report_error(error)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
