"""The row of one endpoint in simulated worlds, changed as `database.endpoints` changes it."""

from datetime import datetime
from typing import Any

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.status import Endpoint, Revision
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_operator.endpoints import plan as act

TAU = 3.0


class EndpointRow:
    """An endpoint, or None before it was created."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.endpoint: Endpoint | None = None
        self.proposed: dict[str, int] = {}
        """Revision by `once` of the proposal, as the endpoint's history has it."""

    def create_endpoint(self) -> None:
        """With the target alone as candidate, unless it exists."""
        if self.endpoint is None:
            bare = Revision(number=1, job_id=None, checkpoint=None, tree=None, drafter_dir=None, created_at=self.now,
                            reason="the target alone")
            self.endpoint = Endpoint(name="default", target="quickstart", url=None, model="m", active_revision=None,
                                     candidate_revision=1, revisions=(bare,), updated_at=self.now)

    def record(self, action: act.EndpointAction) -> None:
        """As `database.endpoints` does it."""
        assert self.endpoint is not None
        if isinstance(action, act.Activate):
            before = self._revision(self.endpoint.active_revision)
            if before is not None and before.number != action.revision:
                self._change(before.number, state="retired" if before.rejected_reason is None else "rolled-back")
            self._change(action.revision, state="active", rejected_reason=None)
            candidate = self.endpoint.candidate_revision
            self.endpoint = self.endpoint.model_copy(update={
                "active_revision": action.revision,
                "candidate_revision": None if candidate == action.revision else candidate})
        elif isinstance(action, act.Reject):
            self._change(action.revision, state="rejected", rejected_reason=f"{action.reason}: {action.message}")
            if self.endpoint.candidate_revision == action.revision:
                if self.endpoint.active_revision is not None:
                    self._change(self.endpoint.active_revision, rejected_reason=None)
                self.endpoint = self.endpoint.model_copy(update={"candidate_revision": None})
        elif isinstance(action, act.RollBack):
            self.roll_back(action.reason)
        elif isinstance(action, act.ProposeNoDrafter):
            self.propose(None, None)

    # What requests do to the rows of the endpoint.

    def propose(self, job: str | None, once: str | None) -> int:
        """`Endpoints.propose`."""
        assert self.endpoint is not None
        if once is not None and once in self.proposed:
            return self.proposed[once]
        directory = None if job is None else f"/drafters/{job}"
        for number in (self.endpoint.candidate_revision, self.endpoint.active_revision):
            same = self._revision(number)
            if same is not None and same.use.drafter_dir == directory:
                return same.number
        use = DrafterUse() if job is None else DrafterUse(drafter_dir=directory,
                                                          setting=Setting(method="drafter", tree=DraftTreeShape()))
        revision = Revision(number=len(self.endpoint.revisions) + 1, job_id=job, checkpoint=job, tree=None,
                            drafter_dir=directory, use=use, tau=None if job is None else TAU, created_at=self.now,
                            reason="better")
        self.endpoint = self.endpoint.model_copy(update={"revisions": (*self.endpoint.revisions, revision)})
        self._set_candidate(revision)
        if once is not None:
            self.proposed[once] = revision.number
        return revision.number

    def roll_back(self, reason: str) -> None:
        """`Endpoints.roll_back` to the revision before; no effect where that one refuses."""
        assert self.endpoint is not None
        active = self._revision(self.endpoint.active_revision)
        if active is None:
            return
        earlier = [one for one in reversed(self.endpoint.revisions) if one.number < active.number]
        good = [one for one in earlier if one.state == "retired"] or [one for one in earlier if one.checkpoint is None]
        if good:
            self._change(active.number, rejected_reason=f"{reason}: requested")
            self._set_candidate(good[0])

    def _set_candidate(self, revision: Revision) -> None:
        assert self.endpoint is not None
        waiting = self._revision(self.endpoint.candidate_revision)
        if waiting is not None and waiting.number != revision.number and waiting.state in ("proposed", "canary"):
            self._change(waiting.number, state="retired")
        if revision.state == "rejected":
            self._change(revision.number, state="proposed", rejected_reason=None)
        candidate = None if revision.number == self.endpoint.active_revision else revision.number
        self.endpoint = self.endpoint.model_copy(update={"candidate_revision": candidate, "desired": "on"})

    def _revision(self, number: int | None) -> Revision | None:
        assert self.endpoint is not None
        return None if number is None else self.endpoint.revisions[number - 1]

    def _change(self, number: int, **values: Any) -> None:
        assert self.endpoint is not None
        revisions = list(self.endpoint.revisions)
        revisions[number - 1] = revisions[number - 1].model_copy(update=values)
        self.endpoint = self.endpoint.model_copy(update={"revisions": tuple(revisions)})
