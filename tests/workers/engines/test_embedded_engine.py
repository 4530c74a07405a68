"""The reference engine as a `DecodingEngine`."""

from pathlib import Path

import pytest

from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.errors import InvalidInput
from eyrie_workers.engines.decoding_engine import EmbeddedEngine
from eyrie_workers.speculation.requests import Request
from eyrie_workers.targets.loading import load_target
from tests.workers.engines.engine_contract import DRAFTED, LOOKUP, OFF, check_contract

CHAIN = DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)


@pytest.fixture
def engine(target: Path) -> EmbeddedEngine:
    return EmbeddedEngine(load_target(target, "float32"), "float32", max_concurrency=3)


def requests(temperature: float = 0.0) -> list[Request]:
    return [Request(id=f"r{index}", prompt_ids=[index + 1, 7, 9, index + 3], max_new_tokens=6, seed=index,
                    sampling=SamplingSpec(temperature=temperature)) for index in range(5)]


def uses(drafter: Path) -> dict[str, DrafterUse]:
    return {OFF: DrafterUse(), DRAFTED: DrafterUse(drafter_dir=str(drafter), setting=Setting(tree=CHAIN)),
            LOOKUP: DrafterUse(setting=Setting(method="ngram", tree=CHAIN))}


def test_the_embedded_engine_keeps_the_contract(engine: EmbeddedEngine, drafter: Path) -> None:
    check_contract(engine, uses(drafter), requests())


def test_sampled_answers_of_its_variants_are_the_same(engine: EmbeddedEngine, drafter: Path) -> None:
    engine.start(uses(drafter))
    answers = {name: [answer.token_ids for answer in engine.generate(name, requests(1.0), 3).answers]
               for name in (OFF, DRAFTED, LOOKUP)}
    assert answers[OFF] == answers[DRAFTED] == answers[LOOKUP]
    assert engine.same_samples


def test_a_variant_that_cannot_start_is_reported_and_the_others_answer(
        engine: EmbeddedEngine, drafter: Path, tmp_path: Path) -> None:
    broken = DrafterUse(drafter_dir=str(tmp_path), setting=Setting(tree=CHAIN))
    failed = engine.start(uses(drafter) | {"broken": broken})
    assert list(failed) == ["broken"]
    assert len(engine.generate(DRAFTED, requests()[:1], 1).answers) == 1


def test_more_requests_at_once_than_slots_are_refused(engine: EmbeddedEngine) -> None:
    engine.start({OFF: DrafterUse()})
    with pytest.raises(InvalidInput, match="concurrency 4 is above"):
        engine.generate(OFF, requests(), 4)
