"""Published claims about the EAGLE family, evaluated by a comparison. Pure.

The article "The EAGLE Family: Speculating in Feature Space" ("the story" in reports) ends in a table of three versions
and makes claims. `three_versions` is the same table, measured; `evaluate_claims` evaluates each claim. A claim with a
number holds when the interval reaches that number and lies above 1; it does not hold here when the interval stays below
the number; otherwise it is indistinguishable. "Here" is one target on one machine: the article's figures are of
LLaMA-2-Chat 70B on GPUs.
"""

from collections.abc import Callable, Iterator

from eyrie_api.v1alpha1.families import FAMILIES
from eyrie_api.v1alpha1.model import Interval
from eyrie_workers.comparison.report import Claim, CompareReport, Row, VariantReport, Verdict

VERSIONS = ("EAGLE-1", "EAGLE-2", "EAGLE-3")
NOT_HERE = "not compared here"

PAIRS = (("EAGLE-2", "EAGLE-1"), ("EAGLE-3", "EAGLE-2"), ("EAGLE-1", "Medusa"), ("EAGLE-1", "draft model"),
         ("EAGLE-3", "EAGLE-3 chain"), ("DDTree", "DFlash"), ("DFlash", "EAGLE-3 chain"), ("Hydra", "Medusa"))
"""The pairs of variants that the claims are about."""

_SPEEDUPS = {"EAGLE-1": (2.7, "2.7 to 3.5x"), "EAGLE-2": (4.0, "about 4x"), "EAGLE-3": (6.5, "up to 6.5x")}
_ACCEPTANCE = {"EAGLE-1": (0.75, 0.85), "EAGLE-2": (0.78, 0.88)}


def three_versions(report: CompareReport) -> tuple[Row, ...]:
    """The table of the three versions; empty when none of them was compared."""
    variants = [report.named(title) for title in VERSIONS]
    if not any(variants):
        return ()
    trained = {one.family: one for one in report.trained}

    def cells(describe: Callable[[VariantReport], str]) -> tuple[str, str, str]:
        one, two, three = (NOT_HERE if variant is None else describe(variant) for variant in variants)
        return one, two, three

    def training(variant: VariantReport) -> str:
        one = trained[variant.variant.family]
        shared = ", EAGLE-1's" if variant.variant.title == "EAGLE-2" else ""
        return f"{one.seconds:.0f} s, {_many(one.tokens)} tokens{shared}"

    def parameters(variant: VariantReport) -> str:
        num = trained[variant.variant.family].parameters
        return f"{_many(num)}, {num / report.target_parameters:.0%} of the target's"

    def mechanism(variant: VariantReport) -> str:
        layers = ", ".join(map(str, trained[variant.variant.family].layers))
        return f"layers {layers}; {variant.overall.draft_ms:.1f} ms a round"

    table: list[tuple[str, tuple[str, str, str], Callable[[VariantReport], str]]] = [
        ("Training", ("required (hours)", "required (hours)", "required"), training),
        ("Extra parameters", ("feature predictor", "the same predictor", "draft module"), parameters),
        ("Tree structure", ("static", "dynamic (confidence)", "dynamic (confidence)"), lambda one: one.variant.shape),
        ("Draft mechanism", ("feature regression", "+ dynamic tree", "direct token prediction, fused layers"),
         mechanism),
        ("Acceptance rate", ("0.75 to 0.85", "0.78 to 0.88", "higher"),
         lambda one: f"{_first(report, one):.2f} at the first position, tau {one.overall.tau:.2f}"),
        ("Speed-up", ("2.7 to 3.5x (70B)", "about 4x (70B)", "up to 6.5x"),
         lambda one: ratio(one.overall.speedup, one.overall.speedup_interval)),
        ("Scales with data", ("flattens", "flattens", "yes"), lambda _: "not measured: one amount of data"),
        ("Deployment", ("moderate", "moderate", "easy (released heads)"), lambda one: _served(one.variant.family)),
    ]
    return tuple(Row(aspect=aspect, seed=published, here=cells(describe)) for aspect, published, describe in table)


def evaluate_claims(report: CompareReport) -> tuple[Claim, ...]:
    """Every claim, with its verdict."""
    return tuple(_claims(report))


def _claims(report: CompareReport) -> Iterator[Claim]:
    yield _compared(report, "EAGLE-2 over EAGLE-1", "20 to 40 % faster, by its tree alone", "EAGLE-2", "EAGLE-1",
                     1.2)
    yield _compared(report, "EAGLE-3 over EAGLE-2", "about 1.4x", "EAGLE-3", "EAGLE-2", 1.4)
    yield _compared(report, "EAGLE-1 over Medusa", "clearly ahead", "EAGLE-1", "Medusa", 1.0)
    yield _compared(report, "EAGLE-1 over a separate draft model", "clearly ahead", "EAGLE-1", "draft model", 1.0)
    yield _compared(report, "Tree over chain (EAGLE-3)", "structure matters", "EAGLE-3", "EAGLE-3 chain", 1.0)
    yield _longer(report, "EAGLE-3's acceptance over EAGLE-2's", "higher", "EAGLE-3", "EAGLE-2")
    for title, (low, high) in _ACCEPTANCE.items():
        yield _in_range(report, title, low, high)
    for title, (least, words) in _SPEEDUPS.items():
        yield _as_fast(report, title, least, words)
    yield _one_pass(report)
    yield _compared(report, "DDTree over DFlash", "the same pass as a tree is faster", "DDTree", "DFlash", 1.0)
    yield Claim(aspect="EAGLE-3 gains from more data", seed="more data, higher acceptance; EAGLE-1 flattened",
                here="one amount of data was trained on", verdict="not measured")


def reaches(interval: Interval, least: float) -> Verdict:
    """The verdict on the claim that a ratio is at least `least`, from the ratio's interval."""
    if interval.low == interval.high:
        return "indistinguishable"
    if interval.low > 1.0 and interval.high >= least:
        return "holds"
    return "does not hold here" if interval.high < least else "indistinguishable"


def _compared(report: CompareReport, aspect: str, seed: str, one: str, other: str, least: float) -> Claim:
    pair = report.comparison(one, other)
    if pair is None:
        return Claim(aspect=aspect, seed=seed, here=_missing(report, one, other), verdict="not measured")
    return Claim(aspect=aspect, seed=seed, here=f"{ratio(pair.ratio, pair.interval)} as fast",
                 verdict=reaches(pair.interval, least))


def _longer(report: CompareReport, aspect: str, seed: str, one: str, other: str) -> Claim:
    pair = report.comparison(one, other)
    if pair is None:
        return Claim(aspect=aspect, seed=seed, here=_missing(report, one, other), verdict="not measured")
    return Claim(aspect=aspect, seed=seed, here=f"tau is {ratio(pair.tau_ratio, pair.tau_interval)}",
                 verdict=reaches(pair.tau_interval, 1.0))


def _in_range(report: CompareReport, title: str, low: float, high: float) -> Claim:
    aspect, seed = f"{title}'s acceptance rate", f"{low:g} to {high:g}"
    variant = report.named(title)
    if variant is None:
        return Claim(aspect=aspect, seed=seed, here=NOT_HERE, verdict="not measured")
    return Claim(aspect=aspect, seed=seed, here=f"{_first(report, variant):.2f} at the first position",
                 verdict="holds" if low <= round(_first(report, variant), 2) <= high else "does not hold here")


def _as_fast(report: CompareReport, title: str, least: float, words: str) -> Claim:
    aspect, variant = f"{title}'s speed-up", report.named(title)
    if variant is None:
        return Claim(aspect=aspect, seed=words, here=NOT_HERE, verdict="not measured")
    return Claim(aspect=aspect, seed=words, here=ratio(variant.overall.speedup, variant.overall.speedup_interval),
                 verdict=reaches(variant.overall.speedup_interval, least))


def _one_pass(report: CompareReport) -> Claim:
    aspect, seed = "DFlash drafts in one pass", "depth passes collapse into one"
    block, chain = report.named("DFlash"), report.named("EAGLE-3 chain")
    if block is None or chain is None:
        return Claim(aspect=aspect, seed=seed, here=_missing(report, "DFlash", "EAGLE-3 chain"), verdict="not measured")
    here, there = block.overall.draft_ms, chain.overall.draft_ms
    return Claim(aspect=aspect, seed=seed, here=f"{here:.1f} ms a round, EAGLE-3's chain {there:.1f} ms",
                 verdict="holds" if here < there else "does not hold here")


def _missing(report: CompareReport, *titles: str) -> str:
    return f"{' and '.join(title for title in titles if report.named(title) is None)}: {NOT_HERE}"


def _first(report: CompareReport, variant: VariantReport) -> float:
    """Acceptance at the first position, at the lowest temperature: the published rates are greedy."""
    accepted = variant.at(report.concurrencies[0], report.temperatures[0]).acceptance
    return accepted[0] if accepted else 0.0


def _served(family: str) -> str:
    name = FAMILIES[family].sglang_algorithm if family in FAMILIES else None
    return f"SGLang {name}" if name else "no engine but ours"


def ratio(value: float, interval: Interval) -> str:
    """`1.82x (1.70-1.95)`."""
    return f"{value:.2f}x ({interval.low:.2f}-{interval.high:.2f})"


def _many(number: float) -> str:
    """`1.2 M`, `300 k`."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g} {letter}"
    return f"{number:.0f}"
