"""Measures all variants on every block, interleaved, in the reference engine. Results go to a ledger.

One engine per checkpoint over one target, and one without a drafter; a variant is an engine with a draft-tree shape.
All variants answer a block before the next block begins, in an order that changes from block to block
(`eyrie_workers.intervals`). A block is timed by `engines.embedded.decode`: whole requests, prefill
included, every slot busy.

Each engine also counts the seconds of its phases (`phase_times.EngineStats`); the cost of a round follows from them.
Every answer is recorded, to be compared with the undrafted one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eyrie_api.v1alpha1.benchmark import BenchmarkSpec
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.tuning import OFF as OFF_SETTING
from eyrie_api.v1alpha1.tuning import Setting
from eyrie_workers.comparison.forms import OFF
from eyrie_workers.comparison.plan import Block, CompareSpec, blocks_of, suites_stage
from eyrie_workers.drafters.registry import UNTRAINED, open_drafter
from eyrie_workers.engines.embedded import EmbeddedEngine, decode
from eyrie_workers.intervals import interleaved
from eyrie_workers.measurement.benchmark.blocks import BlockRun, BlockRunner, block_run, block_size
from eyrie_workers.measurement.benchmark.session import Session, measuring, open_ledger, read_suites
from eyrie_workers.measurement.benchmark.variants import Bench, Variant
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.stage_program import Stage
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.templates import ChatTokenizer

LEDGER = "blocks.jsonl"
_WARMUP_TOKENS = 16  # as in `measurement.benchmark.blocks`


class VariantRun(Frozen):
    """One variant on one block."""

    block: BlockRun
    cpu_seconds: float
    prefill_s: float
    draft_s: float
    """Seconds of proposing drafts and settling pairs."""

    verify_s: float
    rounds: int
    """Rounds of the engine; a round of several rows counts once."""

    nodes: int
    """Tree nodes of one row, root included, summed over rounds."""


class Entry(Frozen):
    """One block answered by every variant: a line of the ledger."""

    suite: str
    concurrency: int
    temperature: float
    index: int
    runs: dict[str, VariantRun]
    """By the variant's title."""

    @property
    def key(self) -> tuple[str, int, float, int]:
        """Identifies the block."""
        return (self.suite, self.concurrency, self.temperature, self.index)


class LedgerKey(Frozen):
    """The inputs that a ledger's entries depend on."""

    benchmark: BenchmarkSpec
    concurrencies: tuple[int, ...]
    variants: tuple[Variant, ...]
    checkpoints: dict[str, str]
    """Digest of each family's checkpoint."""


@dataclass(frozen=True)
class Setup:
    """Engines with their drafters, and the prompts."""

    engines: Mapping[str, Engine]
    """By family; `off` among them."""

    tracks: Mapping[str, BlockRunner]
    """By suite."""

    variants: Sequence[Variant]

    def requests(self, block: Block) -> list[Request]:
        """The block's requests, equal for all variants; a repeated prompt gets another noise seed."""
        runner, num = self.tracks[block.suite], requests_of(block.concurrency)
        return runner.some_requests(runner.prompts, block.temperature, block.index * num, num)

    def run(self, variant: Variant, block: Block, requests: Sequence[Request]) -> VariantRun:
        """Measure one variant on one block."""
        engine = self.engines[variant.family]
        engine.stats.reset()
        setting = OFF_SETTING if variant.tree is None else Setting(tree=variant.tree)
        run = decode(engine, variant.tree, requests, block.concurrency, truncate=True)
        done, spent = block_run(setting, block.concurrency, block.temperature, block.index, run), engine.stats
        return VariantRun(block=done, cpu_seconds=run.cpu_seconds, prefill_s=spent.prefill_s, draft_s=spent.draft_s,
                      verify_s=spent.verify_s, rounds=spent.rounds, nodes=spent.nodes)

    def warm_up(self, blocks: Sequence[Block], stage: Stage) -> None:
        """Run the beginning of some blocks in every variant without timing: kernels are selected, memory is mapped."""
        for block in blocks:
            requests = [replace(request, max_new_tokens=min(request.max_new_tokens, _WARMUP_TOKENS))
                        for request in self.requests(block)[:block.concurrency]]
            for variant in self.variants:
                stage.pause_point()
                self.run(variant, block, requests)


def requests_of(concurrency: int) -> int:
    """Requests of a block: one alone, or every slot filled twice."""
    return 1 if concurrency == 1 else block_size(concurrency)


def measure(spec: CompareSpec, variants: Sequence[Variant], checkpoints: Mapping[str, Path], digests: Mapping[str, str],
            held_out_file: str, stage: Stage) -> list[Entry]:
    """Measure every block in every variant, unless the ledger has its entry. Returns entries in the order of blocks.

    checkpoints   directory of each trained family's drafter
    """
    blocks = list(blocks_of(spec))
    belongs_to = LedgerKey(benchmark=spec.benchmark, concurrencies=spec.concurrencies, variants=tuple(variants),
                           checkpoints=dict(digests))
    ledger = open_ledger(Entry, stage, belongs_to, LEDGER)
    known = {entry.key: entry for entry in ledger.entries}
    missing = [block for block in blocks if block.key not in known]
    if missing:
        with measuring(stage):
            setup = open_all(spec, variants, checkpoints, held_out_file, stage)
            setup.warm_up(list(_first_of_each(missing)), stage)
            for number, block in enumerate(missing, len(blocks) - len(missing)):
                stage.progress(number, len(blocks), "blocks", f"{block.suite}, T {block.temperature:g}, "
                                                              f"{block.concurrency} at once")
                entry = _measured(setup, block, stage)
                ledger.append(entry)
                known[entry.key] = entry
            stage.progress(len(blocks), len(blocks), "blocks")
    return [known[block.key] for block in blocks]


def open_all(spec: CompareSpec, variants: Sequence[Variant], checkpoints: Mapping[str, Path], held_out_file: str,
             stage: Stage) -> Setup:
    """Load the target, every drafter, and the prompts."""
    torch.set_num_threads(spec.benchmark.threads or torch.get_num_threads())
    suites = read_suites(suites_stage(spec, held_out_file), stage)
    path = resolve(spec.target)
    tokenizer, target = ChatTokenizer(path), load_target(path, spec.target.dtype)
    slots = max(spec.concurrencies)
    engines = {family: _engine(family, checkpoints, target,
                               slots) for family in dict.fromkeys(a.family for a in variants)}
    bench = Bench(EmbeddedEngine(target, spec.target.dtype, slots), seed=spec.benchmark.seed,
                  max_new_tokens=spec.benchmark.max_new_tokens, stop_ids=tuple(tokenizer.eos_ids))
    session = Session(bench, path, tokenizer, suites, spec.benchmark, spec.target.dtype)
    return Setup(engines, {name: BlockRunner(session, prompts) for name, prompts in suites.items()}, variants)


def _engine(family: str, checkpoints: Mapping[str, Path], target: TargetModel, slots: int) -> Engine:
    if family == OFF:
        return Engine(target, max_concurrency=slots)
    drafter = UNTRAINED[family]() if family in UNTRAINED else open_drafter(checkpoints[family], target)
    return Engine(target, drafter, max_concurrency=slots)


def _first_of_each(blocks: Sequence[Block]) -> Iterator[Block]:
    """The first block of every concurrency and temperature."""
    seen = set()
    for block in blocks:
        if (block.concurrency, block.temperature) not in seen:
            seen.add((block.concurrency, block.temperature))
            yield block


def _measured(setup: Setup, block: Block, stage: Stage) -> Entry:
    requests, runs = setup.requests(block), {}
    for variant in interleaved(setup.variants, block.turn):
        stage.pause_point()
        runs[variant.title] = setup.run(variant, block, requests)
    return Entry(suite=block.suite, concurrency=block.concurrency, temperature=block.temperature, index=block.index,
                 runs=runs)
