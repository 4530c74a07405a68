"""Up to how many concurrent requests speculation pays.

The claim: "At batch size 7 and above, EAGLE-3 on V1 starts losing to the baseline." Drafting and verifying use
arithmetic units that are idle while few requests are decoded, and busy with many.

The same engine answers the same requests undrafted, with a chain and with a tree, at 1, 2, 4, 8 and 16 concurrent
requests: a request is admitted as soon as a slot is free. Variants answer a block of requests in turn, in an order that
changes from block to block; a speed-up is tokens per second over the undrafted variant, and its interval comes from
resampling blocks. The *crossover* of a shape is the first concurrency whose speed-up is not above 1, and it
is clear where the interval lies below 1.

A CPU has far fewer idle arithmetic units than a GPU, so the crossover is of this machine only. The tuner
(`stages.tune`) finds it on a job's own machine and writes the operating map that the engine follows.

    python -m benchmarks.experiments.crossover [--short] --out DIR
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.timing import OFF
from benchmarks.experiments.workspace import CHAIN, Workspace
from benchmarks.figure_style import BASELINE_BLUE, BEST_GREEN, OTHER_GREY, WARM_ORANGE, new_figure, title
from eyrie_api.artifacts import digest_bytes, digest_directory
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.model import Frozen, Interval
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.machine import machine_lock
from eyrie_workers.measure.intervals import FloatArray, interleaved, interval_around, standard_error
from eyrie_workers.speculation.engine import Engine, Request

NAME = "crossover"
CLAIM = "\"The crossover point was around 7 concurrent requests\" (EAGLE-3 on SGLang's V1 path against no drafter)."
CONCURRENCIES = (1, 2, 4, 8, 16)
TREE = DraftTreeShape(num_steps=4, top_k=2, num_draft_tokens=10)
SHORT_CHAIN = DraftTreeShape(num_steps=2, top_k=1, num_draft_tokens=3)
VARIANTS: dict[str, DraftTreeShape | None] = {OFF: None} | {
    f"{'chain' if shape.top_k == 1 else 'tree'} {shape.label()}": shape for shape in (CHAIN, SHORT_CHAIN, TREE)}
_BLOCKS = 5


class Block(Frozen):
    """One block of requests through all variants at one concurrency."""

    concurrency: int
    number: int
    tokens: dict[str, int]
    seconds: dict[str, float]


def measure(workspace: Workspace) -> ExperimentResult:
    """Time every variant at every concurrency, block by block; resumable after each block."""
    drafter = workspace.train(workspace.store(workspace.rows())).last
    key = (digest_directory(drafter), workspace.scale, workspace.spec, tuple(VARIANTS), CONCURRENCIES)
    file = workspace.work / f"blocks-{digest_bytes(repr(key).encode())[7:23]}.jsonl"
    done = [Block.model_validate_json(line) for line in file.read_text().splitlines()] if file.exists() else []
    seen = {(block.concurrency, block.number) for block in done}
    prompts, served = workspace.prompts(), open_drafter(drafter, workspace.target)
    num_blocks = _BLOCKS if workspace.scale.seeds > 2 else 2
    with machine_lock(lambda: None):
        for concurrency in CONCURRENCIES:
            engine, size = Engine(workspace.target, served, max_concurrency=concurrency), max(4, 2 * concurrency)
            for number in range(num_blocks):
                if (concurrency, number) in seen:
                    continue
                chosen = [prompts[(number * size + i) % len(prompts)] for i in range(size)]
                requests = [replace(workspace.request(prompt, 0.0), id=str(i)) for i, prompt in enumerate(chosen)]
                done.append(time_block(engine, requests, number))
                with file.open("a") as ledger:
                    ledger.write(done[-1].model_dump_json() + "\n")
            values = ratios(fields_of(done, concurrency).sum(0)[None])[0]
            measured = ", ".join(f"{variant} {value:.2f}" for variant, value in zip(drafted(), values, strict=True))
            print(f"{concurrency} at once: {measured}", flush=True)
    return evaluate(done)


def time_block(engine: Engine, requests: Sequence[Request], number: int) -> Block:
    """Time a block in every variant, interleaved; before an engine's first block every variant is warmed up."""
    if number == 0:
        for shape in VARIANTS.values():
            engine.generate(requests[:engine.max_concurrency], shape)
    tokens, seconds = {}, {}
    for name in interleaved(list(VARIANTS), number):
        began = time.perf_counter()
        answers = engine.generate(requests, VARIANTS[name])
        seconds[name] = time.perf_counter() - began
        tokens[name] = sum(len(answer.token_ids) for answer in answers)
    return Block(concurrency=engine.max_concurrency, number=number, tokens=tokens, seconds=seconds)


def drafted() -> list[str]:
    """The variants that draft."""
    return [name for name in VARIANTS if name != OFF]


def fields_of(blocks: Sequence[Block], concurrency: int) -> FloatArray:
    """[blocks, variants * 2]: tokens and seconds of every variant, the undrafted first."""
    return np.array([[value for name in VARIANTS for value in (block.tokens[name], block.seconds[name])]
                     for block in blocks if block.concurrency == concurrency], dtype=np.float64)


def ratios(sums: FloatArray) -> FloatArray:
    """[R, variants * 2] sums to [R, drafted variants] speed-ups."""
    speeds = sums[:, 0::2] / sums[:, 1::2]
    return np.asarray(speeds[:, 1:] / speeds[:, :1])


def evaluate(blocks: Sequence[Block]) -> ExperimentResult:
    """The result from the timings. Pure."""
    values: dict[tuple[str, int], tuple[float, Interval]] = {}
    speeds: dict[int, float] = {}
    for concurrency in CONCURRENCIES:
        fields = fields_of(blocks, concurrency)
        sums = fields.sum(0)
        speeds[concurrency] = float(sums[0] / sums[1])
        for place, variant in enumerate(drafted()):
            value = float(ratios(sums[None])[0, place])
            error = standard_error(fields, lambda of, place=place: ratios(of)[:, place])  # type: ignore[misc]
            values[variant, concurrency] = (value, interval_around(value, error, len(fields)))
    table = [[str(c), f"{speeds[c]:.0f}", *(_with_interval(*values[variant, c]) for variant in drafted())]
             for c in CONCURRENCIES]
    return ExperimentResult(
        found=[_first(values), *(_text(values, variant) for variant in drafted())],
        measured=f"One EAGLE-3 drafter, greedy, {len(blocks) // len(CONCURRENCIES)} blocks of requests from the four "
        "suites, twice as many as run at once and at least 4, variants interleaved block by block; 95 % intervals "
        "over blocks.",
        limits=(
            "This engine and this processor; a GPU's idle arithmetic ends much later.",
            "Blocks end with fewer requests in flight than they began with, in all variants alike.",
        ),
        columns=("at once", "tokens/s undrafted", *(f"speed-up, {variant}" for variant in drafted())),
        table=table,
        figure=lambda: figure(values),
        timed=True,
    )


def crossing(values: Mapping[tuple[str, int], tuple[float, Interval]], variant: str) -> int | None:
    """The first concurrency at which a variant does not pay; None when it pays at every one."""
    return next((c for c in CONCURRENCIES if values[variant, c][0] <= 1.0), None)


def _first(values: Mapping[tuple[str, int], tuple[float, Interval]]) -> str:
    sentences = []
    for variant in drafted():
        at = crossing(values, variant)
        sure = "" if at is None or values[variant, at][1].high < 1.0 else " (its interval does not exclude 1)"
        sentences.append(f"{variant} pays up to {CONCURRENCIES[-1]} at once and beyond" if at is None else
                    f"{variant} stops paying at {at}{sure}")
    return f"Where speculation stops paying here: {'; '.join(sentences)}."


def _text(values: Mapping[tuple[str, int], tuple[float, Interval]], variant: str) -> str:
    return (f"{variant[0].upper()}{variant[1:]}: " + ", ".join(f"{values[variant, c][0]:.2f}x at {c}" for c
                                                               in CONCURRENCIES) + ".")


def _with_interval(value: float, interval: Interval) -> str:
    return f"{value:.2f} ({interval.low:.2f}-{interval.high:.2f})"


def figure(values: Mapping[tuple[str, int], tuple[float, Interval]]) -> Figure:
    """Speed-up over concurrency."""
    drawn, (axes,) = new_figure(8.5, 4.8)
    for variant, colour, marker in zip(drafted(), (BEST_GREEN, WARM_ORANGE, BASELINE_BLUE), "o^s", strict=True):
        points = [values[variant, c] for c in CONCURRENCIES]
        heights = [value for value, _ in points]
        reach = [[value - of.low for value, of in points], [of.high - value for value, of in points]]
        axes.errorbar(CONCURRENCIES, heights, reach, color=colour, marker=marker, capsize=3, label=variant)
    axes.axhline(1.0, color=OTHER_GREY, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(CONCURRENCIES, [str(c) for c in CONCURRENCIES])
    axes.set(xlabel="requests decoded at once", ylabel="speed-up over the undrafted engine")
    axes.legend(loc="upper right")
    title(drawn, "What speculation is worth as requests are added", "greedy; 95 % intervals over blocks of requests")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
