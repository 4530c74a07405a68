"""An endpoint whose history has windows of two revisions, a rollback and a report of drift."""

from datetime import timedelta

from eyrie_api.contract.engine import DraftTreeShape, EngineKind, EngineSpec
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from tests.api.samples import ManualClock

PROVEN = 3.0


def serve_drafter(database: Database, clock: ManualClock, name: str = "chat", engine: EngineKind = "embedded",
                  tau: float | None = PROVEN, shares: tuple[float, ...] = ()) -> int:
    """Make the endpoint, or find it, and activate a new drafter, after a canary with `shares`; returns its
    revision."""
    endpoints = Endpoints(database, clock)
    endpoints.create(name, TargetSpec(model="quickstart"), EndpointServeSpec(engine=EngineSpec(kind=engine)),
                     "quickstart")
    revision = endpoints.propose(name, job_id=None, checkpoint="base-step-9", tree=DraftTreeShape(),
                                 drafter_dir=f"/d/{clock().timestamp()}", reason="faster in every suite", tau=tau)
    ended = try_canary(database, clock, revision.number, shares, name)
    endpoints.activate(name, revision.number, "http://127.0.0.1:9/v1", ended)
    return revision.number


def try_canary(database: Database, clock: ManualClock, revision: int, shares: tuple[float, ...],
               name: str = "chat") -> dict[str, float | None]:
    """Give a candidate these shares, ten seconds each; returns what the last step counted."""
    ended: dict[str, float | None] = {}
    for share in shares:
        Endpoints(database, clock).canary(name, revision, share, ended)
        clock.pass_(10.0)
        ended = {"answered": 5.0, "errors": 0.0, "tau": 2.8, "rounds": 80.0, "tau_low": 2.3, "tau_high": 3.3}
    return ended


def watch(database: Database, clock: ManualClock, revision: int, taus: tuple[float, ...], name: str = "chat", *,
          positions: bool = True) -> None:
    """Record windows, a minute apart."""
    for tau in taus:
        clock.now += timedelta(minutes=1)
        accepted = tuple(round(200 * share) for share in (0.8 * tau / PROVEN, 0.5 * tau / PROVEN)) if positions else ()
        Histories(database, clock).record_window(name, revision, tau, 200.0, PROVEN, accepted=accepted,
                                                 rollback_below=0.5 * PROVEN, drift_below=0.85 * PROVEN,
                                                 requests=90.0, generated=5400.0, seconds=60.0)


def endpoint_with_history(database: Database, clock: ManualClock) -> int:
    """An endpoint `chat`: the first drafter, another that passed its canary and is rolled back, a third that is
    rejected, and drift of the first; returns the first."""
    first = serve_drafter(database, clock)
    watch(database, clock, first, (3.0, 2.9, 3.1, 2.95, 3.05, 2.9))
    second = serve_drafter(database, clock, shares=(0.2, 0.5))
    watch(database, clock, second, (2.2, 1.6, 1.3))
    clock.now += timedelta(seconds=5)
    endpoints = Endpoints(database, clock)
    endpoints.roll_back("chat", actor="watch", reason="AcceptanceCollapsed", message="fell to 1.3")
    endpoints.activate("chat", first)
    watch(database, clock, first, (2.9, 2.8))
    third = endpoints.propose("chat", job_id=None, checkpoint="wide-step-9", tree=DraftTreeShape(), reason="test",
                              drafter_dir="/d/third", tau=PROVEN)
    ended = try_canary(database, clock, third.number, (0.2,)) | {"errors": 2.0, "tau": None}
    endpoints.reject("chat", third.number, "CanaryFailed", "2 of its 7 requests failed", ended)
    watch(database, clock, first, (2.5, 2.4, 2.45))
    Histories(database, clock).record("chat", "drift", "TrafficDrifted", "stayed low", once="drift/1", revision=first)
    watch(database, clock, first, (2.4,))
    return first
