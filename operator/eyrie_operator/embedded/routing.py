"""Where the gateway sends requests: the routing file, shares between engines, and what came back from each.

`route.json` names the engine that serves and, while a new revision is tried (canary), others with a share of the
requests each. Shares are kept exactly, not on average: request n goes to the engine that is furthest behind its share
of n. With a share of 0.2 the new engine gets the third of every five requests, so that a step over few requests means
what it says, and a test can count.

What came back is counted from the moment a route was written: `answered` (whole answers, status below 500) and `errors`
(status 500 and above, a door that is closed, an answer that broke off). Requests whose client went away are neither,
and those a former route began count for nobody: they must not decide a later step.
"""

import contextlib
from datetime import datetime
from pathlib import Path

from pydantic import Field, model_validator

from eyrie_api.v1alpha1.model import Frozen

ROUTE_FILE = "route.json"
COUNTERS_PATH = "/-/eyrie/counters"
"""Answered by the gateway itself, never forwarded."""


class Share(Frozen):
    """One engine and its share of the requests."""

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
    record_prompts: int = Field(0, ge=0)
    """Latest chat requests to keep; 0 keeps none."""

    @model_validator(mode="after")
    def _something_left(self) -> "RouteRecord":
        if sum(one.share for one in self.others) >= 1.0:
            raise ValueError("shares of the other engines must leave something for the one that serves")
        return self


class Counted(Frozen):
    """What one engine did under the present route."""

    answered: int = 0
    errors: int = 0


class Counters(Frozen):
    """`GET /-/eyrie/counters`."""

    since: datetime | None
    """Of the route counted under."""

    revisions: dict[int, Counted]


class RoutedRequest:
    """One request's engine, and the place where its outcome is counted."""

    def __init__(self, revision: int, url: str, counted: dict[int, Counted]) -> None:
        self.revision, self.url = revision, url
        self._counted = counted

    def answered(self) -> None:
        """A whole answer."""
        self._count("answered")

    def failed(self) -> None:
        """An error of the engine's."""
        self._count("errors")

    def _count(self, what: str) -> None:
        before = self._counted.get(self.revision, Counted())
        self._counted[self.revision] = before.model_copy(update={what: getattr(before, what) + 1})


class Routes:
    """The routing file, read again when it changes, and the counts under it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._record: RouteRecord | None = None
        self._drawn: dict[int, int] = {}
        self._counted: dict[int, Counted] = {}

    def current(self) -> RouteRecord | None:
        """The route now; None before the first engine."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            self._seen, self._record = None, None
            return None
        # The inode is new with every atomic replacement, even within one tick of the file system's clock.
        stamp = (stat.st_ino, stat.st_mtime_ns)
        if stamp != self._seen:
            with contextlib.suppress(FileNotFoundError):
                self._record = RouteRecord.model_validate_json(self._path.read_text())
                self._seen, self._drawn, self._counted = stamp, {}, {}
        return self._record

    def draw(self, *, shared: bool = True) -> RoutedRequest | None:
        """The engine of the next request; of the one that serves when the request is not to be shared out."""
        route = self.current()
        if route is None:
            return None
        if not shared or not route.others:
            return RoutedRequest(route.revision, route.url, self._counted)
        main = Share(revision=route.revision, url=route.url, share=1.0 - sum(one.share for one in route.others))
        engines = (main, *route.others)
        turn = sum(self._drawn.values()) + 1
        chosen = max(engines, key=lambda one: one.share * turn - self._drawn.get(one.revision, 0))
        self._drawn[chosen.revision] = self._drawn.get(chosen.revision, 0) + 1
        return RoutedRequest(chosen.revision, chosen.url, self._counted)

    def counters(self) -> Counters:
        """What was counted under the present route."""
        route = self.current()
        return Counters(since=None if route is None else route.since, revisions=dict(self._counted))
