"""The reports of the stages before the benchmark as tables of text: regenerate, capture and train. Pure.

What a report does not know (a field of a later version, a rate that was not measured) is an empty cell.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eyrie_api.quantities import duration, size
from eyrie_api.v1alpha1.reports import CaptureReport, CheckpointReport, Lengths, RegenerateReport, TrainReport
from eyrie_api.v1alpha1.stages import StageName
from eyrie_api.v1alpha1.status import JobReport

_ANSWERED = ("answered", "truncated")
"""Outcomes of rows that are used."""


@dataclass(frozen=True)
class StageTable:
    """One table; the first cell of a row names it."""

    stage: StageName
    caption: str
    heads: tuple[str, ...]
    """Those of numbers begin with #. None where each row is a name and its value."""

    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def stage_tables(report: JobReport) -> tuple[StageTable, ...]:
    """Those of names and values first, which fit side by side. Stages without a report are left out."""
    found, answers = [], report.regenerate
    if answers is not None:
        found.append(_facts("regenerate", "Regenerate: conversations and answers", _of_answers(answers)))
    if report.capture is not None:
        found.append(_facts("capture", "Capture: hidden states of the target", _of_states(report.capture)))
    if answers is not None and len(answers.outcomes) > 1:
        found.append(_by_source(answers))
    if report.train:
        found += [_of_candidates(report.train), _of_checkpoints(report.train)]
    return tuple(found)


def _facts(stage: StageName, caption: str, facts: Iterator[tuple[str, str]]) -> StageTable:
    return StageTable(stage, caption, (), tuple(facts))


def _of_answers(report: RegenerateReport) -> Iterator[tuple[str, str]]:
    if report.engine:
        yield "answers by", {"none": "the data"}.get(report.engine, report.engine)
    yield "conversations read", f"{report.rows_read:,}"
    before = [(f"{report.rows_reused:,} from earlier jobs", report.rows_reused),
              (f"{report.rows_resumed:,} from an earlier run of the stage", report.rows_resumed)]
    yield "rows answered", _with(f"{report.rows_answered:,}", [text for text, number in before if number])
    yield "rows held out for the benchmark", f"{report.rows_held_out:,}"
    yield "rows not used", _with(f"{report.rows_quarantined:,}", _counts(_unused(report.outcomes)))
    if report.duplicates or report.near_duplicates:
        yield "duplicates left out", f"{report.duplicates:,} equal, {report.near_duplicates:,} nearly equal"
    if report.overlaps:
        yield "rows that share text with a suite", ", ".join(_counts(report.overlaps))
    yield "tokens", f"{report.prompt_tokens:,} of prompts, {report.answer_tokens:,} of answers"
    for name, lengths in (("length of a prompt", report.prompt_lengths),
                          ("length of an answer", report.answer_lengths)):
        if lengths is not None:
            yield name, _length(lengths)
    if report.finish_reasons:
        yield "answers ended by", ", ".join(_counts(report.finish_reasons))
    if report.rows_retokenised:
        yield "answers known as text alone", _with(f"{report.rows_retokenised:,}", [
            f"{report.rows_ids_differ:,} certainly with other token ids"])
    yield "time", _time(report.seconds, report.tokens_per_s)


def _of_states(report: CaptureReport) -> Iterator[tuple[str, str]]:
    yield "states computed by", report.source
    reused = [f"{report.rows_reused:,} from earlier jobs, {size(report.bytes_reused)}"] if report.rows_reused else []
    yield "rows", _with(f"{report.rows:,}", reused)
    if report.rows_cut or report.rows_dropped:
        yield "rows too long", f"{report.rows_cut:,} cut, {report.rows_dropped:,} left out"
    yield "tokens", f"{report.tokens:,}, of them {report.supervised_tokens:,} trained on"
    yield "size", f"{size(report.bytes)} in {report.shards:,} files, {size(report.bytes_per_token)} a token"
    yield "stored as", _with(report.codec, ["top logits in place of the final state"] * (report.final_state == "topk"))
    yield "layers", f"{', '.join(map(str, report.layers.aux_layers))} ({report.layers.reason})"
    if report.states_error:
        yield "error of storing, by layer", ", ".join(f"{layer}: {_percent(error)}"
                                                      for layer, error in report.states_error.items())
    if report.checked:
        yield "distance to transformers, by layer", ", ".join(f"{layer}: {distance:.2g}"
                                                              for layer, distance in report.checked.items())
    if report.repaired_shards or report.restarts:
        yield "made again", f"{len(report.repaired_shards):,} damaged files; {report.restarts:,} servers replaced"
    yield "time", _time(report.seconds, report.tokens_per_s)


def _by_source(report: RegenerateReport) -> StageTable:
    rows = tuple((source, *(f"{kinds.get(name, 0):,}" for name in _ANSWERED), ", ".join(_counts(_unused({"": kinds}))))
                 for source, kinds in report.outcomes.items())
    return StageTable("regenerate", "Regenerate, by source of the data",
                      ("source", "#rows answered", "#of them truncated", "not used"), rows)


def _of_candidates(reports: Sequence[TrainReport]) -> StageTable:
    rows = tuple((
        one.candidate, one.family, _count(one.parameters), f"{one.steps:,}", _count(one.rows),
        f"{one.supervised_tokens:,}", duration(one.seconds), f"{one.tokens_per_s:,.0f}",
        _percent(one.mfu) if one.mfu else "", _percent(one.padding_share), _percent(one.data_wait_share),
        f"{one.vocabulary.draft_vocab_size:,} ({_percent(one.vocabulary.coverage)})", "; ".join(_notes(one)))
        for one in reports)
    return StageTable("train", "Train: candidates", (
        "candidate", "family", "#parameters", "#steps", "#rows", "#supervised tokens", "#time", "#tokens/s", "#MFU",
        "#padding", "#data wait", "#draft vocabulary", "note"), rows,
        "MFU: arithmetic of the loss and its gradient, of the fastest matrix product measured there. Draft vocabulary: "
        "its tokens, and the share of the supervised tokens that it covers.")


def _notes(report: TrainReport) -> Iterator[str]:
    if report.init_from is not None:
        yield f"began with {report.init_from}"
    if report.resumed_from_step:
        yield f"resumed from step {report.resumed_from_step:,}"
    if report.stopped_early:
        yield "stopped early"
    if report.processes > 1:
        yield f"{report.processes} processes"


def _of_checkpoints(reports: Sequence[TrainReport]) -> StageTable:
    rows = tuple(_checkpoint(one) for report in reports for one in report.checkpoints)
    return StageTable("train", "Train: checkpoints, on held-out rows", (
        "checkpoint", "#epoch", "#loss", "#theoretical speed-up", "accuracy by step, %", "acceptance by position, %"),
        rows)


def _checkpoint(one: CheckpointReport) -> tuple[str, ...]:
    return (one.name, f"{one.epoch:.2f}", f"{one.loss:.3f}", f"{one.theoretical_speedup:.2f}x",
            *(", ".join(f"{100 * share:.1f}" for share in shares)
              for shares in (one.accuracy, one.conditional_acceptance)))


def _unused(outcomes: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    """Rows that were not used, by kind, of all sources."""
    found = Counter[str]()
    for kinds in outcomes.values():
        found.update({kind: number for kind, number in kinds.items() if kind not in _ANSWERED})
    return found


def _counts(counted: Mapping[str, int]) -> list[str]:
    """The largest first; what did not occur is left out."""
    return [f"{name} {number:,}" for name, number in sorted(counted.items(), key=lambda one: -one[1]) if number]


def _with(text: str, details: Sequence[str]) -> str:
    return f"{text} ({', '.join(details)})" if details else text


def _length(lengths: Lengths) -> str:
    return f"half up to {lengths.p50:,} tokens, 90 % up to {lengths.p90:,}, longest {lengths.most:,}"


def _time(seconds: float, tokens_per_s: float) -> str:
    return f"{duration(seconds)}, {tokens_per_s:,.0f} tokens/s"


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
