"""The tables of a comparison, and how it was measured, as text: what `report.md` and `report.html` share. Pure."""

from collections.abc import Sequence

from eyrie_api.quantities import duration, size
from eyrie_workers.comparison.claims import VERSIONS, ratio
from eyrie_workers.comparison.forms import OFF
from eyrie_workers.comparison.report import CompareReport, Figures
from eyrie_workers.report_page.page import Table

_POSITIONS = 5  # of acceptance, in the table of rounds; report.json has all
_SHAPES = "Shapes are num_steps/top_k/num_draft_tokens"
MIN_ROUNDS = 8
"""Rounds that reached a position of the draft before its acceptance is shown: below, one round moves it by a tenth."""


def well_founded(acceptance: Sequence[float], histogram: Sequence[int]) -> tuple[float, ...]:
    """Acceptance at the positions that at least `MIN_ROUNDS` rounds reached. histogram: of accepted lengths."""
    reached = [sum(histogram[k:]) for k in range(len(acceptance))]
    return tuple(p for p, rounds in zip(acceptance, reached, strict=True) if rounds >= MIN_ROUNDS)


def facts(report: CompareReport) -> list[tuple[str, str]]:
    """How the comparison was measured: name and value."""
    e = report.environment
    return [
        ("Target", f"{report.target}, {report.target_parameters / 1e6:.1f} million parameters"),
        ("Training", f"{report.budget.label()} for each family, on one store of {report.store_tokens} tokens "
                     f"({report.conversations} conversations, {size(report.store_bytes)})"),
        ("Engine", "the reference engine; all variants interleaved block by block, prefill included"),
        ("Answers", f"{report.max_new_tokens} tokens at most; data sets {', '.join(report.suites)}; temperatures "
                    f"{_listed(report.temperatures)}; {', '.join(load(one) for one in report.concurrencies)}"),
        ("Intervals", "95 %, over blocks; speed-up is over the same engine without a drafter"),
        ("Machine", f"{e.hardware}, {e.threads} threads, torch {e.torch}, {e.dtype}"),
        ("Measured", f"{e.date[:10]}, code {e.code_version}"),
        ("Took", f"{duration(sum(report.seconds.values()))}: "
                 f"{', '.join(f'{name} {duration(value)}' for name, value in report.seconds.items())}"),
    ]


def speed(figures: Figures) -> str:
    """The speed-up with its interval."""
    return ratio(figures.speedup, figures.speedup_interval)


def load(concurrency: int) -> str:
    """A load in words."""
    return "one at a time" if concurrency == 1 else f"{concurrency} at once"


def leaderboard(report: CompareReport) -> Table:
    """Every variant, best first."""
    first = report.concurrencies[0]
    columns = ["rank", "variant", "shape", f"speed-up, {load(first)}", *(f"T = {t:g}" for t in report.temperatures),
               *(f"speed-up, {load(one)}" for one in report.concurrencies[1:]), "tau", "lossless"]
    return Table(columns, [[
        str(one.rank), one.variant.title, one.variant.shape, speed(one.overall),
        *(speed(one.at(first, t)) for t in report.temperatures),
        *(speed(one.at(other)) for other in report.concurrencies[1:]),
        f"{one.overall.tau:.2f}", "yes" if one.lossless else "NO"] for one in report.variants],
        f"{_SHAPES}. Speed-up and tau are {_over(report)}; T is the temperature.", header=1)


def by_temperature(report: CompareReport) -> Table:
    """Speed-up at each temperature, at the first load."""
    first = report.concurrencies[0]
    return Table(["variant", "shape", *(f"speed-up, T = {t:g}" for t in report.temperatures)], [
        [one.variant.title, one.variant.shape, *(speed(one.at(first, t)) for t in report.temperatures)]
        for one in report.variants if one.variant.title != OFF], f"{_SHAPES}.")


def by_load(report: CompareReport) -> Table:
    """Speed-up at each load."""
    return Table(["variant", "shape", *(f"speed-up, {load(one)}" for one in report.concurrencies)], [
        [one.variant.title, one.variant.shape, *(speed(one.at(other)) for other in report.concurrencies)]
        for one in report.variants if one.variant.title != OFF], f"{_SHAPES}.")


def by_suite(report: CompareReport) -> Table:
    """Speed-up and tau in each suite at each temperature, at the first load."""
    first = report.concurrencies[0]
    cells = [(suite, t) for suite in report.suites for t in report.temperatures]
    rows = []
    for one in report.variants:
        figures = [one.at(first, t, suite) for suite, t in cells]
        rows.append([one.variant.title, one.variant.shape, *(f"{speed(f)}, tau {f.tau:.2f}" for f in figures)])
    return Table(["variant", "shape", *(f"{suite}, T = {t:g}" for suite, t in cells)], rows,
                 f"{_SHAPES}. Speed-up over no drafter and tau, {load(first)}.")


def positions(report: CompareReport) -> Table:
    """Acceptance at each position and temperature that enough rounds reached, at the first load."""
    shown = {(one.variant.title, t): well_founded(figures.acceptance, figures.accepted_histogram)
             for one in report.variants if one.variant.title != OFF for t in report.temperatures
             for figures in [one.at(report.concurrencies[0], t)]}
    deepest = max(map(len, shown.values()), default=0)
    return Table(["variant", "T", *(f"position {place}" for place in range(1, deepest + 1))], [
        [title, f"{t:g}", *(f"{p:.2f}" for p in accepted), *["-"] * (deepest - len(accepted))]
        for (title, t), accepted in shown.items()])


def rounds(report: CompareReport) -> Table:
    """Acceptance of each variant and what a round costs."""
    rows = []
    for one in report.variants:
        f = one.overall
        rows.append([
            one.variant.title, one.variant.shape, f"{f.tau:.2f} ({f.tau_interval.low:.2f}-{f.tau_interval.high:.2f})",
            " ".join(f"{p:.2f}" for p in f.acceptance[:_POSITIONS]) or "-", f"{f.draft_ms:.2f}",
            f"{f.draft_share:.0%}", f"{f.round_cost:.2f}", f"{f.nodes_per_round:.1f}"])
    return Table(["variant", "shape", "tau", "accepted at position 1, 2, ..", "drafting, ms a round",
                  "of the target's pass", "a round, in target passes", "tokens verified"], rows,
                 f"{_SHAPES}; all figures are {_over(report)}.")


def training(report: CompareReport) -> Table:
    """What training each family cost."""
    rows = [[one.family, f"{one.parameters / 1e6:.2f} M", f"{one.tokens}", f"{one.steps}", f"{one.seconds:.0f}",
             "not known (killed)" if one.cpu_seconds is None else f"{one.cpu_seconds:.0f}", f"{one.tokens_per_s:.0f}",
             str(one.draft_vocab_size), ", ".join(map(str, one.layers)) or "none", size(one.feature_bytes),
             f"{one.first_accuracy:.2f}"] for one in report.trained]
    rows += [[family, "failed", why, *[""] * 8] for family, why in report.failed.items()]
    return Table(["family", "parameters", "tokens", "steps", "seconds", "CPU seconds", "tokens/s", "draft vocabulary",
                  "layers read", "states it needs", "first-step accuracy"], rows)


def versions(report: CompareReport) -> Table:
    """The published table of three versions, and the same measured."""
    rows = []
    for row in report.rows:
        rows += [[row.aspect, "story", *row.seed], ["", "here", *row.here]]
    return Table(["aspect", "source", *VERSIONS], rows)


def claims(report: CompareReport) -> Table:
    """Published claims, and what was measured."""
    return Table(["claim", "story", "here", "verdict"],
                 [[one.aspect, one.seed, one.here, one.verdict] for one in report.claims])


def _over(report: CompareReport) -> str:
    return (f"over data sets {', '.join(report.suites)} and temperatures {_listed(report.temperatures)}, "
            f"{load(report.concurrencies[0])}")


def _listed(temperatures: tuple[float, ...]) -> str:
    return ", ".join(f"{t:g}" for t in temperatures)
