"""EAGLE-3 drafters fitted for seconds to some answers, so that drafts of them are accepted and rejected.

For small random targets: a random drafter's drafts are never accepted, and wrong layers would look like right ones.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_workers.drafters.family import family_named
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.training.objective import StepContext
from tests.packed_rows import pack_rows

STEPS = 60


def fit_drafter(directory: Path, target: Path, config: TargetConfig, layers: tuple[int, ...],
                answered: Sequence[tuple[int, Tensor, Tensor, Tensor]]) -> Path:
    """Fit one and save it in `directory`.

    layers     whose outputs it reads
    answered   of each text: tokens of its prompt, token ids [T], aux states [T, A, H], final states [T, H]
    """
    torch.manual_seed(0)
    rows = [(text, torch.arange(len(text)) >= prompt, aux.clone(), last.clone())
            for prompt, text, aux, last in answered]
    family, ends = family_named("eagle3"), read_target_embeddings(target, False)
    spoken = torch.cat([text[supervised] for text, supervised, _, _ in rows]).unique()
    module = family.create(DrafterSpec(), config, ends, layers, DraftVocabulary(spoken, config.vocab_size), 0)
    objective = family.objective(module, ends, TrainSpec(ttt_length=3, unrolled_fraction=1.0, single_step_ratio=0.0),
                                 128, torch.float32)
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-3)
    for step in range(STEPS):
        loss = objective(pack_rows(rows), StepContext(step, STEPS, 0)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    family.save(directory, module, "float32", None)
    return directory
