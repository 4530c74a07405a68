"""Known ways to serve an EAGLE-3 drafter wrongly, each made on purpose, to see which of them is what an engine does.

SGLang loads most mistakes without a word (`drafters.checkpoint.files`). When a served drafter accepts other tokens than
the reference, guessing the cause is slow work; trying the causes is quick: the reference engine drafts with the mistake
built in, and if that reproduces the served rounds prompt by prompt, it is the mistake.

Other families have no layer ids, vocabulary maps or flags to mistake: of them nothing is suspected here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eyrie_workers.drafters.checkpoint.files import read_config
from eyrie_workers.drafters.eagle3.checkpoint import load_drafter
from eyrie_workers.drafters.eagle3.directory_format import ARCHITECTURE
from eyrie_workers.drafters.eagle3.model import Eagle3Config, Eagle3Drafter
from eyrie_workers.drafters.eagle3.proposer import Eagle3Proposer
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.speculation.tree import BranchKeys
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel

# What an engine does with the flag on, and with it off: that is, when the drafter was trained without, and with it.
_FLAGS = {
    "norm_output": ("feeds back the drafter's state after its final norm",
                    "feeds back the drafter's state before its final norm"),
    "fc_norm": ("normalises the aux states one by one", "does not normalise the aux states one by one"),
    "norm_before_fc": ("normalises the joined aux states", "does not normalise the joined aux states"),
}


@dataclass(frozen=True)
class Suspect:
    """One way to be wrong."""

    cause: str
    """Completes "the engine ..."."""

    hint: str
    drafter: Drafter


def suspects(directory: Path, target: TargetModel, branch_keys: BranchKeys) -> Iterator[Suspect]:
    """The mistakes of this module's essay, built into the drafter in `directory`; none for another family."""
    if read_config(directory).get("architectures") != [ARCHITECTURE]:
        return
    right = load_drafter(directory)
    config, own_ids = right.config, right.vocabulary.ids

    def served(config: Eagle3Config, ids: Tensor = own_ids) -> Drafter:
        # Ids beyond the vocabulary would stop a server; here they become its last token, which is as wrong.
        vocabulary = DraftVocabulary(ids.clamp(0, config.vocab_size - 1), config.vocab_size)
        server = Eagle3Proposer(_rebuilt(right, config, vocabulary), target.embed_weight)
        server.branch_keys = branch_keys
        return server

    for shift, where in ((-1, "before"), (1, "after")):
        layers = tuple(layer + shift for layer in config.aux_layers)
        if min(layers) >= 0 and max(layers) <= target.config.num_layers:
            yield Suspect(f"reads the layers one {where} those of training",
                          "eagle_config.eagle_aux_hidden_state_layer_ids holds hidden_states indices minus 1 (SGLang), "
                          "the key of that name at the top level the indices themselves (vLLM)",
                          served(replace(config, aux_layers=layers)))
    if config.draft_vocab_size != config.vocab_size:
        for ids, how in ((own_ids + torch.arange(own_ids.numel()), "ids read as offsets"),
                         (right.vocabulary.d2t, "offsets read as ids")):
            yield Suspect(f"maps draft ids wrongly ({how})",
                          "d2t holds offsets, target id minus draft id; export the drafter again", served(config, ids))
    flips = {"norm_output": replace(config, norm_output=not config.norm_output),
             "fc_norm": replace(config, fc_norm=not config.fc_norm),
             "norm_before_fc": replace(config, norm_before_fc=not config.norm_before_fc)}
    for name, flipped in flips.items():
        trained = bool(getattr(config, name))
        yield Suspect(f"{_FLAGS[name][trained]}, unlike training",
                      f"{name} must be {str(trained).lower()} in the drafter's config.json", served(flipped))


def _rebuilt(right: Eagle3Drafter, config: Eagle3Config, vocabulary: DraftVocabulary) -> Eagle3Drafter:
    """The drafter under another config or vocabulary. Norms it never had are ones, as SGLang leaves them."""
    wrong = Eagle3Drafter(config, vocabulary)
    held = wrong.state_dict().keys() - {"d2t", "t2d"}
    wrong.load_state_dict({name: tensor for name, tensor in right.state_dict().items() if name in held}, strict=False)
    return wrong
