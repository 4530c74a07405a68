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

from eyrie_api.errors import EyrieError, InvalidInput, report_error
from eyrie_api.planning.sglang_support import sglang_layer_ids
from eyrie_workers.drafters import eagle1
from eyrie_workers.drafters.card import CONFIG, read_card
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.checkpoint import read_weights, write_checkpoint
from eyrie_workers.drafters.eagle3.directory import (
    ARCHITECTURE,
    LAYER_IDS,
    MAPS,
    canonical_name,
    nested,
    num_aux,
    validate,
)
from eyrie_workers.drafters.validation import ValidationRequest
from eyrie_workers.targets.config import read_json

SPECULATORS_VERSION = "0.9.0"
# Keys of the config that describe the layer; the speculators format nests them.
_LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta", "rope_parameters",
    "rope_scaling", "attention_bias", "mlp_bias", "tie_word_embeddings", "sliding_window", "layer_types", "dtype",
    "torch_dtype", "bos_token_id", "eos_token_id")


def to_speculators(directory: Path, out: Path, *, target: str | None = None, num_steps: int = 5) -> None:
    """Write the drafter in `directory` to `out` in speculators format, replacing an existing directory.

    Raises InvalidInput for a drafter with errors, or when neither `target` nor a card names the target.
    """
    faults = [finding for finding in check_directory(directory) if finding.severity == "error"]
    if faults:
        raise InvalidInput(f"{directory} has errors: {faults[0].what}", faults[0].hint)
    config, card = read_json(directory / CONFIG), read_card(directory)
    name = target or (card.target.name if card else None)
    if name is None:
        raise InvalidInput(f"{directory} has no card, so its target is not known", "name it with --target")
    verifier = {"name_or_path": name, "architectures": [card.target.architecture] if card else []}
    layer = {key: config[key] for key in _LAYER_KEYS if key in config}
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
    if "speculators_model_type" not in source and source.get("architectures") == ["LlamaForCausalLM"]:
        eagle1.import_original(out, source, read_weights(directory))
        return
    if source.get("speculators_model_type") != "eagle3":
        raise InvalidInput(f"{directory} holds speculators_model_type {source.get('speculators_model_type')!r}",
                           "give an eagle3 drafter in speculators format")
    if source.get("norm_before_residual") is not False:
        raise InvalidInput("norm_before_residual is true or absent, which vLLM reads as true: SGLang always adds the "
                           "state before its norm", "train with norm_before_residual false")
    layer, ids = dict(source.get("transformer_layer_config") or {}), source.get(LAYER_IDS)
    if layer.get("model_type", "llama") != "llama":
        raise InvalidInput(f"the drafter's layer is of type {layer['model_type']!r}, SGLang's is Llama's",
                           "train with a Llama layer")
    if not isinstance(ids, list):
        raise InvalidInput(f"{LAYER_IDS} are not written", "find out which layers it was trained on")
    depth = num_layers if num_layers is not None else max(ids, default=0) + 1
    config = {key: layer[key] for key in _LAYER_KEYS if layer.get(key) is not None} | {
        "architectures": [ARCHITECTURE], "model_type": "llama", "tie_word_embeddings": False,
        "draft_vocab_size": source.get("draft_vocab_size"), "norm_before_residual": False,
        "target_hidden_size": source.get("target_hidden_size") or layer.get("hidden_size"),
        "num_aux_hidden_states": len(ids), LAYER_IDS: ids,
        "eagle_config": {"use_aux_hidden_state": True,
                         LAYER_IDS: list(sglang_layer_ids(architecture, depth, ids))}}
    for flag in ("fc_norm", "norm_output"):
        if source.get(flag):
            config[flag] = True
    if source.get("norm_before_fc"):
        config["norm_before_fc"] = config["eagle_config"]["norm_before_fc"] = True
    whole = config["draft_vocab_size"] == config.get("vocab_size")
    tensors = {canonical_name(name): tensor for name, tensor in read_weights(directory).items()
               if not name.startswith("verifier_") and not (whole and name in MAPS)}
    if config["target_hidden_size"] == config.get("hidden_size"):
        tensors.pop("embed_tokens.weight", None)
    faults = [finding for finding in validate(ValidationRequest(config, tensors)) if finding.severity == "error"]
    if faults:
        raise InvalidInput("; ".join(fault.what for fault in faults), faults[0].hint)
    write_checkpoint(out, config, tensors)


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
