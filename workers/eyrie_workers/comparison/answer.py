"""The question a comparison is for, answered in one paragraph from its figures: is EAGLE-3 the right drafter? Pure.

Nothing is said that an interval does not bear out: a variant that is not surely faster than off is not recommended, and
variants whose ratio holds 1 are not told apart, whatever their order in the table.
"""

from collections.abc import Iterator, Sequence

from eyrie_workers.comparison.claims import ratio
from eyrie_workers.comparison.forms import IN_QUESTION, OFF
from eyrie_workers.comparison.report import CompareReport, VariantReport

QUESTION = "Is EAGLE-3 the right drafter for this model?"


def answer(report: CompareReport) -> str:
    """The paragraph."""
    return " ".join([*_sentences(report)])


def _sentences(report: CompareReport) -> Iterator[str]:
    winner = report.named(report.winner)
    assert winner is not None
    asked = [one for one in report.variants if one.variant.family == IN_QUESTION]
    if winner.variant.title == OFF:
        yield from _off(report, asked)
        return
    if not asked:
        yield _open(report)
        yield f"Of what was, {_named(winner)} is fastest at {_speed(winner)} over no drafter."
    elif winner.variant.family == IN_QUESTION:
        yield (f"Yes: {_named(winner)} is the fastest of {len(report.variants) - 1} variants, "
               f"{_speed(winner)} over no drafter.")
    else:
        yield from _other(report, winner, asked[0])
    yield from _rivals(report, winner)
    yield from _other_loads(report, winner)
    yield from _free(report, winner)
    yield _lossless(report)


def _off(report: CompareReport, asked: Sequence[VariantReport]) -> Iterator[str]:
    spoilt = [one for one in report.variants if not one.lossless]
    best = next((one for one in report.variants if one.variant.title != OFF), None)
    if asked:
        yield "No, and nor is anything else that was tried: leave it off."
    else:
        yield f"{_open(report)} Of what was, nothing is surely faster than no drafter: leave it off."
    if best is not None:
        reason = "is not surely faster" if best.lossless else "changed the output"
        yield f"The best variant, {_named(best)}, measured {_speed(best)} over no drafter, which {reason}."
    if asked and asked[0] is not best:
        yield f"{_named(asked[0])} measured {_speed(asked[0])}."
    if spoilt:
        yield _lossless(report)


def _open(report: CompareReport) -> str:
    failed = report.failed.get(IN_QUESTION)
    return f"EAGLE-3 was {f'not trained ({failed})' if failed else 'not on the bench'}, so that is open."


def _other(report: CompareReport, winner: VariantReport, asked: VariantReport) -> Iterator[str]:
    held = report.contest(winner.variant.title, asked.variant.title)
    if held is not None and held.outcome == "faster":
        yield (f"No: {_named(winner)} is fastest, {_speed(winner)} over no drafter, and surely faster than the best "
               f"form of EAGLE-3: {_named(asked)} reaches {_speed(asked)}, the ratio is "
               f"{ratio(held.ratio, held.interval)}.")
        return
    between = "" if held is None else f" (ratio {ratio(held.ratio, held.interval)})"
    yield (f"It may be: {_named(winner)} measured fastest, {_speed(winner)} over no drafter, but is not told apart "
           f"from {_named(asked)} at {_speed(asked)}{between}.")


def _rivals(report: CompareReport, winner: VariantReport) -> Iterator[str]:
    """Who cannot be told apart from the winner, and who surely can."""
    ties: list[str] = []
    beaten: list[str] = []
    for one in report.variants:
        held = report.contest(winner.variant.title, one.variant.title)
        if held is None or one.variant.title == OFF:
            continue
        (ties if held.outcome == "not told apart" else beaten).append(one.variant.title)
    if ties:
        yield f"Not told apart from it on these prompts: {_list(ties)}."
    if beaten:
        yield f"Surely slower: {_list(beaten)}."


def _other_loads(report: CompareReport, winner: VariantReport) -> Iterator[str]:
    """Where another variant leads at another load, or speculation stops paying."""
    for concurrency in report.concurrencies[1:]:
        best = max(report.variants, key=lambda one: one.at(concurrency).speedup)
        here = winner.at(concurrency)
        told = f"With {concurrency} at once it reaches {ratio(here.speedup, here.speedup_interval)}"
        if best.variant.title == OFF:
            yield f"With {concurrency} at once nothing is faster than no drafter."
        elif best is winner:
            yield f"{told} and still leads."
        else:
            figures = best.at(concurrency)
            yield f"{told}; {_named(best)} leads there with {ratio(figures.speedup, figures.speedup_interval)}."


def _free(report: CompareReport, winner: VariantReport) -> Iterator[str]:
    """What no training would have bought."""
    for one in report.variants:
        if one.variant.family == "ngram" and one is not winner:
            yield f"Without any training n-gram lookup reaches {_speed(one)}."


def _lossless(report: CompareReport) -> str:
    spoilt = [one.variant.title for one in report.variants if not one.lossless]
    if spoilt:
        return f"NOT lossless here, and therefore not for use: {_list(spoilt)}."
    answers = sum(one.at(load).requests for one in report.variants if one.variant.title != OFF for load
                  in report.concurrencies)
    return f"All {answers} drafted answers equal the undrafted ones, token by token."


def _named(one: VariantReport) -> str:
    return f"{one.variant.title} ({one.variant.shape})"


def _speed(one: VariantReport) -> str:
    return ratio(one.overall.speedup, one.overall.speedup_interval)


def _list(titles: Sequence[str]) -> str:
    return ", ".join(titles)
