"""Interleaved variants over the real engine, and the report of differing outputs."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pytest
import torch

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.tuning import OFF, DrafterUse, Setting
from eyrie_api.errors import InvalidInput
from eyrie_workers.data.suites import Prompt
from eyrie_workers.engines.decoding_engine import EmbeddedEngine, EngineRun
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measure.benchmark.losslessness import explain
from eyrie_workers.measure.benchmark.reports import report_cells
from eyrie_workers.measure.benchmark.session import (
    Session,
    is_measured,
    measure_units,
    open_session,
    prompts_that_fit,
    read_suites,
    round_robin,
    start_all,
    uses_of,
)
from eyrie_workers.measure.benchmark.variants import BASELINE, UNDRAFTED, Entry, Variant
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Stage
from eyrie_workers.stages.benchmark import compare
from eyrie_workers.targets.loading import load_target
from tests.tiny import tiny_target
from tests.workers.measure.tiny_bench import stage_specs

CHAIN = Variant(tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))
TREE = Variant(tree=DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6))
VARIANTS = [UNDRAFTED, CHAIN, TREE]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    spec, stage = stage_specs(tmp_path_factory.mktemp("bench"))[0], Stage(tmp_path_factory.mktemp("stage"))
    uses = uses_of(spec, {variant.title: (Setting(tree=variant.tree) if variant.tree else OFF) for variant in VARIANTS})
    with open_session(spec, read_suites(spec, stage), uses, stage) as session:
        start_all(session, uses)
        yield session


def test_prompts_without_room_for_an_answer_are_left_out_with_an_event(session: Session, tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    short = next(iter(session.suites.values()))[0]
    long = dataclasses.replace(short, id="long", messages=({"role": "user", "content": "word " * 400},))
    kept = prompts_that_fit({"s": [short, long]}, session.tokenizer, 256, stage)
    assert kept == {"s": [short]}
    assert "1 of 2 prompts of suite s" in (tmp_path / "events.jsonl").read_text()
    with pytest.raises(InvalidInput, match="no prompt of suite 's' fits the target's context of 256"):
        prompts_that_fit({"s": [long]}, session.tokenizer, 256, stage)


def nothing() -> None:
    """No reason to stop."""


def entries_of(session: Session, variants: list[Variant]) -> list[Entry]:
    return [session.measure(unit, variants, nothing) for unit in units_of(session)]


def units_of(session: Session) -> list:  # type: ignore[type-arg]
    return session.units(round_robin(session.suites), (0.0, 1.0), 1)


def test_a_drafter_that_changes_nothing_is_identical_on_every_prompt(session: Session) -> None:
    entries = entries_of(session, VARIANTS)
    for variant in (CHAIN, TREE):
        for cell in report_cells(session, list(zip(units_of(session), entries, strict=True)), variant):
            assert cell.identical == cell.prompts == 6
            assert cell.divergences == ()
            assert sum(cell.accepted_histogram) > 0


def test_every_variant_answers_every_prompt_and_is_timed(session: Session) -> None:
    unit = units_of(session)[0]
    entry = session.measure(unit, VARIANTS, nothing)
    assert entry.key == unit.key
    assert entry.samples.keys() == {BASELINE, CHAIN.title, TREE.title}
    for name, sample in entry.samples.items():
        assert 0 < sample.ttft_s <= sample.seconds
        assert len(sample.token_ids) > 0
        assert sum(sample.accepted_histogram) == len(sample.accepted) == sample.rounds, name
        assert 1 + sum(accepted + 1 for accepted in sample.accepted) == len(sample.token_ids), name


def test_consecutive_prompts_of_a_suite_have_alternating_turns(session: Session) -> None:
    turns = [unit.turn for unit in units_of(session) if unit.prompt.suite == "sums" and unit.temperature == 0.0]
    assert [turn % 2 for turn in turns] == [0, 1] * (len(turns) // 2)


def test_noise_is_shared_by_variants_and_differs_between_prompts_and_repeats(session: Session) -> None:
    units = session.units(round_robin(session.suites), (1.0,), 2)
    assert len({unit.seed(0) for unit in units}) == len(units)
    assert units[0].seed(0) != units[0].seed(1)


def test_a_variant_run_on_another_target_is_reported_as_divergent_with_id_and_position(
        session: Session, tmp_path: Path) -> None:
    other = EmbeddedEngine(load_target(tiny_target(tmp_path / "other", seed=1), "float32"), "float32")
    other.start({CHAIN.title: DrafterUse(setting=Setting(method="ngram", tree=CHAIN.tree))})
    corrupted = dataclasses.replace(session, engine=other)
    units = units_of(session)
    entries = []
    for honest, wrong in zip(entries_of(session, [UNDRAFTED]), entries_of(corrupted, [CHAIN]), strict=True):
        entries.append(honest.model_copy(update={"samples": honest.samples | wrong.samples}))
    for cell in report_cells(session, list(zip(units, entries, strict=True)), CHAIN):
        assert cell.identical < cell.prompts
        assert len(cell.divergences) == cell.prompts - cell.identical
        for line in cell.divergences:
            assert line.startswith(f"{cell.suite}-")
            assert "position" in line
    # Two unrelated random targets cannot differ by rounding only, in every prompt.
    cells = report_cells(session, list(zip(units, entries, strict=True)), CHAIN)
    assert any("NOT a rounding tie" in line for cell in cells for line in cell.divergences)


def test_one_changed_token_is_found_at_its_position_with_the_targets_own_gap(session: Session) -> None:
    unit = next(u for u in units_of(session) if u.temperature == 0.0)
    answer = list(session.measure(unit, [UNDRAFTED], nothing).samples[BASELINE].token_ids)
    changed = [*answer[:2], (answer[2] + 1) % 300, *answer[3:]]
    found = explain(session.target, "p", unit.prompt_ids, answer, changed)
    assert found is not None
    assert (found.position, found.baseline_token, found.drafted_token) == (2, answer[2], changed[2])
    text = torch.tensor([*unit.prompt_ids, *answer[:2]])
    ((_, last),) = session.target.hidden_states([text], ())
    logits = session.target.logits(last[-1])
    assert int(logits.argmax()) == answer[2]
    assert found.first.gap == pytest.approx(float(logits.max() - logits[changed[2]]))
    assert "NOT a rounding tie" in found.line("float32")
    assert explain(session.target, "p", unit.prompt_ids, answer, answer) is None


def test_at_temperature_one_the_gap_is_taken_under_the_noise_that_chose(session: Session) -> None:
    unit = next(u for u in units_of(session) if u.temperature == 1.0)
    seed = unit.seed(session.spec.seed)
    answer = list(session.measure(unit, [UNDRAFTED], nothing).samples[BASELINE].token_ids)
    for position in range(len(answer)):
        changed = [*answer[:position], (answer[position] + 1) % 300]
        found = explain(session.target, "p", unit.prompt_ids, answer, changed, temperature=1.0, seed=seed)
        assert found is not None
        assert found.first.chosen == answer[position], "the noise of another position was used"


def test_a_near_tie_excuses_only_answers_whose_later_tokens_the_target_chooses(session: Session) -> None:
    unit = next(u for u in units_of(session) if u.temperature == 0.0)
    answer = list(session.measure(unit, [UNDRAFTED], nothing).samples[BASELINE].token_ids)
    other = [*answer[:3], (answer[3] + 1) % 300, *answer[4:]]
    found = explain(session.target, "p", unit.prompt_ids, other, answer)  # the drafted answer is the target's own
    assert found is not None
    assert len(found.later) == len(answer) - 4
    assert all(choice.gap == 0.0 for choice in found.later)
    tied = dataclasses.replace(found, first=dataclasses.replace(found.first, gap=0.06, magnitude=9.0))
    assert tied.is_tie("bfloat16")
    assert not tied.is_tie("float32")
    later = (dataclasses.replace(found.later[0], gap=1.0), *found.later[1:])
    wrong = dataclasses.replace(tied, later=later)
    assert not wrong.is_tie("bfloat16")
    assert "position 4 is 1 below the target's choice" in wrong.line("bfloat16")


def test_within_a_grammar_the_two_tokens_are_compared_with_each_other_and_no_later_one_is_judged(
        session: Session) -> None:
    unit = next(u for u in units_of(session) if u.temperature == 0.0)
    answer = list(session.measure(unit, [UNDRAFTED], nothing).samples[BASELINE].token_ids)
    one, two = ([*answer[:2], token, *answer[3:]] for token in ((answer[2] + 1) % 300, (answer[2] + 2) % 300))
    free, bound = (explain(session.target, "p", unit.prompt_ids, one, two, constrained=constrained)
                   for constrained in (False, True))
    assert free is not None
    assert bound is not None
    ((_, last),) = session.target.hidden_states([torch.tensor([*unit.prompt_ids, *answer[:2]])], ())
    logits = session.target.logits(last[-1])
    assert bound.first.gap == pytest.approx(abs(float(logits[one[2]] - logits[two[2]])), rel=1e-4)  # float32
    assert bound.first.gap < free.first.gap
    assert len(free.later) > len(bound.later) == 0


def test_an_answer_that_ends_early_is_a_divergence_at_its_end(session: Session) -> None:
    unit = units_of(session)[0]
    found = explain(session.target, "p", unit.prompt_ids, [5, 6, 7], [5, 6])
    assert found is not None
    assert found.position == 2
    assert "end drafted" in found.line("float32")


def test_a_second_turn_follows_the_undrafted_answer_and_is_measured_once(session: Session, tmp_path: Path) -> None:
    unit = units_of(session)[0]
    unit = dataclasses.replace(unit, prompt=dataclasses.replace(unit.prompt, further=("and why?",)))
    ledger, stage = JsonlLedger(tmp_path / "cells.jsonl", Entry, "d"), Stage(tmp_path)
    assert not is_measured(session, [unit], VARIANTS, ledger)
    (first, answered), (second, entry) = measure_units(session, [unit], VARIANTS, ledger, stage)
    assert (first, second.prompt.id) == (unit, f"{unit.prompt.id}/turn-2")
    answer = session.tokenizer.decode(answered.samples[BASELINE].token_ids)
    assert [message["content"] for message in second.prompt.messages[1:]] == [answer, "and why?"]
    assert second.prompt_ids == tuple(session.tokenizer.render(list(second.prompt.messages)))
    assert {sample.token_ids for sample in entry.samples.values()} == {entry.samples[BASELINE].token_ids}
    again = JsonlLedger(tmp_path / "cells.jsonl", Entry, "d")
    assert is_measured(session, [unit], VARIANTS, again)
    assert [found for _, found in measure_units(session, [unit], VARIANTS, again, stage)] == [answered, entry]
    assert len(again.entries) == 2


class OneServer(EmbeddedEngine):
    """Keeps one variant ready at a time, like servers of which one fits the memory, and notes who answered."""

    num_resident = 1  # type: ignore[assignment]

    def generate(self, variant: str, requests: Sequence[Request], concurrency: int, *,
                 truncate: bool = False) -> EngineRun:
        self.__dict__.setdefault("answered", []).append((variant, requests[0].id))
        return super().generate(variant, requests, concurrency, truncate=truncate)


def test_where_servers_replace_each_other_a_variant_answers_many_prompts_and_then_the_later_turns(
        session: Session, tmp_path: Path) -> None:
    spec = stage_specs(tmp_path)[0]
    engine = OneServer(session.target, "float32")
    engine.start(uses_of(spec, {one.title: (Setting(tree=one.tree) if one.tree else OFF) for one in VARIANTS[:2]}))
    alone = dataclasses.replace(session, engine=engine)
    units = [dataclasses.replace(unit, prompt=dataclasses.replace(unit.prompt, further=("and why?",)))
             for unit in units_of(alone)[:2]] + units_of(alone)[2:4]
    measured = measure_units(alone, units, VARIANTS[:2], JsonlLedger(tmp_path / "cells.jsonl", Entry, "d"),
                             Stage(tmp_path))
    switches = [variant for variant, _ in groupby(engine.__dict__["answered"], key=lambda one: one[0])]
    assert switches == [BASELINE, CHAIN.title, BASELINE]  # the part with the second turns begins where the first ended
    together = measure_units(session, units, VARIANTS[:2], JsonlLedger(tmp_path / "together.jsonl", Entry, "d"),
                             Stage(tmp_path))
    assert [entry.key for _, entry in measured] == [entry.key for _, entry in together]
    assert [{name: sample.token_ids for name, sample in entry.samples.items()} for _, entry in measured] == [
        {name: sample.token_ids for name, sample in entry.samples.items()} for _, entry in together]


def test_prompts_of_uneven_suites_are_all_asked() -> None:
    suites = {"a": [Prompt("a0", "a", ())], "b": [Prompt("b0", "b", ()), Prompt("b1", "b", ())]}
    assert [(turn, prompt.id) for turn, prompt in round_robin(suites)] == [(0, "a0"), (1, "b0"), (2, "b1")]


def test_transformers_generate_is_timed_on_the_same_prompts(session: Session) -> None:
    units = [unit for unit in units_of(session) if unit.temperature == 0.0][:2]
    found = compare(session, units, nothing)
    assert found.tokens_per_s > 0
    assert found.transformers_tokens_per_s > 0
    assert found.prompts == 2
    assert found.different == ()


def test_a_baseline_that_answers_otherwise_than_transformers_is_named(session: Session, tmp_path: Path) -> None:
    units = [unit for unit in units_of(session) if unit.temperature == 0.0][:2]
    other = tiny_target(tmp_path / "other", seed=7)
    another = compare(dataclasses.replace(session, target_path=other), units, nothing)
    assert len(another.different) == 2
    assert "logit gap" in another.different[0]
