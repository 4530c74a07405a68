"""The report of a comparison as Markdown (`report.md`) and for the terminal. Pure."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.quantities import duration, size
from eyrie_workers.comparison.answer import QUESTION
from eyrie_workers.comparison.claims import VERSIONS, ratio
from eyrie_workers.comparison.report import CompareReport, Figures, VariantReport

_POSITIONS = 5  # of acceptance, in the table; report.json has all
_STYLE = {"holds": "green", "does not hold here": "yellow", "indistinguishable": "dim", "not measured": "dim"}


def markdown(report: CompareReport, plots: Iterable[str] = ()) -> str:
    """The whole report as Markdown."""
    parts = [f"# Which drafter for {report.target}", f"**{QUESTION}** {report.verdict}", _conditions(report),
             "## Leaderboard", _leaderboard(report), *(f"![{name}](plots/{name}.svg)" for name in plots),
             "## By suite and temperature", _by_suite(report), "## Acceptance and cost of a round", _rounds(report),
             "## Training", _training(report)]
    if report.rows:
        parts += ["## Three versions side by side", _versions(report)]
    parts += ["## Published claims, and what was measured here", _claims(report)]
    if report.notes:
        parts += ["## Limits", "\n".join(f"- {note}" for note in report.notes)]
    return "\n\n".join(parts) + "\n"


def _conditions(report: CompareReport) -> str:
    e = report.environment
    return (
        f"Each family had a budget of {report.budget.label()} on one store of {report.store_tokens} tokens "
        f"({report.conversations} conversations, {size(report.store_bytes)}). Measured in the reference engine, "
        f"all variants interleaved block by block, prefill included, {report.max_new_tokens} tokens an answer, suites "
        f"{', '.join(report.suites)}; speed-up is over the same engine without a drafter, with 95 % intervals over "
        f"blocks. {e.hardware}, {e.threads} threads, torch {e.torch}, {e.dtype}, {e.date[:10]}, code "
        f"{e.code_version}. Took {duration(sum(report.seconds.values()))}: "
        f"{', '.join(f'{name} {duration(value)}' for name, value in report.seconds.items())}."
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _speed(figures: Figures) -> str:
    return ratio(figures.speedup, figures.speedup_interval)


def _leaderboard(report: CompareReport) -> str:
    first = report.concurrencies[0]
    columns = ["", "variant", "shape", f"speed-up, {_load(first)}",
               *(f"T = {t:g}" for t in report.temperatures),
               *(f"speed-up, {_load(load)}" for load in report.concurrencies[1:]), "tau", "lossless"]
    return _table(columns, ([
        str(one.rank), one.variant.title, one.variant.shape, _speed(one.overall),
        *(_speed(one.at(first, t)) for t in report.temperatures),
        *(_speed(one.at(load)) for load in report.concurrencies[1:]),
        f"{one.overall.tau:.2f}", "yes" if one.lossless else "NO"] for one in report.variants))


def _load(concurrency: int) -> str:
    return "one at a time" if concurrency == 1 else f"{concurrency} at once"


def _by_suite(report: CompareReport) -> str:
    first = report.concurrencies[0]
    cells = [(suite, t) for suite in report.suites for t in report.temperatures]
    rows = []
    for one in report.variants:
        figures = [one.at(first, t, suite) for suite, t in cells]
        rows.append([one.variant.title, *(f"{_speed(f)}, tau {f.tau:.2f}" for f in figures)])
    return _table(["variant", *(f"{suite}, T = {t:g}" for suite, t in cells)], rows)


def _rounds(report: CompareReport) -> str:
    rows = []
    for one in report.variants:
        f = one.overall
        rows.append([
            one.variant.title, one.variant.shape, f"{f.tau:.2f} ({f.tau_interval.low:.2f}-{f.tau_interval.high:.2f})",
            " ".join(f"{p:.2f}" for p in f.acceptance[:_POSITIONS]) or "-", f"{f.draft_ms:.2f}",
            f"{f.draft_share:.0%}", f"{f.round_cost:.2f}", f"{f.nodes_per_round:.1f}"])
    return _table(["variant", "shape (num_steps/top_k/num_draft_tokens)", "tau", "accepted at position 1, 2, ..",
                   "drafting, ms a round", "of the target's pass", "a round, in target passes", "tokens verified"],
                  rows)


def _training(report: CompareReport) -> str:
    rows = [[one.family, f"{one.parameters / 1e6:.2f} M", f"{one.tokens}", f"{one.steps}", f"{one.seconds:.0f}",
             "not known (killed)" if one.cpu_seconds is None else f"{one.cpu_seconds:.0f}", f"{one.tokens_per_s:.0f}",
             str(one.draft_vocab_size), ", ".join(map(str, one.layers)) or "none", size(one.feature_bytes),
             f"{one.first_accuracy:.2f}"] for one in report.trained]
    rows += [[family, "failed", why, *[""] * 8] for family, why in report.failed.items()]
    return _table(["family", "parameters", "tokens", "steps", "seconds", "CPU seconds", "tokens/s", "draft vocabulary",
                   "layers read", "states it needs", "first-step accuracy"], rows)


def _versions(report: CompareReport) -> str:
    rows = []
    for row in report.rows:
        rows += [[row.aspect, "story", *row.seed], ["", "here", *row.here]]
    return _table(["aspect", "", *VERSIONS], rows)


def _claims(report: CompareReport) -> str:
    return _table(["claim", "story", "here", "verdict"],
                  ([one.aspect, one.seed, one.here, one.verdict] for one in report.claims))


def view(report: CompareReport, where: Sequence[tuple[str, str]]) -> RenderableType:
    """The summary for the terminal."""
    board = Table(box=None, pad_edge=False, header_style="bold")
    others = report.concurrencies[1:]
    for column in ("#", "VARIANT", "SHAPE"):
        board.add_column(column)
    for column in ("SPEED-UP (95 %)", *(f"T={t:g}" for t in report.temperatures),
                   *(f"{load} AT ONCE" for load in others), "TAU", "DRAFT MS", "TRAINED", "LOSSLESS"):
        board.add_column(column, justify="right")
    seconds = {one.family: one.seconds for one in report.trained}
    for one in report.variants:
        board.add_row(*_line(report, one, others, seconds.get(one.variant.family)),
                      style="bold green" if one.variant.title == report.winner else "")
    claims = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("CLAIM", "PUBLISHED", "HERE", ""):
        claims.add_column(column)
    for claim in report.claims:
        if claim.verdict != "not measured":
            claims.add_row(claim.aspect, claim.seed, claim.here, Text(claim.verdict, _STYLE[claim.verdict]))
    story: list[RenderableType] = [claims, Text()] if claims.row_count else []
    files = Table.grid(padding=(0, 2))
    for name, path in where:
        files.add_row(Text(name, "bold"), path)
    notes = [Text(f"note: {note}", "dim") for note in report.notes]
    return Group(Text(), board, Text(), Text(QUESTION, "bold"), Text(report.verdict), Text(), *story, *notes, files)


def _line(report: CompareReport, one: VariantReport, others: Sequence[int], seconds: float | None) -> list[str]:
    first = report.concurrencies[0]
    return [str(one.rank), one.variant.title, one.variant.shape, _speed(one.overall),
            *(f"{one.at(first, t).speedup:.2f}x" for t in report.temperatures),
            *(f"{one.at(load).speedup:.2f}x" for load in others), f"{one.overall.tau:.2f}",
            f"{one.overall.draft_ms:.1f}", "-" if seconds is None else duration(seconds),
            "yes" if one.lossless else "NO"]
