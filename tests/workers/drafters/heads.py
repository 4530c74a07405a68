"""What the tests of drafters that are heads on the last state share: a tiny target's captured documents, and a short
training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_workers.drafters.family import FamilyImplementation
from eyrie_workers.drafters.initialisation import TargetEmbeddings, read_target_embeddings
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.speculation.engine import Engine, Generation, Request
from eyrie_workers.speculation.protocol import CommittedTokens
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.evaluation import Evaluation, evaluate
from eyrie_workers.training.objective import Objective, StepContext
from tests.packed_rows import pack_rows
from tests.tiny import tiny_target

HEADS = 4
PROMPT = 6
SHAPES = {"chain": DraftTreeShape(num_steps=4, top_k=1, num_draft_tokens=5),
          "dynamic": DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=12),
          "static": DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=12, static=True),
          "deeper chain": DraftTreeShape(num_steps=6, top_k=1, num_draft_tokens=7),
          "deeper dynamic": DraftTreeShape(num_steps=6, top_k=2, num_draft_tokens=22),
          "deeper static": DraftTreeShape(num_steps=6, top_k=2, num_draft_tokens=22, static=True)}
SAMPLINGS = {"greedy": SamplingSpec(temperature=0.0), "sampled": SamplingSpec(temperature=1.0)}


@dataclass(frozen=True)
class World:
    """A tiny target, its answers to random prompts, and its states over both."""

    target: TargetModel
    ends: TargetEmbeddings
    documents: tuple[PackedBatch, ...]
    vocabulary: DraftVocabulary

    @property
    def packed(self) -> PackedBatch:
        """All documents, end to end."""
        return pack_rows([(one.token_ids, one.loss_mask, one.aux, one.last) for one in self.documents])


def world(path: Path, num_documents: int = 12) -> World:
    """Answers of 24 tokens; the draft vocabulary leaves out every fifth token."""
    target = load_target(tiny_target(path, seed=5, initializer_range=0.15))
    generator = torch.Generator().manual_seed(4)
    asked = [Request(str(i), torch.randint(3, 320, (PROMPT,), generator=generator).tolist(), 24)
             for i in range(num_documents)]
    documents = []
    for request, answer in zip(asked, Engine(target, max_concurrency=6).generate(asked), strict=True):
        ids = torch.tensor([*request.prompt_ids, *answer.token_ids])
        [(aux, last)] = target.hidden_states([ids], (target.config.num_layers,))
        documents.append(pack_rows([(ids, torch.arange(len(ids)) >= PROMPT, aux.clone(), last.clone())]))
    vocabulary = DraftVocabulary(torch.tensor([i for i in range(320) if i % 5 != 4]), 320)
    return World(target, read_target_embeddings(path, False), tuple(documents), vocabulary)


def new_drafter(family: FamilyImplementation, of: World, seed: int = 0, heads: int = HEADS) -> Any:
    """As `stages.train` makes one."""
    return family.create(DrafterSpec(family=family.name, max_draft_tokens=heads), of.target.config, of.ends,
                         (of.target.config.num_layers,), of.vocabulary, seed)


def scrambled(drafter: nn.Module, seed: int = 1) -> Any:
    """The drafter with random weights, so that every part of it shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return drafter


def objective(family: FamilyImplementation, drafter: nn.Module, of: World, dtype: torch.dtype = torch.float32,
              **settings: Any) -> Objective:
    """As `stages.train` makes one."""
    return family.objective(drafter, of.ends, TrainSpec(**settings), 64, dtype)


def trained(family: FamilyImplementation, of: World, num_steps: int = 60) -> tuple[Any, Evaluation, Evaluation]:
    """A drafter after some steps over all documents, and how good it was before and is now, judged on them."""
    drafter, documents = new_drafter(family, of), of.packed
    taught = objective(family, drafter, of)
    before = evaluate(taught, [documents])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for step in range(num_steps):
        optimizer.zero_grad()
        taught(documents, StepContext(step, num_steps, seed=0)).loss.backward()
        optimizer.step()
    return drafter, before, evaluate(taught, [documents])


def exported(family: FamilyImplementation, of: World, directory: Path) -> Path:
    """A drafter that has learnt something, as it is exported."""
    drafter, before, after = trained(family, of)
    assert all(now > then + 0.1 for now, then in zip(after.accuracy, before.accuracy, strict=True))
    assert after.theoretical_speedup > before.theoretical_speedup + 0.3
    family.save(directory, drafter, "float32", None)
    return directory


def answers(of: World, drafter: Any, shape: DraftTreeShape | None, sampling: SamplingSpec,
            max_concurrency: int = 3) -> list[Generation]:
    """Some texts of different lengths, several at once."""
    generator = torch.Generator().manual_seed(2)
    asked = [Request(f"r{i}", torch.randint(3, 320, (length,), generator=generator).tolist(), 20, sampling,
                     seed=100 + i) for i, length in enumerate((5, 23, 1, 12))]
    return Engine(of.target, drafter, max_concurrency=max_concurrency).generate(asked, shape)


def pairs_until(of: PackedBatch, root: int) -> CommittedTokens:
    """Pairs 0 .. root of one document, for row 0."""
    return CommittedTokens(rows=[0], starts=[0], tokens=[of.token_ids[1: root + 2].tolist()],
                           aux=of.aux[None, : root + 1])
