"""Leader election by a coordination.k8s.io Lease: one operator acts at a time.

Several operators may run; the holder of the lease acts, the others are on standby. The rules are client-go's:

- a candidate acquires the lease when it is free, or when its record has not changed for `duration_s` *since this
  candidate first observed it*. Clocks of machines are never compared: times in the record are informative;
- the holder renews every `retry_s`, and stops leading when no renewal has succeeded for `renew_within_s`, which is
  shorter than `duration_s`. So it has stopped before another candidate may start;
- acquiring and renewing are updates with the resourceVersion that was read: of two candidates one gets a conflict.

Fencing: every write first checks the `Fence`, which is open until `renew_within_s` after the last renewal was *sent*
(not answered). A write that passes the fence and is delayed on the network carries the resourceVersion of the object it
was planned for, and is rejected if a new leader has changed the object since. Writes to SQL are idempotent. None of
this needs the cooperation of the old holder, which may have been killed or frozen.

`decide` is pure. `Elector.step` does one step with the clock it is given.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, Protocol

from eyrie_api.errors import Conflict, EyrieError

log = logging.getLogger(__name__)

Monotonic = Callable[[], float]


class NotLeader(Conflict):
    """This operator does not hold the lease; another may be acting."""


@dataclass(frozen=True)
class LeaseRecord:
    holder: str
    """Empty after it was released."""

    duration_s: float
    renewed_at: datetime
    acquired_at: datetime
    transitions: int = 0
    resource_version: str | None = None


@dataclass(frozen=True)
class LeaseTimings:
    """Durations of the election; the defaults are client-go's."""

    duration_s: float = 15.0
    renew_within_s: float = 10.0
    retry_s: float = 2.0


def timings_of(duration_s: float) -> LeaseTimings:
    """Timings in the proportions of the defaults for another duration."""
    return LeaseTimings(duration_s, duration_s * 2 / 3, duration_s * 2 / 15)


class LeaseClient(Protocol):
    def read_lease(self) -> LeaseRecord | None:
        """The lease; None when it does not exist."""

    def write_lease(self, record: LeaseRecord) -> LeaseRecord | None:
        """Create it, or update the version it names. None on a conflict with another candidate."""


Move = Literal["create", "acquire", "renew", "wait"]


def decide(me: str, seen: LeaseRecord | None, unchanged_for_s: float) -> Move:
    """The candidate's move, given the record and how long it has been unchanged."""
    if seen is None:
        return "create"
    if seen.holder == me:
        return "renew"
    # The duration is the holder's, from the record: candidates may be configured differently.
    return "acquire" if not seen.holder or unchanged_for_s > seen.duration_s else "wait"


class Fence:
    """Open while this operator is certain to be the leader."""

    def __init__(self, monotonic: Monotonic) -> None:
        self._monotonic, self._until = monotonic, float("-inf")

    def open_until(self, moment: float) -> None:
        self._until = moment

    def close(self) -> None:
        self._until = float("-inf")

    @property
    def is_open(self) -> bool:
        return self._monotonic() < self._until

    def check(self) -> None:
        """Raises NotLeader when the fence is closed."""
        if not self.is_open:
            raise NotLeader("this operator does not hold the lease", "the operator that holds it acts")


class Elector:
    def __init__(self, me: str, client: LeaseClient, timings: LeaseTimings, fence: Fence, *, monotonic: Monotonic,
                 clock: Callable[[], datetime]) -> None:
        self._me, self._client, self._timings, self._fence = me, client, timings, fence
        self._monotonic, self._clock = monotonic, clock
        self._seen: LeaseRecord | None = None
        self._since = monotonic()

    def step(self) -> bool:
        """Read the lease, decide, write; returns whether this operator leads."""
        started = self._monotonic()
        seen = self._client.read_lease()
        if seen != self._seen:
            self._seen, self._since = seen, started
        move = decide(self._me, seen, started - self._since)
        if move != "wait" and self._write(move, seen):
            # Counted from before the request was sent: no other candidate can have observed the renewal earlier.
            self._fence.open_until(started + self._timings.renew_within_s)
        elif move == "wait":
            self._fence.close()
        return self._fence.is_open

    def resign(self) -> None:
        """Release the lease, so that another operator need not wait until it expires."""
        self._fence.close()
        seen = self._client.read_lease()
        if seen is not None and seen.holder == self._me:
            self._client.write_lease(replace(seen, holder="", renewed_at=self._clock()))

    def _write(self, move: Move, seen: LeaseRecord | None) -> bool:
        now = self._clock()
        if seen is None or move == "create":
            record = LeaseRecord(self._me, self._timings.duration_s, now, now)
        elif move == "renew":
            record = replace(seen, renewed_at=now, duration_s=self._timings.duration_s)
        else:
            record = replace(seen, holder=self._me, renewed_at=now, acquired_at=now, transitions=seen.transitions + 1,
                             duration_s=self._timings.duration_s)
        written = self._client.write_lease(record)
        if written is None:
            return False
        self._seen, self._since = written, self._monotonic()
        return True


def run_election(elector: Elector, fence: Fence, timings: LeaseTimings, stopping: threading.Event,
                 leading: Callable[[], None], lost: Callable[[], None]) -> None:
    """Run the election until `stopping`; calls `leading` once when the lease is acquired, `lost` once when it is lost.

    When the API server does not respond, the fence closes by its timeout.
    """
    led = False
    while not stopping.is_set():
        try:
            elector.step()
        except EyrieError as error:
            log.warning("the lease could not be read or renewed: %s", error)
        if fence.is_open and not led:
            led = True
            leading()
        elif led and not fence.is_open:
            lost()
            return
        stopping.wait(timings.retry_s)
    if led:
        try:
            elector.resign()
        except EyrieError as error:
            log.warning("the lease could not be released: %s", error)
