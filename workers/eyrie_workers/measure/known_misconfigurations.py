"""Known misconfigurations of a served EAGLE-3 drafter, each reproduced in the reference engine.

SGLang loads most misconfigured drafters without an error (`drafters.checkpoint`). When a served drafter accepts
other tokens than the reference, the reference engine drafts with each known misconfiguration in turn; the one that
reproduces the served rounds prompt by prompt is the cause.

Other families have no layer ids, vocabulary maps or flags to misconfigure, and none are tried for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyrie_api.planning.eagle3_rules import ARCHITECTURE
from eyrie_workers.drafters.checkpoint import read_config
from eyrie_workers.drafters.eagle3.drafter import Eagle3Config, Eagle3Drafter
from eyrie_workers.drafters.eagle3.family import Eagle3Proposer, load_drafter
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.speculation.tree import BranchKeys
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel

# By flag: what an engine does with the flag set (the drafter was trained without it), and with the flag unset.
_FLAGS = {
    "norm_output": ("feeds back the drafter's state after its final norm",
                    "feeds back the drafter's state before its final norm"),
    "fc_norm": ("normalizes each aux state", "does not normalize each aux state"),
    "norm_before_fc": ("normalizes the concatenated aux states", "does not normalize the concatenated aux states"),
}


@dataclass(frozen=True)
class Misconfiguration:
    cause: str  # completes "the engine ..."
    hint: str
    drafter: Drafter


def known_misconfigurations(directory: Path, target: TargetModel,
                            branch_keys: BranchKeys) -> Iterator[Misconfiguration]:
    """The drafter in `directory` under each known misconfiguration; empty for families other than EAGLE-3."""
    if read_config(directory).get("architectures") != [ARCHITECTURE]:
        return
    right = load_drafter(directory)
    config, own_ids = right.config, right.vocabulary.ids

    def served(config: Eagle3Config, ids: Tensor = own_ids) -> Drafter:
        # Ids beyond the vocabulary would stop a server; here they become its last token, which is as wrong.
        wrong = Eagle3Drafter(config, DraftVocabulary(ids.clamp(0, config.vocab_size - 1), config.vocab_size))
        # Norms that the checkpoint lacks are ones, as in SGLang.
        held = wrong.state_dict().keys() - {"d2t", "t2d"}
        wrong.load_state_dict({name: tensor for name, tensor in right.state_dict().items() if name in held},
                              strict=False)
        server = Eagle3Proposer(wrong, target.embed_weight)
        server.branch_keys = branch_keys
        return server

    for shift, where in ((-1, "before"), (1, "after")):
        layers = tuple(layer + shift for layer in config.aux_layers)
        if min(layers) >= 0 and max(layers) <= target.config.num_layers:
            yield Misconfiguration(f"reads the layers one {where} those of training",
                          "eagle_config.eagle_aux_hidden_state_layer_ids holds hidden_states indices minus 1 (SGLang), "
                          "the key of that name at the top level the indices themselves (vLLM)",
                          served(replace(config, aux_layers=layers)))
    if config.draft_vocab_size != config.vocab_size:
        for ids, how in ((own_ids + torch.arange(own_ids.numel()), "ids read as offsets"),
                         (right.vocabulary.d2t, "offsets read as ids")):
            yield Misconfiguration(f"maps draft ids wrongly ({how})",
                          "d2t holds offsets, target id minus draft id; export the drafter again", served(config, ids))
    for name, causes in _FLAGS.items():
        trained = bool(getattr(config, name))
        flipped: dict[str, Any] = {name: not trained}
        yield Misconfiguration(f"{causes[trained]}, unlike training",
                               f"{name} must be {str(trained).lower()} in the drafter's config.json",
                               served(replace(config, **flipped)))
