"""Routing of the gateway: the routing file, shares between engines, and outcomes counted per engine.

`route.json` names the engine that serves and, during a canary, others with a share of the requests each. Shares are
exact, not random: request n goes to the engine that is furthest behind its share of n. With a share of 0.2 the new
engine gets the third of every five requests, so that a step over few requests has the configured share.

Outcomes are counted per route: `answered` (complete responses, status below 500) and `errors` (status 500 and above, a
refused connection, an incomplete response). Requests whose client disconnected count as neither. Requests that began
under an earlier route are not counted: they must not decide a later canary step.

Requests that ask an engine to generate past the end of an answer (`ignore_eos`) are noted for each revision: what they
were decoded to resembles no answer, so that an acceptance window with one of them is not judged (`UnendedAnswers`).
"""

import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.model import Frozen
from eyrie_operator.endpoints.traffic_recording import Recording

ROUTE_FILE = "route.json"
COUNTERS_PATH = "/-/eyrie/counters"
UNENDED_PATH = "/-/eyrie/unended"
"""Served by the gateway itself, never forwarded."""


class Share(Frozen):
    revision: int
    url: str
    """The engine's base URL, without `/v1`."""

    share: float = Field(gt=0.0, lt=1.0)


class RouteRecord(Frozen):
    """`route.json`: the engine that serves, and those that get a share."""

    revision: int
    url: str
    since: datetime
    others: tuple[Share, ...] = ()
    on_hold: bool = False
    """The engine is being replaced by one that does not fit next to it: requests wait for the next route."""

    recording: Recording = Field(default_factory=Recording)

    @model_validator(mode="after")
    def _shares_leave_rest(self) -> "RouteRecord":
        if sum(other.share for other in self.others) >= 1.0:
            raise ValueError("the shares of the other engines must sum to less than 1")
        return self


class RequestCounts(Frozen):
    """Outcomes of one engine under the current route."""

    answered: int = 0
    errors: int = 0


class RequestCounters(Frozen):
    """`GET /-/eyrie/counters`."""

    since: datetime | None
    """When the counted route was written."""

    revisions: dict[int, RequestCounts]


class UnendedAnswers(Frozen):
    """`GET /-/eyrie/unended`: when requests with `ignore_eos` were last in progress."""

    known_since: datetime
    """The start of this gateway."""

    latest: dict[int, datetime] = Field(default_factory=dict)
    """By revision."""

    def within(self, revision: int, since: datetime) -> bool:
        """Whether that may have been so since then. Pure."""
        return self.known_since > since or self.latest.get(revision, since) > since


def ignores_eos(body: bytes) -> bool:
    """Whether a request asks for tokens past the end of its answer: of OpenAI's API, or SGLang's own. Pure."""
    if b"ignore_eos" not in body:
        return False
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(request, dict):
        return False
    sampling = request.get("sampling_params")
    sections = (request, *(sampling if isinstance(sampling, list) else [sampling]))
    return any(bool(section.get("ignore_eos")) for section in sections if isinstance(section, dict))


class RoutedRequest:
    """The engine chosen for one request; counts its outcome."""

    def __init__(self, revision: int, url: str, counted: dict[int, RequestCounts],
                 on_progress: Callable[[int], None] | None) -> None:
        """`on_progress`: of a request with `ignore_eos`."""
        self.revision, self.url = revision, url
        self._counted, self._on_progress = counted, on_progress
        self.ended()

    def ended(self) -> None:
        """Note when a request with `ignore_eos` was last in progress. May be called again."""
        if self._on_progress is not None:
            self._on_progress(self.revision)

    def count(self, outcome: Literal["answered", "errors"]) -> None:
        """Count a complete response, or an error of the engine."""
        before = self._counted.get(self.revision, RequestCounts())
        self._counted[self.revision] = before.model_copy(update={outcome: getattr(before, outcome) + 1})


class RoutingTable:
    """The routing file, read again when it changes, and the counts since."""

    def __init__(self, path: Path, clock: Clock = utc_now) -> None:
        self._path, self._clock, self._known_since = path, clock, clock()
        self._unended: dict[int, datetime] = {}
        self._seen: tuple[int, int] | None = None
        self._record: RouteRecord | None = None
        self._chosen: dict[int, int] = {}
        self._counted: dict[int, RequestCounts] = {}

    def current(self) -> RouteRecord | None:
        """The current route; None before the first engine."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            self._seen, self._record = None, None
            return None
        # The inode is new with every atomic replacement, even within one tick of the file system's clock.
        stamp = (stat.st_ino, stat.st_mtime_ns)
        if stamp != self._seen:
            # Damaged: the last good route stays until the control plane has written another.
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._record = RouteRecord.model_validate_json(self._path.read_text())
                # New dicts: requests of the earlier route still count into the old ones, which are dropped.
                self._seen, self._chosen, self._counted = stamp, {}, {}
        return self._record

    def choose(self, *, shared: bool, wanted: str, counted: bool, ignores_eos: bool) -> RoutedRequest | None:
        """The engine of a request that is sent now; with `shared` false always the one that serves.

        wanted   the number of a revision that gets the request, whatever its share, if the route has it
        counted  whether its outcome counts
        """
        route = self.current()
        if route is None:
            return None
        named = next((other for other in route.others if str(other.revision) == wanted), None)
        revision, url = (named.revision, named.url) if named is not None else (route.revision, route.url)
        if named is None and shared and route.others and str(route.revision) != wanted:
            main = Share(revision=revision, url=url, share=1.0 - sum(other.share for other in route.others))
            turn = sum(self._chosen.values()) + 1
            chosen = max((main, *route.others),
                         key=lambda engine: engine.share * turn - self._chosen.get(engine.revision, 0))
            revision, url = chosen.revision, chosen.url
            self._chosen[revision] = self._chosen.get(revision, 0) + 1
        note = self._note_unended if ignores_eos else None
        return RoutedRequest(revision, url, self._counted if counted else {}, note)

    def counters(self) -> RequestCounters:
        route = self.current()
        return RequestCounters(since=None if route is None else route.since, revisions=dict(self._counted))

    def unended(self) -> UnendedAnswers:
        """When requests with `ignore_eos` were last in progress."""
        return UnendedAnswers(known_since=self._known_since, latest=dict(self._unended))

    def _note_unended(self, revision: int) -> None:
        self._unended[revision] = self._clock()
