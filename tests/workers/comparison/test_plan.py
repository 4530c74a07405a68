"""What a comparison will do: equal budgets, distinct variants, blocks alike for all."""

import pytest
from pydantic import ValidationError

from eyrie_api.decisions.training_defaults import tokens_per_step
from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.data import DataSource, DataSpec
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.families import FAMILIES
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_workers.comparison.forms import shape
from eyrie_workers.comparison.plan import (
    Budget,
    CompareSpec,
    blocks_of,
    calibration_epochs,
    epochs_for_seconds,
    epochs_for_tokens,
    num_blocks,
    train_stage,
    variants_of,
)
from eyrie_workers.comparison.settings import build_parser, read
from eyrie_workers.drafters.registry import UNTRAINED
from eyrie_workers.training.packing import Schedule

TREE = DraftTreeShape(num_steps=5, top_k=2, num_draft_tokens=10)
EVERY = tuple(FAMILIES)


def spec_of(**changes: object) -> CompareSpec:
    return CompareSpec.model_validate({
        "target": TargetSpec(model="quickstart"), "data": DataSpec(sources=(DataSource(path="quickstart"),)),
        "families": EVERY, "budget": Budget(kind="tokens", amount=300_000), "benchmark": {"tree": TREE}} | changes)


def asked(*options: str) -> CompareSpec:
    return read(build_parser(list(FAMILIES)).parse_args(["--out", "there", *options]))


def test_equal_tokens_are_the_same_documents_in_the_same_batches() -> None:
    spec, lengths = spec_of(), [40 + 7 * (row % 13) for row in range(300)]
    epochs = epochs_for_tokens(60_000, sum(lengths))
    schedules = []
    for family in spec.families:
        result = train_stage(spec, family, "store", epochs).train
        schedules.append(Schedule(range(300), lengths, tokens_per_step(result), result.epochs, result.seed,
                                  result.max_steps))
    seen = [[schedule.at(step).rows for step in range(schedule.num_steps)] for schedule in schedules]
    assert all(one == seen[0] for one in seen)
    tokens = sum(lengths[row] for rows in seen[0] for row in rows)
    assert abs(tokens - 60_000) <= tokens_per_step(spec.train)


def test_trainings_differ_in_the_family_alone() -> None:
    spec = spec_of()
    stages = [train_stage(spec, family, "store", 2.0) for family in spec.families]
    assert [stage.drafter.family for stage in stages] == list(EVERY)
    plain = {stage.model_copy(update={"candidate": "", "drafter": spec.drafter}).model_dump_json() for stage in stages}
    assert len(plain) == 1


def test_seconds_buy_epochs_at_the_calibrated_speed() -> None:
    assert epochs_for_seconds(60.0, 0.2, 4.0, 100_000) == pytest.approx(3.0)
    assert epochs_for_seconds(60.0, 0.2, 8.0, 100_000) == pytest.approx(1.5)


def test_a_calibration_never_reads_the_store_twice() -> None:
    spec = spec_of()
    assert calibration_epochs(spec, 10) == 1.0
    assert calibration_epochs(spec, 10_000_000) * 10_000_000 == pytest.approx(24 * tokens_per_step(spec.train))


def test_a_budget_that_would_repeat_the_store_for_ever_is_refused_with_the_hint() -> None:
    with pytest.raises(InvalidInput, match="more conversations"):
        epochs_for_tokens(1e9, 1000)


@pytest.mark.parametrize(("text", "kind", "amount"), [
    ("tokens=300k", "tokens", 300_000), ("tokens=2m", "tokens", 2_000_000), ("seconds=60", "seconds", 60),
    ("Tokens=1.5K", "tokens", 1500), ("tokens=42", "tokens", 42)])
def test_budgets_are_read_as_people_write_them(text: str, kind: str, amount: float) -> None:
    budget = Budget.parse(text)
    assert (budget.kind, budget.amount) == (kind, amount)


@pytest.mark.parametrize("text", ["", "300k", "tokens=", "tokens=-3", "seconds=0", "hours=2", "tokens=nan", "tokens=k"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="tokens=300k"):
        Budget.parse(text)


def test_every_variant_has_a_name_of_its_own_and_a_shape_that_fits() -> None:
    variants = variants_of(EVERY, TREE)
    assert len({variant.title for variant in variants}) == len(variants)
    assert len({(variant.family,
                 variant.tree.label() if variant.tree else "") for variant in variants}) == len(variants)
    assert variants[0].tree is None
    assert {variant.family for variant in variants} == {*EVERY, *UNTRAINED, "off"}
    for variant in variants[1:]:
        assert variant.tree is not None
        assert variant.tree.num_steps == TREE.num_steps
        assert (variant.kind == "chain") == (variant.tree.top_k == 1)
        assert variant.tree.static == (variant.kind == "static tree")


def test_eagle_1_and_2_are_one_checkpoint_and_trees_of_one_size() -> None:
    titled = {variant.title: variant for variant in variants_of(EVERY, TREE)}
    one, two = titled["EAGLE-1"], titled["EAGLE-2"]
    assert one.family == two.family
    assert one.tree is not None
    assert two.tree is not None
    assert one.tree.model_copy(update={"static": False}) == two.tree
    assert one.tree.static


def test_off_has_no_shape() -> None:
    assert shape("off", TREE) is None


def test_blocks_are_distinct_and_every_suite_load_and_temperature_has_its_share() -> None:
    spec = spec_of(concurrencies=(1, 4))
    blocks = list(blocks_of(spec))
    assert len({block.key for block in blocks}) == len(blocks)
    for suite in spec.benchmark.suites:
        for temperature in spec.benchmark.temperatures:
            for concurrency in (1, 4):
                own = [b for b in blocks if (b.suite, b.temperature, b.concurrency) == (
                    suite.name, temperature, concurrency)]
                assert len(own) == num_blocks(concurrency, suite.max_prompts)
    assert [block.turn for block in blocks] == list(range(len(blocks)))


@pytest.mark.parametrize(("changes", "says"), [
    ({"families": ("eagle3", "eagle3")}, "families .* has a duplicate"),
    ({"concurrencies": (1, 1)}, "concurrencies .* has a duplicate"), ({"families": ()}, "families\n.* at least 1 item"),
    ({"benchmark": {"tree": DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)}}, "is not a dynamic tree")])
def test_what_cannot_be_compared_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        spec_of(**changes)


def test_defaults_put_every_family_and_every_quickstart_suite_on_the_bench() -> None:
    spec = asked()
    assert set(spec.families) == set(FAMILIES)
    assert [suite.name for suite in spec.benchmark.suites] == ["chat", "math", "code", "tools"]
    assert spec.concurrencies == (1, 4)
    assert asked("--short").data.max_conversations < spec.data.max_conversations


@pytest.mark.parametrize(("options", "named"), [
    (("--target", "my-model"), "--data"), (("--families", "eagle9"), "eagle9"), (("--budget", "lots"), "lots"),
    (("--tree", "5"), "--tree"), (("--tree", "5/1/6"), "top_k"), (("--temperatures", "warm"), "--temperatures"),
    (("--suites", "Chat!.jsonl"), "--suites"), (("--suites", "a/x.jsonl", "--suites", "b/x.jsonl"), "x"),
    (("--concurrency", "1.5"), "concurrencies"), (("--codec", "int3"), "codec")])
def test_an_option_that_cannot_be_is_named(options: tuple[str, ...], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        asked(*options)


def test_another_target_is_measured_on_what_was_held_out_of_its_data() -> None:
    spec = asked("--target", "my-model", "--data", "chats.jsonl")
    assert [(suite.name, suite.path) for suite in spec.benchmark.suites] == [("held-out", "held-out")]
    assert spec.drafter.draft_vocab_size is None
    named = asked("--target", "my-model", "--data", "chats.jsonl", "--suites", "legal=cases.jsonl", "--suites",
                  "quickstart:chat").benchmark.suites
    assert [(suite.name, suite.path) for suite in named] == [("legal", "cases.jsonl"), ("chat", "quickstart:chat")]
