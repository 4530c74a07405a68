"""Made-up ledger entries: what variants of known speed and acceptance would have left."""

from collections.abc import Mapping
from typing import NamedTuple

from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.reports import Environment
from eyrie_workers.comparison.claims import PAIRS, evaluate_claims, three_versions
from eyrie_workers.comparison.forms import OFF
from eyrie_workers.comparison.measuring import Entry, VariantRun
from eyrie_workers.comparison.plan import Budget, variants_of
from eyrie_workers.comparison.report import CompareReport, MeasuredBlocks, Trained, choose, pair_comparisons, rank
from eyrie_workers.measurement.benchmark.blocks import BlockRun

TREE = DraftTreeShape(num_steps=4, top_k=2, num_draft_tokens=8)
SUITES = ("chat", "code")
# A prompt is slower or faster for every variant, and a little differently so for each.
_BLOCKS = (0.8, 1.0, 1.3, 1.1)


class Made(NamedTuple):
    """A variant as it is to be measured: each round accepts `accepted` of the drafted tokens."""

    speedup: float
    accepted: int = 1
    draft_s: float = 0.2
    changed_output: bool = False
    jitter: float = 0.02
    at_load: float = 1.0
    """Times the speed-up, at every concurrency but 1."""


def run_of(made: Made, name: str, concurrency: int, temperature: float, index: int, block: int) -> VariantRun:
    """20 tokens in rounds of `accepted` + 1; off takes a second times the block's own length."""
    wobble = 1.0 + made.jitter * ((index * 7 + len(name) * 3) % 5 - 2)
    speed = made.speedup * (made.at_load if concurrency > 1 else 1.0)
    rounds = 20 // (made.accepted + 1)
    histogram = [0] * made.accepted + [rounds]
    tokens = tuple(range(20))
    return VariantRun(
        block=BlockRun(concurrency=concurrency, temperature=temperature, rung=index, variant=name,
                       seconds=_BLOCKS[block] / speed * wobble, tokens=20, accepted_histogram=tuple(histogram),
                       answers={"a": (*tokens[:-1], 99) if made.changed_output else tokens}, whole=("a",)),
        cpu_seconds=1.0, prefill_s=0.1, draft_s=made.draft_s * rounds, verify_s=float(rounds), rounds=rounds,
        nodes=rounds * (made.accepted + 1))


def entries_of(variants: Mapping[str, Made], concurrencies: tuple[int, ...] = (1, 4)) -> list[Entry]:
    """Four blocks of each suite, temperature and concurrency."""
    every = {OFF: Made(1.0, 0, 0.0), **variants}
    return [Entry(suite=suite, concurrency=concurrency, temperature=temperature, index=index, runs={
                title: run_of(made, title, concurrency, temperature, index, index) for title, made in every.items()})
            for index in range(4) for concurrency in concurrencies for suite in SUITES for temperature in (0.0, 1.0)]


def report_of(variants: Mapping[str, Made], concurrencies: tuple[int, ...] = (1, 4)) -> CompareReport:
    """A whole report over them, as `run.conclude` makes it; claims and rows included, the answer not."""
    measured_blocks = MeasuredBlocks(entries_of(variants, concurrencies))
    table = variants_of(("eagle1", "eagle3", "medusa", "dflash", "standalone"), TREE)
    ranked = rank(measured_blocks.variant(variant) for variant in table
                  if variant.title in variants or variant.title == OFF)
    families = dict.fromkeys(one.variant.family for one in ranked if one.variant.family not in (OFF, "ngram"))
    report = CompareReport(
        target="quickstart",
        target_parameters=12_900_000,
        budget=Budget(kind="tokens", amount=300_000),
        store_tokens=130_000,
        store_bytes=10**8,
        conversations=900,
        suites=SUITES,
        temperatures=(0.0, 1.0),
        concurrencies=concurrencies,
        max_new_tokens=20,
        variants=ranked,
        trained=tuple(trained(name) for name in families),
        failed={},
        contests=pair_comparisons(measured_blocks, ranked, PAIRS),
        winner=choose(ranked),
        seconds={"measuring": 30.0},
        environment=Environment(
            hardware="a machine",
            cpu_count=2,
            threads=2,
            torch="2",
            python="3.11",
            dtype="float32",
            code_version="none",
            date="2026-11-22T00:00:00",
        ),
    )
    return report.model_copy(update={"rows": three_versions(report), "claims": evaluate_claims(report)})


def trained(family: str) -> Trained:
    """A family's training."""
    return Trained(family=family, checkpoint=f"train/{family}", digest="sha256:" + "0" * 64, parameters=1_000_000,
                   epochs=2.3, steps=290, tokens=300_000, seconds=60.0, cpu_seconds=118.0, tokens_per_s=5000.0,
                   draft_vocab_size=1536, layers=(2, 8, 13), feature_bytes=10**8, first_accuracy=0.7)
