"""An endpoint whose history has windows of two revisions, a rollback and a report of drift."""

from datetime import timedelta

from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.engine import EngineKind, EngineSpec
from eyrie_api.v1alpha1.serving import EndpointServeSpec
from eyrie_api.v1alpha1.targets import TargetSpec
from tests.api.samples import ManualClock

PROVEN = 3.0


def serve_drafter(database: Database, clock: ManualClock, name: str = "chat", engine: EngineKind = "embedded",
                  tau: float | None = PROVEN) -> int:
    """Make the endpoint, or find it, and activate a new drafter; returns its revision."""
    endpoints = Endpoints(database, clock)
    endpoints.create(name, TargetSpec(model="quickstart"), EndpointServeSpec(engine=EngineSpec(kind=engine)),
                     "quickstart")
    revision = endpoints.propose(name, job_id=None, checkpoint="base-step-9", tree=DraftTreeShape(),
                                 drafter_dir=f"/d/{clock().timestamp()}", reason="test", tau=tau)
    endpoints.activate(name, revision.number, "http://127.0.0.1:9/v1")
    return revision.number


def watch(database: Database, clock: ManualClock, revision: int, taus: tuple[float, ...], name: str = "chat", *,
          positions: bool = True) -> None:
    """Record windows, a minute apart."""
    for tau in taus:
        clock.now += timedelta(minutes=1)
        accepted = tuple(round(200 * share) for share in (0.8 * tau / PROVEN, 0.5 * tau / PROVEN)) if positions else ()
        Histories(database, clock).record_window(name, revision, tau, 200.0, PROVEN, accepted=accepted,
                                                 rollback_below=0.5 * PROVEN, drift_below=0.85 * PROVEN)


def endpoint_with_history(database: Database, clock: ManualClock) -> int:
    """An endpoint `chat`: the first drafter, another that is rolled back, and drift of the first; returns the first."""
    first = serve_drafter(database, clock)
    watch(database, clock, first, (3.0, 2.9, 3.1, 2.95, 3.05, 2.9))
    second = serve_drafter(database, clock)
    watch(database, clock, second, (2.2, 1.6, 1.3))
    clock.now += timedelta(seconds=5)
    endpoints = Endpoints(database, clock)
    endpoints.roll_back("chat", actor="watch", reason="AcceptanceCollapsed", message="fell to 1.3")
    endpoints.activate("chat", first)
    watch(database, clock, first, (2.9, 2.8, 2.5, 2.4, 2.45))
    Histories(database, clock).record("chat", "drift", "TrafficDrifted", "stayed low", once="drift/1", revision=first)
    watch(database, clock, first, (2.4,))
    return first
