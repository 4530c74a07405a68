"""A prompt answered by an endpoint with and without its drafter, as server-sent events (`contract.comparison`).

The runs follow one another: decoded together, a round of the engine would serve both, and the undrafted answer would
wait for the drafter too. Each is an ordinary greedy chat request to the endpoint's own URL, which the control plane has
written and no user can choose. Closing the response closes the request, which ends the generation.

The embedded engine returns token ids, origins and draft trees, and leaves the drafter out where a request says so
(`eyrie` in docs/serving.md). SGLang returns text and running token counts: a chunk is shown as one run of accepted
tokens. Its undrafted answer comes from a revision without a drafter where one answers too (during a canary), else from
what the proof recorded for this prompt.
"""

import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from eyrie_api.artifacts.directories import StageManifest
from eyrie_api.contract.comparison import (
    ANSWERS_FILE,
    ComparedProgress,
    ComparedRound,
    ComparedToken,
    CompareRequest,
    ComparisonEnd,
    DraftNode,
    RecordedAnswer,
    RecordedAnswers,
    RecordedRun,
    RunName,
    RunProblem,
)
from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.status import Endpoint, Revision
from eyrie_api.errors import ArtifactMissing, EyrieError, InvalidInput, Transient
from eyrie_api.http.control import Control
from eyrie_api.http.job_files import JobFiles

_RUNS: tuple[RunName, ...] = ("drafted", "undrafted")
# Longer than a gateway holds a request while an engine is replaced.
_TIMEOUT = httpx.Timeout(150.0, connect=5.0)
_TRY_AGAIN = "eyrie endpoints shows whether it serves; try again in a moment"


@dataclass
class RunSoFar:
    run: RunName
    traced: bool
    """Whether the engine returns its rounds; otherwise a chunk is one, by its running token count."""

    revision: int | None = None
    token_ids: list[int] = field(default_factory=list)
    """Empty of an engine without traces."""

    text: str = ""
    num_tokens: int = 0
    is_complete: bool = False
    is_cut: bool = False
    """Complete, by the limit of tokens."""

    _num_rounds: int = -1  # the prefill is none
    _num_first: int = 0
    _first_at_s: float | None = None
    _num_held: int = 0  # tokens whose text has not come yet

    def take(self, chunk: dict[str, Any], now_s: float) -> ComparedProgress | None:
        """Add a chunk of the stream; None when it has no tokens. Raises InvalidInput for the engine's error."""
        if "error" in chunk:
            raise refusal(chunk)
        rounds = []
        for choice in chunk.get("choices") or ():
            self.is_complete = self.is_complete or choice.get("finish_reason") is not None
            self.is_cut = self.is_cut or choice.get("finish_reason") == "length"
            self.text += (choice.get("delta") or {}).get("content") or ""
            for traced in (choice.get("eyrie") or {}).get("rounds", ()):
                self.token_ids += [token["token_id"] for token in traced["tokens"]]
                tokens = tuple(ComparedToken(token=token["token"], drafted=token["drafted"])
                               for token in traced["tokens"])
                nodes = tuple(DraftNode(token=node["token"], parent=node["parent"], accepted=node["accepted"])
                              for node in traced["nodes"])
                rounds.append(ComparedRound(text="".join(token.token for token in tokens), num_tokens=len(tokens),
                                            tokens=tokens, nodes=nodes))
        if not self.traced:
            rounds = self._rounds_of(chunk)
        if self._first_at_s is None and (rounds or self._num_held):
            self._first_at_s = now_s
        if not rounds:
            return None
        self.num_tokens += sum(round_.num_tokens for round_ in rounds)
        counted = [round_.num_tokens for round_ in rounds if round_.num_tokens]
        if self._num_rounds < 0 and counted:
            self._num_first = counted[0]
        self._num_rounds += len(counted)
        later, seconds = self.num_tokens - self._num_first, now_s - (self._first_at_s or 0.0)
        return ComparedProgress(
            run=self.run, revision=self.revision, rounds=tuple(rounds), num_tokens=self.num_tokens,
            num_rounds=max(0, self._num_rounds), tau=later / self._num_rounds if self._num_rounds > 0 else None,
            tokens_per_s=later / seconds if seconds > 0 else None)

    def _rounds_of(self, chunk: dict[str, Any]) -> list[ComparedRound]:
        """The rounds of an engine without traces: a text, and the tokens counted since the one before.

        The count may come in a chunk before the text: the first one, which names the role, has none.
        """
        rounds = []
        text = "".join((choice.get("delta") or {}).get("content") or "" for choice in chunk.get("choices") or ())
        num_new = (chunk.get("usage") or {}).get("completion_tokens", 0) - self.num_tokens - self._num_held
        if num_new > 0:
            if self._num_held:
                rounds.append(ComparedRound(text="", num_tokens=self._num_held))
            self._num_held = num_new
        if text or (self.is_complete and self._num_held):
            rounds.append(ComparedRound(text=text, num_tokens=self._num_held))
            self._num_held = 0
        return rounds


def refusal(body: dict[str, Any]) -> InvalidInput:
    """The error of an OpenAI-shaped error object."""
    error = body.get("error")
    details: dict[str, Any] = error if isinstance(error, dict) else {"message": str(error or "no reason was given")}
    return InvalidInput(f"the engine refused: {details.get('message')}", details.get("hint") or _TRY_AGAIN)


@dataclass(frozen=True)
class ProofRecording:
    job_id: str
    answers: tuple[RecordedAnswer, ...]
    tokens_per_s: float | None
    """See `RecordedRun`."""

    def run(self, prompt: str) -> RecordedRun | None:
        """In place of the undrafted run; None for a prompt without a recorded answer."""
        return next((RecordedRun(
            run="undrafted", job_id=self.job_id, text=answer.text, num_tokens=answer.num_tokens, is_cut=answer.is_cut,
            tokens_per_s=self.tokens_per_s) for answer in self.answers if answer.prompt == prompt), None)


@dataclass(frozen=True)
class ServedEndpoint:
    url: str
    """Base URL, up to and including `/v1`."""

    model: str
    engine: EngineKind
    drafted: int | None
    """The revision with a drafter that answers now."""

    undrafted: int | None
    """The one without."""

    own_urls: Mapping[int, str]
    """Base URLs of single revisions, by number. The others are requested at `url` with a header that Eyrie's gateway
    reads."""

    recording: ProofRecording | None


class _AnotherRevision(Exception):
    """The requested revision does not answer at this URL."""


def live_revisions(endpoint: Endpoint) -> list[Revision]:
    """The revisions that get requests: the active one, and the canary. Pure."""
    return [rev for rev in endpoint.revisions if rev.number == endpoint.active_revision or rev.state == "canary"]


def live_revision(endpoint: Endpoint, *, drafts: bool) -> int | None:
    """The newest of them that drafts, or that does not. Pure."""
    return max((revision.number for revision in live_revisions(endpoint)
                if (revision.use.setting.method != "off") == drafts), default=None)


async def compare(served: ServedEndpoint, request: CompareRequest) -> AsyncIterator[str]:
    complete: dict[RunName, RunSoFar] = {}
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT) as client:
        for run in _RUNS:
            so_far = RunSoFar(run, traced=served.engine == "embedded")
            try:
                async with contextlib.aclosing(_chunks(client, so_far, served, request)) as got:
                    async for chunk in got:
                        progress = so_far.take(chunk, time.monotonic())
                        if progress is not None:
                            yield _message("progress", progress)
                if not so_far.is_complete:
                    raise Transient("the answer ended before its end", _TRY_AGAIN)
            except _AnotherRevision:
                recorded = None if served.recording is None else served.recording.run(request.prompt)
                if recorded is None:
                    yield _message("unavailable", _why_unavailable(served.recording))
                    continue
                yield _message("recorded", recorded)
                so_far.text, so_far.is_cut = recorded.text, recorded.is_cut
            except EyrieError as error:
                yield _message("failed", RunProblem(run=run, message=error.message, hint=error.hint))
                continue
            except (httpx.HTTPError, ValueError) as error:  # ValueError: an event that is no JSON
                yield _message("failed", RunProblem(run=run, message=f"no answer ({type(error).__name__})",
                                                    hint=_TRY_AGAIN))
                continue
            complete[run] = so_far
    equal = are_equal(complete["drafted"], complete["undrafted"]) if len(complete) == len(_RUNS) else None
    yield _message("end", ComparisonEnd(equal=equal))


def are_equal(drafted: RunSoFar, undrafted: RunSoFar) -> bool:
    """Whether two complete answers are equal: see `ComparisonEnd`. Pure."""
    if drafted.traced:
        return drafted.token_ids == undrafted.token_ids
    shorter, longer = sorted((drafted, undrafted), key=lambda run: len(run.text))
    # The limit may cut a character, whose bytes are then U+FFFD.
    return longer.text.startswith(shorter.text.rstrip("\ufffd")) if shorter.is_cut else shorter.text == longer.text


def _why_unavailable(recording: ProofRecording | None) -> RunProblem:
    if recording is None or not recording.answers:
        hint = "the proof of a job in SGLang records answers: serve a drafter of a job that this version has proven"
    else:
        prompts = [answer.prompt for answer in recording.answers]
        named = ", ".join(json.dumps(prompt if len(prompt) <= 80 else prompt[:79] + "...", ensure_ascii=False)
                          for prompt in prompts[:3])
        hint = f"ask one of the prompts that it recorded (GET .../recorded-prompts lists all {len(prompts)}): {named}"
    return RunProblem(run="undrafted", hint=hint, message="SGLang cannot leave its drafter out of single requests, no "
                      "revision without a drafter answers here now, and the proof recorded no answer to this prompt")


async def _chunks(client: httpx.AsyncClient, so_far: RunSoFar, served: ServedEndpoint,
                  request: CompareRequest) -> AsyncGenerator[dict[str, Any]]:
    run, switches = so_far.run, served.engine == "embedded"
    wanted = None if switches else served.drafted if run == "drafted" else served.undrafted
    if run == "undrafted" and wanted is None and not switches:
        raise _AnotherRevision
    own = None if wanted is None else served.own_urls.get(wanted)
    headers = {} if wanted is None else {"x-eyrie-revision": str(wanted)}
    body: dict[str, Any] = {"model": served.model, "messages": [{"role": "user", "content": request.prompt}],
                            "temperature": 0, "max_tokens": request.max_tokens, "stream": True}
    body |= {"eyrie": {"drafter": run == "drafted", "rounds": True}} if switches else {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with client.stream("POST", (own or served.url).rstrip("/") + "/chat/completions", headers=headers,
                             json=body) as answer:
        revision = answer.headers.get("x-eyrie-revision", "") if own is None else str(wanted)
        so_far.revision = int(revision) if revision.isdecimal() else None
        if answer.status_code != 200:
            raise refusal(json.loads(await answer.aread()))
        if run == "undrafted" and not switches and served.drafted is not None and so_far.revision != wanted:
            raise _AnotherRevision  # not an Eyrie gateway, which names the revision, or the canary has ended
        rest = b""
        async for part in answer.aiter_bytes():
            # Not by `aiter_lines`, which also splits at U+2028 within a text.
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield json.loads(data)


def _message(event: str, value: Frozen) -> str:
    return f"event: {event}\ndata: {value.model_dump_json()}\n\n"


def read_recording(control: Control, endpoint: Endpoint) -> ProofRecording | None:
    """Of the newest drafter that serves now; None of the embedded engine, which leaves its drafter out on request, and
    where no proof in the serving engine recorded answers. Raises StoreUnavailable, ArtifactCorrupt."""
    engine = control.endpoints.serving(endpoint.name).serve.engine.kind
    if engine == "embedded":
        return None
    for revision in sorted(live_revisions(endpoint), key=lambda revision: -revision.number):
        for finished in control.files.manifests(revision.job_id) if revision.job_id else ():
            report = finished.manifest.report
            if isinstance(report, ProveReport) and report.engine == engine:
                answers = _read(control.files, finished)
                if answers is not None:
                    levels = () if report.load is None else report.load.levels
                    gaps = (level.total.inter_token_s for level in levels
                            if (level.variant, level.mode, level.level) == ("off", "closed", 1.0))
                    return ProofRecording(finished.manifest.job_id, answers.answers, next(
                        (1.0 / gap.mean for gap in gaps if gap is not None and gap.mean > 0), None))
    return None


def _read(files: JobFiles, finished: StageManifest) -> RecordedAnswers | None:
    """The recorded answers of a finished proof; None of one without any, or whose files were removed."""
    entry = next((entry for entry in finished.manifest.files if entry.path == ANSWERS_FILE), None)
    if entry is None:
        return None
    try:
        path = files.path(finished, entry)
        content = path.read_bytes() if path is not None else b"".join(files.pieces(finished, entry))
    except ArtifactMissing:
        return None
    return RecordedAnswers.model_validate_json(content)
