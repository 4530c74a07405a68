"""The comparison's conclusion as one paragraph: whether EAGLE-3 is the right drafter for the target. Pure.

Every statement is supported by an interval: a variant is recommended only when its interval against off lies above 1,
and variants whose ratio's interval contains 1 are reported as indistinguishable, whatever their order in the table.
"""

from collections.abc import Iterator, Sequence

from eyrie_workers.comparison.claims import ratio
from eyrie_workers.comparison.forms import IN_QUESTION, OFF
from eyrie_workers.comparison.report import CompareReport, VariantReport

QUESTION = "Is EAGLE-3 the right drafter for this model?"


def decision(report: CompareReport) -> str:
    """The variant to serve, in a sentence."""
    winner = report.named(report.winner)
    assert winner is not None
    if winner.variant.title == OFF:
        return "Serve without a drafter: no lossless variant is surely faster."
    return f"Serve with {_named(winner)}: {_speed(winner)} as fast as without a drafter, and lossless."


def answer(report: CompareReport) -> str:
    """The conclusion as one paragraph."""
    return " ".join([*_sentences(report)])


def _sentences(report: CompareReport) -> Iterator[str]:
    winner = report.named(report.winner)
    assert winner is not None
    in_question = [one for one in report.variants if one.variant.family == IN_QUESTION]
    if winner.variant.title == OFF:
        yield from _off(report, in_question)
        return
    if not in_question:
        yield _open(report)
        yield f"Of the others, {_named(winner)} is fastest at {_speed(winner)} over no drafter."
    elif winner.variant.family == IN_QUESTION:
        yield (f"Yes: {_named(winner)} is the fastest of {len(report.variants) - 1} variants, "
               f"{_speed(winner)} over no drafter.")
    else:
        yield from _other(report, winner, in_question[0])
    yield from _rivals(report, winner)
    yield from _other_loads(report, winner)
    yield from _free(report, winner)
    yield _lossless(report)


def _off(report: CompareReport, in_question: Sequence[VariantReport]) -> Iterator[str]:
    changed_output = [one for one in report.variants if not one.lossless]
    best = next((one for one in report.variants if one.variant.title != OFF), None)
    if in_question:
        yield "No, and neither is any other variant: leave speculation off."
    else:
        yield f"{_open(report)} Of the others, none is surely faster than no drafter: leave speculation off."
    if best is not None:
        reason = "is not surely faster" if best.lossless else "changed the output"
        yield f"The best variant, {_named(best)}, measured {_speed(best)} over no drafter, which {reason}."
    if in_question and in_question[0] is not best:
        yield f"{_named(in_question[0])} measured {_speed(in_question[0])}."
    if changed_output:
        yield _lossless(report)


def _open(report: CompareReport) -> str:
    failed = report.failed.get(IN_QUESTION)
    return f"EAGLE-3 was not {f'trained ({failed})' if failed else 'compared'}, so the question stays open."


def _other(report: CompareReport, winner: VariantReport, eagle3: VariantReport) -> Iterator[str]:
    pair = report.comparison(winner.variant.title, eagle3.variant.title)
    if pair is not None and pair.outcome == "faster":
        yield (f"No: {_named(winner)} is fastest, {_speed(winner)} over no drafter, and surely faster than the best "
               f"form of EAGLE-3: {_named(eagle3)} reaches {_speed(eagle3)}, the ratio is "
               f"{ratio(pair.ratio, pair.interval)}.")
        return
    between = "" if pair is None else f" (ratio {ratio(pair.ratio, pair.interval)})"
    yield (f"It may be: {_named(winner)} measured fastest, {_speed(winner)} over no drafter, but is indistinguishable "
           f"from {_named(eagle3)} at {_speed(eagle3)}{between}.")


def _rivals(report: CompareReport, winner: VariantReport) -> Iterator[str]:
    """The variants indistinguishable from the winner, and those slower than it by their interval."""
    ties: list[str] = []
    beaten: list[str] = []
    for one in report.variants:
        pair = report.comparison(winner.variant.title, one.variant.title)
        if pair is None or one.variant.title == OFF:
            continue
        (ties if pair.outcome == "indistinguishable" else beaten).append(one.variant.title)
    if ties:
        yield f"Indistinguishable from it on these prompts: {_list(ties)}."
    if beaten:
        yield f"Surely slower: {_list(beaten)}."


def _other_loads(report: CompareReport, winner: VariantReport) -> Iterator[str]:
    """The loads at which another variant leads, or speculation does not pay."""
    for concurrency in report.concurrencies[1:]:
        best = max(report.variants, key=lambda one: one.at(concurrency).speedup)
        here = winner.at(concurrency)
        reached = f"With {concurrency} at once it reaches {ratio(here.speedup, here.speedup_interval)}"
        if best.variant.title == OFF:
            yield f"With {concurrency} at once nothing is faster than no drafter."
        elif best is winner:
            yield f"{reached} and still leads."
        else:
            figures = best.at(concurrency)
            yield f"{reached}; {_named(best)} leads there with {ratio(figures.speedup, figures.speedup_interval)}."


def _free(report: CompareReport, winner: VariantReport) -> Iterator[str]:
    """The speed-up that is available without training."""
    for one in report.variants:
        if one.variant.family == "ngram" and one is not winner:
            yield f"Without any training n-gram lookup reaches {_speed(one)}."


def _lossless(report: CompareReport) -> str:
    changed_output = [one.variant.title for one in report.variants if not one.lossless]
    if changed_output:
        return f"NOT lossless here, and therefore not usable: {_list(changed_output)}."
    answers = sum(one.at(load).requests for one in report.variants if one.variant.title != OFF for load
                  in report.concurrencies)
    return f"All {answers} drafted answers equal the undrafted ones, token by token."


def _named(one: VariantReport) -> str:
    return f"{one.variant.title} ({one.variant.shape})"


def _speed(one: VariantReport) -> str:
    return ratio(one.overall.speedup, one.overall.speedup_interval)


def _list(titles: Sequence[str]) -> str:
    return ", ".join(titles)
