"""Pages of one job: the job itself with its stream, its plan against what it took, its document against another job's.

Below the routes is what the pages derive from the API's answers: the stages in order, differences of two documents, and
the reports of the stages before the benchmark as tables of text, in which what a report does not know (a field of a
later version, a rate that was not measured) is an empty cell.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import JsonValue
from starlette.responses import HTMLResponse, RedirectResponse, Response

from eyrie_api.contract.reports import CaptureReport, RegenerateReport, TrainReport, VocabularyReport
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.status import Job, JobReport, StageFile
from eyrie_api.database.jobs import JobFilter
from eyrie_api.database.results import ResultFilter
from eyrie_api.decisions.hardware_choice import sentence
from eyrie_api.decisions.job_report import report_of
from eyrie_api.errors import EyrieError, NotFound
from eyrie_api.http.console import pages
from eyrie_api.http.control import Control, RequestControl
from eyrie_api.http.live_pages import Rendered
from eyrie_api.http.problems import pointer as pointer_of
from eyrie_api.http.routes.outcomes import LeaderboardQuery, compare_plan, files_of, times_left
from eyrie_api.quantities import duration, size

router = APIRouter(tags=["console"], include_in_schema=False)

_EVENTS, _LISTED = 100, 50
ENDED = ("Succeeded", "Failed", "Cancelled")
_ANSWERED = ("answered", "truncated")
"""Outcomes of rows that are used."""


@router.get("/console/jobs/{job_id}", response_class=HTMLResponse)
def job(job_id: str, control: RequestControl, request: Request,
        selected: Annotated[LeaderboardQuery, Query()]) -> Response:
    """One job: its pipeline, decision, leaderboard, operating map, proof, curves, events, artifacts and document.

    A name, which is what the command line takes, leads to the newest job that has it.
    """
    try:
        values = job_values(control, job_id, pages.server_of(request), selected)
    except NotFound:
        named = control.jobs.list(JobFilter(name=job_id), limit=1).items
        if not named:
            raise
        return RedirectResponse(f"/console/jobs/{named[0].id}")
    files: tuple[StageFiles, ...] = ()
    tables: tuple[StageTable, ...] = ()
    unlisted = None
    try:
        manifests = control.files.manifests(job_id)
    except EyrieError as error:  # the rest of the page does not need the files and reports
        unlisted = error
    else:
        listed = files_of(job_id, manifests).items  # in order of stage
        files = tuple(StageFiles(stage, tuple(of_stage)) for stage, of_stage in groupby(listed, attrgetter("stage")))
        tables = stage_tables(report_of(values["job"], manifests, ()))
    return pages.may_submit(pages.render_page(
        "job.html", control, request, submitted=control.jobs.submitted(job_id), files=files, tables=tables,
        unlisted=unlisted, **values))


def job_values(control: Control, job_id: str, server: str, selected: LeaderboardQuery) -> dict[str, Any]:
    """What its templates show. Raises NotFound."""
    job = control.jobs.get(job_id)
    entries = control.results.leaderboard(ResultFilter(job_id=job_id))
    # The reports are files: they are read once there is one to show.
    is_tuned = any((status.stage, status.state) == ("tune", "Succeeded") for status in job.status.stages)
    measured = report_of(job, control.files.manifests(job_id), entries) if is_tuned else None
    project = control.jobs.project_of(job_id)
    return {"job": job, "pipeline": pipeline(job), "board": selected.board(control, job_id), "selected": selected,
            "leaderboard": entries, "measured": measured, "left": times_left(control, (job,)).get(job_id),
            "choices": [] if measured is None or measured.hardware is None else [
                sentence(choice, measured.hardware) for choice in measured.hardware.choices],
            "events": control.jobs.events(job_id, limit=_EVENTS), "now": datetime.now(UTC), "ended": ENDED,
            "may_work": pages.may(control, "jobs:write", project),
            "may_serve": pages.may(control, "endpoints:write", project), "server": server}


@router.get("/console/jobs/{job_id}/live")
def job_stream(job_id: str, control: RequestControl, request: Request,
        selected: Annotated[LeaderboardQuery, Query()]) -> Response:
    """A job's page, as it changes; it ends with the job."""
    control.jobs.get(job_id)
    server = pages.server_of(request)

    def render() -> Rendered:
        values = job_values(control, job_id, server, selected)
        html = "".join(pages.rendered(part, values) for part in ("job_live.html", "job_actions.html"))
        return Rendered(html, ended=values["job"].status.phase in ENDED)

    return pages.stream(control, request, render, selected.address(request.url.path), job_id)


@router.get("/console/jobs/{job_id}/plan", response_class=HTMLResponse)
def plan(job_id: str, control: RequestControl, request: Request) -> Response:
    """Hours and bytes of every stage as planned when the job was accepted, and as they were; or that none was kept."""
    job = control.jobs.get(job_id)
    try:
        comparison = compare_plan(job_id, control)
    except NotFound:
        comparison = None
    return pages.render_page("job_plan.html", control, request, job=job, comparison=comparison)


@router.get("/console/jobs/{job_id}/diff", response_class=HTMLResponse)
def diff(job_id: str, control: RequestControl, request: Request,
         other_id: Annotated[str, Query(alias="with", max_length=63)] = "") -> Response:
    """Where the documents of two jobs differ, defaults included. Both must be readable by the caller."""
    job = control.jobs.get(job_id)
    other, missing = None, None
    if other_id.strip():
        try:
            other = control.jobs.get(other_id.strip())
        except NotFound as error:
            missing = error
    differing = () if other is None else differences(
        job.spec.model_dump(mode="json"), other.spec.model_dump(mode="json"))
    recent = [listed for listed in control.jobs.list(limit=_LISTED).items if listed.id != job_id]
    answer = pages.render_page("job_diff.html", control, request, job=job, other=other, other_id=other_id,
                               missing=missing, differing=differing, recent=recent)
    if missing is not None:
        answer.status_code = 404
    return pages.may_submit(answer)


def pipeline(job: Job) -> list[dict[str, Any]]:
    """The stages in order, each with its boxes (one per candidate or checkpoint) and the state of all of them. Pure."""
    stages = []
    for stage in job.spec.stages:
        boxes = [status for status in job.status.stages if status.stage == stage]
        states = {box.state for box in boxes}
        state = next((state for state in ("Failed", "Running", "Cancelled") if state in states),
                     "Succeeded" if states and states <= {"Succeeded", "Skipped"} else "Pending")
        stages.append({"stage": stage, "boxes": boxes, "state": state})
    return stages


@dataclass(frozen=True)
class StageFiles:
    """The files of one stage, of all its keys."""

    stage: str
    files: tuple[StageFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Difference:
    """A field that two documents do not have with the same value."""

    pointer: str
    """JSON pointer (RFC 6901)."""

    mine: str | None
    """JSON text; None where the document has no such field."""

    other: str | None


def differences(mine: JsonValue, other: JsonValue, pointer: str = "") -> tuple[Difference, ...]:
    """Fields in which two JSON documents differ, in order of the first one. Lists are compared by index.

    Objects and lists are descended into where both documents have one, else shown whole. Equal fields are left out.
    """
    if isinstance(mine, list) and isinstance(other, list):
        mine, other = ({str(at): value for at, value in enumerate(values)} for values in (mine, other))
    if not isinstance(mine, dict) or not isinstance(other, dict):
        texts = json.dumps(mine, ensure_ascii=False), json.dumps(other, ensure_ascii=False)
        return () if texts[0] == texts[1] else (Difference(pointer, *texts),)
    differing: list[Difference] = []
    for name in (*mine, *(name for name in other if name not in mine)):
        below = pointer + pointer_of([name])
        if name in mine and name in other:
            differing += differences(mine[name], other[name], below)
        else:
            differing.append(Difference(below, *(
                json.dumps(document[name], ensure_ascii=False) if name in document else None
                for document in (mine, other))))
    return tuple(differing)


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
    tables, answers = [], report.regenerate
    if answers is not None:
        tables.append(StageTable("regenerate", "Regenerate: conversations and answers", (),
                                 tuple(_of_answers(answers))))
    if report.capture is not None:
        tables.append(StageTable("capture", "Capture: hidden states of the target", (),
                                 tuple(_of_states(report.capture))))
    if answers is not None and len(answers.outcomes) > 1:
        rows = tuple((source, *(f"{kinds.get(name, 0):,}" for name in _ANSWERED),
                      ", ".join(_counts(_unused({"": kinds})))) for source, kinds in answers.outcomes.items())
        tables.append(StageTable("regenerate", "Regenerate, by source of the data",
                                 ("source", "#rows answered", "#of them truncated", "not used"), rows))
    if report.train:
        tables += [_of_candidates(report.train), _of_checkpoints(report.train)]
    return tuple(tables)


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
            yield name, f"half up to {lengths.p50:,} tokens, 90 % up to {lengths.p90:,}, longest {lengths.most:,}"
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


def _of_candidates(reports: Sequence[TrainReport]) -> StageTable:
    rows = tuple((
        report.candidate, report.family, f"{report.parameters:,}" if report.parameters else "", f"{report.steps:,}",
        f"{report.rows:,}" if report.rows else "",
        f"{report.supervised_tokens:,}", duration(report.seconds), f"{report.tokens_per_s:,.0f}",
        _percent(report.mfu) if report.mfu else "", _percent(report.padding_share), _percent(report.data_wait_share),
        f"{report.vocabulary.draft_vocab_size:,} ({_percent(report.vocabulary.coverage)})",
        _covered(report.vocabulary), "; ".join(_notes(report)))
        for report in reports)
    return StageTable("train", "Train: candidates", (
        "candidate", "family", "#parameters", "#steps", "#rows", "#supervised tokens", "#time", "#tokens/s", "#MFU",
        "#padding", "#data wait", "#draft vocabulary", "of other answers", "note"), rows,
        "MFU: arithmetic of the loss and its gradient, of the fastest matrix product measured there. Draft vocabulary: "
        "its tokens, and the share of the supervised tokens that it covers; of other answers: the share that it covers "
        "of rows that are not trained on, and of answers of each source that a vocabulary of this size was not "
        "counted from.")


def _covered(vocabulary: VocabularyReport) -> str:
    held_out = [] if vocabulary.held_out_coverage is None else [f"held out {_percent(vocabulary.held_out_coverage)}"]
    return ", ".join(held_out + [f"{source} {_percent(share)}"
                                 for source, share in vocabulary.coverage_by_source.items()])


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
    rows = tuple((checkpoint.name, f"{checkpoint.epoch:.2f}", f"{checkpoint.loss:.3f}",
                  f"{checkpoint.theoretical_speedup:.2f}x", *(
                    ", ".join(f"{100 * share:.1f}" for share in shares)
                    for shares in (checkpoint.accuracy, checkpoint.conditional_acceptance)))
                 for report in reports for checkpoint in report.checkpoints)
    return StageTable("train", "Train: checkpoints, on held-out rows", (
        "checkpoint", "#epoch", "#loss", "#theoretical speed-up", "accuracy by step, %", "acceptance by position, %"),
        rows)


def _unused(outcomes: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    """Rows that were not used, by kind, of all sources."""
    unused = Counter[str]()
    for kinds in outcomes.values():
        unused.update({kind: number for kind, number in kinds.items() if kind not in _ANSWERED})
    return unused


def _counts(counted: Mapping[str, int]) -> list[str]:
    """The largest first; what did not occur is left out."""
    return [f"{name} {number:,}" for name, number in sorted(counted.items(), key=lambda pair: -pair[1]) if number]


def _with(text: str, details: Sequence[str]) -> str:
    return f"{text} ({', '.join(details)})" if details else text


def _time(seconds: float, tokens_per_s: float) -> str:
    return f"{duration(seconds)}, {tokens_per_s:,.0f} tokens/s"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
