"""No family, tree or sampling changes a token: every row of the registry against plain decoding.

A new family is tested by its line in the registry. Each serves twice: as made, proposing noise, and after it has learnt
the very answers by heart, so that long paths are really accepted and their keys really moved. Rows of every sampling
share a batch, join while others decode and leave at different lengths.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.training import TrainSpec
from eyrie_workers.drafters.family import UNTRAINED, family_named, open_drafter, open_method
from eyrie_workers.drafters.initialisation import TargetEmbeddings, read_target_embeddings
from eyrie_workers.speculation.engine import Engine, Generation, Request
from eyrie_workers.speculation.protocol import Drafter
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.objective import StepContext
from tests.packed_rows import pack_rows
from tests.tiny import tiny_target

VOCAB, MAX_DRAFT_TOKENS = 320, 3
SHAPES = {
    "chain": DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4),
    "dynamic": DraftTreeShape(num_steps=3, top_k=3, num_draft_tokens=9),
    "static": DraftTreeShape(num_steps=3, top_k=3, num_draft_tokens=9, static=True),
    "deeper than it can look": DraftTreeShape(num_steps=5, top_k=2, num_draft_tokens=11),
}
SAMPLINGS = {
    "greedy": SamplingSpec(temperature=0.0), "temperature 1": SamplingSpec(temperature=1.0),
    "top-p": SamplingSpec(temperature=0.8, top_p=0.9), "top-k": SamplingSpec(temperature=1.0, top_k=20),
}


def requests() -> list[Request]:
    """Two of each sampling, of different lengths, the second ones shorter."""
    generator = torch.Generator().manual_seed(2)
    return [Request(f"{name} {number}", torch.randint(3, VOCAB, (length,), generator=generator).tolist(),
                    16 - 7 * number, sampling, seed=40 + place)
            for number in range(2) for place, (length, (name, sampling)) in enumerate(
                zip((9, 1, 17, 4), SAMPLINGS.items(), strict=True))]


@dataclass
class Bench:
    """The target, what it answers by itself, and the drafters made so far."""

    target: TargetModel
    ends: TargetEmbeddings
    home: Path
    plain: dict[str, list[int]] = field(default_factory=dict)
    made: dict[tuple[str, bool], Drafter] = field(default_factory=dict)

    def drafter(self, name: str, learnt: bool) -> Drafter:
        """The drafter of a family, or of a method without weights."""
        if name in UNTRAINED:
            found = open_method(name, None, self.target)
            assert found is not None
            return found
        if (name, learnt) not in self.made:
            self.made[name, learnt] = self._make(name, learnt)
        return self.made[name, learnt]

    def _make(self, name: str, learnt: bool) -> Drafter:
        family, config = family_named(name), self.target.config
        spec = DrafterSpec.model_validate({"family": name, "max_draft_tokens": MAX_DRAFT_TOKENS})
        # A reduced vocabulary where the family has one: what it cannot say must not be lost.
        ids = torch.arange(VOCAB) if family.row.whole_vocabulary or learnt else torch.arange(0, VOCAB, 2)
        layers = family.layers((1, 2, 3), config.num_layers)
        drafter = family.create(spec, config, self.ends, layers, DraftVocabulary(ids, VOCAB), 1)
        if learnt:
            self._teach(name, drafter, layers)
        directory = self.home / f"{name}-{learnt}"
        family.save(directory, drafter, "float32", None)
        return open_drafter(directory, self.target)

    def _teach(self, name: str, drafter: nn.Module, layers: tuple[int, ...]) -> None:
        """By heart, as far as 40 steps go."""
        rows = []
        for request in requests():
            text = torch.tensor([*request.prompt_ids, *self.plain[request.id]])
            [(aux, last)] = self.target.hidden_states([text], layers)
            rows.append((text, torch.arange(len(text)) >= len(request.prompt_ids), aux, last))
        documents = pack_rows([(text, mask, aux.clone(), last.clone()) for text, mask, aux, last in rows])
        settings = TrainSpec(ttt_length=MAX_DRAFT_TOKENS, unrolled_fraction=1.0, single_step_ratio=0.0)
        objective = family_named(name).objective(drafter, self.ends, settings, 64, torch.float32)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-2, weight_decay=0.0)
        for step in range(40):
            optimizer.zero_grad()
            objective(documents, StepContext(step, 40, 0)).loss.backward()
            nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    home = tmp_path_factory.mktemp("lossless")
    # A small initializer range keeps the random target from repeating one token for ever.
    path = tiny_target(home / "target", "llama", seed=5, initializer_range=0.15)
    target = load_target(path)
    bench = Bench(target, read_target_embeddings(path, target.config.tie_word_embeddings), home)
    bench.plain = {generation.id: generation.token_ids for generation in Engine(target).generate(requests())}
    return bench


def decode(engine: Engine) -> dict[str, Generation]:
    """All requests, a new one every second round while slots are free."""
    arrivals, done = list(requests()), {}
    for number in range(200):
        if arrivals and number % 2 == 0:
            engine.submit(arrivals.pop(0))
        done |= {progress.id: progress.generation for progress in engine.step() if progress.generation is not None}
        if not arrivals and engine.num_running == engine.num_waiting == 0:
            return done
    raise AssertionError("200 rounds were not enough")


@pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))
@pytest.mark.parametrize("family", [*FAMILIES, *UNTRAINED])
def test_no_family_changes_a_token_of_any_sampling(family: str, shape: DraftTreeShape, bench: Bench) -> None:
    engine = Engine(bench.target, bench.drafter(family, learnt=True), max_concurrency=3, tree=shape)
    drafted = decode(engine)
    assert {name: generation.token_ids for name, generation in drafted.items()} == bench.plain
    if family not in UNTRAINED:
        assert max(len(generation.accepted_histogram) for generation in drafted.values()) > 2  # two in a row and more


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_drafter_that_knows_nothing_changes_no_token(family: str, bench: Bench) -> None:
    engine = Engine(bench.target, bench.drafter(family, learnt=False), max_concurrency=3, tree=SHAPES["dynamic"])
    assert {name: generation.token_ids for name, generation in decode(engine).items()} == bench.plain


def test_the_plain_answers_differ_by_sampling_and_seed(bench: Bench) -> None:
    assert len({tuple(text) for text in bench.plain.values()}) == len(bench.plain)
