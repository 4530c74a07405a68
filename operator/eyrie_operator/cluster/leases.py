"""Who may act: one operator at a time, by a coordination.k8s.io Lease.

Several operators may run; one holds the lease and acts, the others watch it. The rules, which are client-go's:

- a candidate takes the lease when it is free, or when its record has not changed for `duration_s` *since this candidate
  first saw it so*. Nobody compares clocks: times in the record are for people;
- the holder renews every `retry_s` and gives up when it has not managed to for `renew_within_s`, which is shorter than
  `duration_s`. So it has stopped before another may begin;
- taking and renewing are updates with the resourceVersion that was read: of two candidates one gets a conflict.

Fencing: before each write the client asks the `Fence`, which is open until `renew_within_s` after the last renewal was
*sent* (not answered). What passes the fence at the last moment and is delayed on its way carries the resourceVersion
of the object it was thought out for, so it is refused if a new leader has touched the object since. And what it asks of
SQL is idempotent. Nothing of this needs the dead holder's help: it may have been ended by kill -9 or be frozen.

`decide` is pure. `Elector` does one step of it when told, with the clock it is given.
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
    """Another operator may be acting."""

    reason = "NotLeader"


@dataclass(frozen=True)
class LeaseRecord:
    """A Lease as the API server has it."""

    holder: str
    """Empty when it was given back."""

    duration_s: float
    renewed_at: datetime
    acquired_at: datetime
    transitions: int = 0
    resource_version: str | None = None


@dataclass(frozen=True)
class LeaseTimings:
    """How long things may take. client-go's defaults."""

    duration_s: float = 15.0
    renew_within_s: float = 10.0
    retry_s: float = 2.0


def timings_of(duration_s: float) -> LeaseTimings:
    """The proportions of the defaults, for another duration."""
    return LeaseTimings(duration_s, duration_s * 2 / 3, duration_s * 2 / 15)


class LeaseClient(Protocol):
    """Where the lease is kept."""

    def read_lease(self) -> LeaseRecord | None:
        """None when there is none yet."""

    def write_lease(self, record: LeaseRecord) -> LeaseRecord | None:
        """Make it, or update the version it names. None when another was faster."""


Move = Literal["make", "take", "renew", "wait"]


def decide(me: str, seen: LeaseRecord | None, unchanged_for_s: float) -> Move:
    """What a candidate does about the record it sees, which it has seen unchanged for so long."""
    if seen is None:
        return "make"
    if seen.holder == me:
        return "renew"
    # A holder announces how long it may be silent; our own timings do not matter to it.
    return "take" if not seen.holder or unchanged_for_s > seen.duration_s else "wait"


class Fence:
    """Open while we are the leader beyond doubt."""

    def __init__(self, monotonic: Monotonic) -> None:
        self._monotonic, self._until = monotonic, float("-inf")

    def open_until(self, moment: float) -> None:
        """On the monotonic clock."""
        self._until = moment

    def close(self) -> None:
        """Nothing may be written any more."""
        self._until = float("-inf")

    @property
    def is_open(self) -> bool:
        """Whether a write may begin now."""
        return self._monotonic() < self._until

    def check(self) -> None:
        """Raises NotLeader when it may not."""
        if not self.is_open:
            raise NotLeader("this operator does not hold the lease", "leave it to the one that does")


class Elector:
    """One candidate."""

    def __init__(self, me: str, door: LeaseClient, timings: LeaseTimings, fence: Fence, *, monotonic: Monotonic,
                 clock: Callable[[], datetime]) -> None:
        self._me, self._door, self._timings, self._fence = me, door, timings, fence
        self._monotonic, self._clock = monotonic, clock
        self._seen: LeaseRecord | None = None
        self._since = monotonic()

    def step(self) -> bool:
        """Look, decide, act; whether we lead."""
        started = self._monotonic()
        seen = self._door.read_lease()
        if seen != self._seen:
            self._seen, self._since = seen, started
        move = decide(self._me, seen, started - self._since)
        if move != "wait" and self._write(move, seen):
            # Counted from before the request: nobody else can have seen it renewed earlier than that.
            self._fence.open_until(started + self._timings.renew_within_s)
        elif move == "wait":
            self._fence.close()
        return self._fence.is_open

    def resign(self) -> None:
        """Give the lease back, so that another need not wait for it to run out."""
        self._fence.close()
        seen = self._door.read_lease()
        if seen is not None and seen.holder == self._me:
            self._door.write_lease(replace(seen, holder="", renewed_at=self._clock()))

    def _write(self, move: Move, seen: LeaseRecord | None) -> bool:
        now = self._clock()
        if seen is None or move == "make":
            record = LeaseRecord(self._me, self._timings.duration_s, now, now)
        elif move == "renew":
            record = replace(seen, renewed_at=now, duration_s=self._timings.duration_s)
        else:
            record = replace(seen, holder=self._me, renewed_at=now, acquired_at=now, transitions=seen.transitions + 1,
                             duration_s=self._timings.duration_s)
        written = self._door.write_lease(record)
        if written is None:
            return False
        self._seen, self._since = written, self._monotonic()
        return True


def run_election(elector: Elector, fence: Fence, timings: LeaseTimings, stopping: threading.Event,
                 leading: Callable[[], None], lost: Callable[[], None]) -> None:
    """Stand for election until told to stop; `leading` is called once when won, `lost` once when no longer held.

    An API server that does not answer makes nobody a leader: the fence falls by itself.
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
            log.warning("the lease could not be given back: %s", error)
