"""What each experiment says of figures whose verdict is known."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.calibration.measure import Curve, RankCount, curve
from benchmarks.experiments import (
    acceptance_throughput,
    block_heads,
    calibration,
    crossover,
    data_amount,
    depth_width,
    families,
    layer_choice,
    learning_rates,
    one_choice,
    training_vs_served,
)
from benchmarks.experiments.fits import Counted
from benchmarks.experiments.report import MachineWatch, build_report, index, page, write
from benchmarks.experiments.timing import Rung
from benchmarks.peers import published as peers
from eyrie_api.contract.reports import CheckpointReport


def counted(taus: Sequence[float], rounds: int = 100) -> list[Counted]:
    return [Counted(suite="chat", prompt=f"chat/{i}", tokens=round(value * rounds), rounds=rounds,
                    accepted=round((value - 1.0) * rounds)) for i, value in enumerate(taus)]


def rungs(accuracy: Sequence[float], theoretical: Sequence[float]) -> list[Rung]:
    return [Rung(f"run {i}, step 1", f"run {i}", Path("x"), CheckpointReport(
        name="c", candidate="c0", step=1, path="p", digest="d", epoch=1.0, loss=1.0 - first,
        accuracy=(first, first / 2), conditional_acceptance=(first, first / 2), theoretical_speedup=speed))
        for i, (first, speed) in enumerate(zip(accuracy, theoretical, strict=True))]


def timings(taus: Sequence[float], round_s: float, prompts: int = 6) -> np.ndarray:
    """Prompts of 100 rounds; a round costs the same whatever it yields; undrafted one token per 10 ms."""
    variants = [[100.0, 1.0, 100.0, 0.0], *([100 * t, 100 * round_s, 100.0, 100 * (t - 1)] for t in taus)]
    return np.array([variants] * prompts)


def test_equal_rounds_make_throughput_linear_in_tau() -> None:
    ladder = rungs([0.1] * 5, [1.0] * 5)
    fields = timings([1.5, 2.0, 2.5, 3.0, 4.0], 0.015)
    finding = acceptance_throughput.evaluate(ladder, {0.0: fields, 1.0: fields})
    assert finding.found[0].startswith("Linear: r2 1.000")
    assert "breaks even with none at tau 1.50" in finding.found[1]


def test_rounds_of_different_cost_are_said_not_to_be_linear() -> None:
    ladder = rungs([0.1] * 5, [1.0] * 5)
    fields = timings([1.5, 2.0, 2.5, 3.0, 4.0], 0.015)
    fields[:, 1, 1] /= 4
    assert acceptance_throughput.evaluate(ladder, {0.0: fields}).found[0].startswith("Not near-perfectly linear")


def test_confidence_that_means_acceptance_is_said_to_hold_and_one_that_does_not_is_not() -> None:
    def variants(accepted: Sequence[int]) -> dict[calibration.CurveKey, tuple[Curve, tuple[RankCount, ...]]]:
        outcomes = [(confidence, place < right) for confidence, right in zip((0.15, 0.35, 0.55, 0.95), accepted,
                                                                           strict=True) for place in range(100)]
        return {(family, t): (curve(outcomes), (RankCount(rank=0, count=400, accepted=sum(accepted)),))
                for family in calibration.COMPARED for t in calibration.TEMPERATURES}

    true = calibration.evaluate(variants([15, 35, 55, 95]), 4)
    assert true.found[0].startswith("The claim holds: above a confidence of 0.1 it misses acceptance by 0.00")
    assert true.found[1].startswith("No bin of more confident guesses is surely right less often")
    vain = calibration.evaluate(variants([30, 5, 20, 30]), 4)
    assert vain.found[0].startswith("The claim does not hold")
    assert "(too sure)" in vain.found[0]
    assert vain.found[1].startswith("More confident guesses are surely right less often in some bin: eagle3 at")
    assert vain.figure().axes


def test_a_metric_that_orders_wrongly_is_named_with_the_pair_and_the_loss() -> None:
    ladder = rungs(accuracy=[0.9, 0.6, 0.5, 0.4, 0.3], theoretical=[2.0, 4.0, 3.0, 2.5, 1.9])
    finding = training_vs_served.evaluate(ladder, timings([2.0, 4.0, 3.0, 2.5, 1.9], 0.02))
    assert finding.found[0].startswith("Rank correlation with served tau: theoretical speed-up 1.00")
    assert "first-step accuracy 50.0%" in finding.found[1]
    assert "run 0, step 1 (0.900) serves 1.00x, run 1, step 1 (0.600) 2.00x, 100% faster" in finding.found[3]


def test_the_crossover_is_the_first_load_at_which_drafting_does_not_pay() -> None:
    blocks = [crossover.Block(concurrency=c, number=n, tokens=dict.fromkeys(crossover.VARIANTS, 100),
                              seconds={name: 1.0 if name == "off" else 0.5 * c**0.5 for name in crossover.VARIANTS})
              for c in crossover.CONCURRENCIES for n in range(3)]
    finding = crossover.evaluate(blocks)
    assert finding.found[0].count("stops paying at 4") == 3


@pytest.mark.parametrize(("slopes", "verdict"), [
    ((0.5, 0.0), "The claim holds here"), ((0.5, 0.4), "EAGLE-3 gains more"), ((0.3, 0.3), "The claim does not show")])
def test_the_ceiling_of_eagle1_is_claimed_only_beyond_the_seeds_scatter(slopes: tuple[float, float],
                                                                         verdict: str) -> None:
    runs = {(family, 50 << step): [counted([2.0 + step * slope + scatter] * 4) for scatter in (0.0, 0.01, 0.02)]
            for family, slope in zip(("eagle3", "eagle1"), slopes, strict=True) for step in range(5)}
    finding = data_amount.evaluate(runs, {point: [2.0] for point in runs}, steps=10)
    assert finding.found[0].startswith(verdict)


@pytest.mark.parametrize(("deeper_is", "verdict"), [(0.2, "holds"), (-0.05, "does not hold")])
def test_depth_is_credited_only_where_deep_shapes_accept_more(deeper_is: float, verdict: str) -> None:
    runs = {(shape.label(), t): counted([2.0 + deeper_is * shape.num_steps] * 4)
            for shape in depth_width.shapes() for t in depth_width.TEMPERATURES}
    assert depth_width.evaluate(runs).found[0].startswith(f"Depth against width at equal nodes {verdict}:")


@pytest.mark.parametrize(("before", "after", "verdict"), [
    (2.0, 2.0, "The kind of layer matters"), (2.0, 3.0, "Passing through full attention matters"),
    (3.0, 3.0, "The claim does not show here")])
def test_layers_of_full_attention_are_credited_by_the_layers_next_to_them(before: float, after: float,
                                                                          verdict: str) -> None:
    taus = dict.fromkeys(layer_choice.CHOICES, 2.0) | {"full": 3.0, "before": before, "after": after}
    runs = {name: [counted([value] * 4), counted([value + 0.01] * 4)] for name, value in taus.items()}
    finding = layer_choice.evaluate(runs, {name: [0.5] for name in runs}, (4, 8, 12))
    assert finding.found[0].startswith(verdict)


def test_a_choice_is_better_or_worse_only_where_its_interval_leaves_one_out() -> None:
    spread = [0.1, -0.1, 0.3, -0.3]  # of single prompts: alike in all choices, so differences are clear

    def group(base: str, **taus: float) -> dict[str, dict[float, list[Counted]]]:
        return {name: {t: counted([value + of for of in spread]) for t in one_choice.TEMPERATURES}
                for name, value in ({base: 2.0} | taus).items()}

    runs = {one_choice.RECIPE: group(one_choice.RECIPE, up=2.5, down=1.5), one_choice.DATA: group(one_choice.DATA)}
    runs[one_choice.RECIPE]["unclear"] = {t: counted([2.6, 1.4, 2.6, 1.5]) for t in one_choice.TEMPERATURES}
    finding = one_choice.evaluate(runs, 10)
    assert finding.found[0].startswith("Against defaults at temperature 0: better up +25.0 %")
    assert "; worse down -25.0 %" in finding.found[0]
    assert finding.found[0].endswith("1 of 3 without a clear difference.")
    assert "better nothing; worse nothing" in finding.found[2]


def test_a_rate_is_credited_family_by_family_where_its_interval_leaves_one_out() -> None:
    alike, higher = counted([2.0, 1.9, 2.2, 2.1]), counted([2.3, 2.2, 2.5, 2.4])
    finding = learning_rates.evaluate({
        "eagle1": ((4e-3, alike), (2e-3, higher)), "eagle3": ((2e-3, alike), (1e-3, alike)),
        "dflash": ((5e-4, higher), (2.5e-4, alike))}, 512, 240, 4)
    assert finding.found[0] == ("At width 512 a rate of 256 / 512 of the family's own is clearly better for eagle1, "
                                "clearly worse for dflash.")
    assert [row[0] for row in finding.table] == ["eagle1", "eagle3", "dflash"]


def test_families_are_ranked_by_served_speed_and_carried_over_by_their_cost_of_drafting() -> None:
    taus = {"eagle3": 2.4, "eagle1": 2.2, "dflash": 2.0}
    fields = timings(list(taus.values()), 0.015)
    runs = {name: [counted([value + 0.1, value - 0.1])] * (1 + 2 * (name == "eagle3")) for name, value in taus.items()}
    finding = families.evaluate(runs, fields, dict.fromkeys(taus, 1.5), dict.fromkeys(taus, 100), 4, 480.0)
    assert [row[0] for row in finding.table] == ["eagle3", "eagle1", "dflash"]
    assert {row[finding.columns.index("predicted")] for row in finding.table} == {"1.50"}
    assert finding.found[0].startswith("Fastest served: eagle3 with 1.60x")
    assert finding.found[1] == "tau over three seeds: eagle3 2.40 (sd 0.000)."
    alike = {name: families.carried(families.DRAFTERS[name], 2.0, 4, *families.LARGER["8B"], users=1) for name in taus}
    assert 2.0 > alike["dflash"] > alike["eagle3"] > 1.0  # one pass for a block against one for each token
    dflash = families.DRAFTERS["dflash"]
    assert all(families.carried(dflash, 2.0, 4, *families.LARGER["8B"], users=users) < alike["dflash"]
               for users in (64, 256))


def test_heads_of_blocks_are_compared_with_the_marginals_over_all_seeds() -> None:
    runs = {"dflash": [counted([1.8, 2.0, 1.9])] * 2, "dflash + domino": [counted([2.7, 3.0, 2.8])] * 2}
    finding = block_heads.evaluate(runs, 240, 5)
    assert finding.found == [f"dflash + domino: tau {block_heads.over_marginals(runs)['dflash + domino'].text} over "
                             "dflash's."]
    assert [row[0] for row in finding.table] == ["dflash", "dflash + domino"]
    assert finding.table[0][-1] == "-"
    assert finding.table[1][-1].startswith("+4")


def test_programs_are_compared_over_all_seeds_at_equal_time_and_over_one_at_equal_epochs() -> None:
    def run(name: str, kind: str, seed: int, value: float) -> peers.Run:
        spent = {"real_tokens_per_s": 100.0, "peak_rss_above_imports_mb": 50.0, "loop_s": 240.0}
        return peers.Run(kind=kind, name=name, rate=1e-3, seed=seed, epochs=2.0, spent=spent,
                         counted=tuple(counted([value + 0.1, value - 0.1, value])))

    timed = {name: [run(name, peers.TIME, seed, value + 0.2 * seed) for seed in (0, 1)]
             for name, value in zip(peers.NAMES, (2.0, 1.5, 1.6), strict=True)}
    even = {name: run(name, peers.EPOCHS, 0, 2.0) for name in peers.NAMES}
    text = peers.evaluate(timed, even, dict.fromkeys(peers.NAMES, 912.0))
    assert [line.split(" (")[0] for line in text[-4:]] == [
        "equal time, tau over specforge's: +31.2 %", "equal time, tau over speculators's: +23.5 %",
        "equal epochs, tau over specforge's: +0.0 %", "equal epochs, tau over speculators's: +0.0 %"]
    assert "| eyrie | 1 | 240 | 2.00 | 2.200 | 2.20 |" in text


def test_a_report_is_a_page_a_plot_and_a_line_of_the_index(tmp_path: Path) -> None:
    runs = {(shape.label(), t): counted([2.0 + shape.num_steps * 0.1, 2.0])
            for shape in depth_width.shapes() for t in depth_width.TEMPERATURES}
    finding = depth_width.evaluate(runs)
    report = build_report(depth_width.NAME, depth_width.CLAIM, finding, short=True, command="python -m x",
                          watch=MachineWatch(), seconds=1.0)
    paths = write(report, finding.figure, tmp_path)
    assert {path.name for path in paths} == {"depth_width.svg", "depth_width.json", "depth_width.md"}
    assert "short form" in page(report)
    assert f"[Depth width](depth_width.md) | {depth_width.CLAIM}" in index([report])
    assert paths[0].stat().st_size < 100_000
