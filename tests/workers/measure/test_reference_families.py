"""The reference half of the parity gate asks the drafter how an engine serves it, and names no family."""

from pathlib import Path

import pytest
import torch

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, EngineKind
from eyrie_workers.drafters.family import family_named
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.measure.known_misconfigurations import known_misconfigurations
from eyrie_workers.measure.parity_reference import GrowsTrees, ReadsText, Reference
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from tests.tiny import tiny_target

TREE = DraftTreeShape(num_steps=3, top_k=3, num_draft_tokens=8)


@pytest.mark.parametrize("family", ["eagle1", "standalone"])
def test_a_drafter_is_given_sglang_s_habits_and_no_other_family_s_mistakes_are_suspected(family: str,
                                                                                        tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", seed=3)
    row, config = family_named(family), read_config(target)
    layers = row.layers((1, 2, 3), config.num_layers)
    row.save(tmp_path / "drafter", row.create(
        DrafterSpec.model_validate({"family": family}), config, read_target_embeddings(target, False), layers,
        DraftVocabulary(torch.arange(config.vocab_size), config.vocab_size), 1), "float32", None)
    habits: tuple[tuple[EngineKind, str], ...] = (("sglang", "frontier_slots"), ("embedded", "ancestors"))
    for kind, keys in habits:
        reference = Reference(target, tmp_path / "drafter", kind, TREE, "float32")
        assert isinstance(reference.drafter, GrowsTrees)
        assert reference.drafter.branch_keys == keys
        assert isinstance(reference.drafter, ReadsText) == (family == "standalone")
        rounds = reference.rounds([5, 9, 40, 7], 12)
        assert len(rounds.token_ids) == 12
        assert rounds.token_ids == reference.rounds([5, 9, 40, 7], 12).token_ids
        assert list(known_misconfigurations(tmp_path / "drafter", reference.target, "frontier_slots")) == []
