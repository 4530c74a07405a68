"""Which files and addresses a job may read: decided at its submission, applied again by the stages that read them."""

from typing import Any

from pydantic import Field

from eyrie_api.contract.model import Frozen


class ReadRules(Frozen):
    """Of a job of a project. A job whose submitter has a role in all projects has none, and reads what Eyrie may."""

    home: str
    """EYRIE_HOME of the control plane, an absolute path."""

    places: tuple[str, ...] = ()
    """Directories below `home` that may be read: `jobs/ID` and `endpoints/NAME` of the same project."""

    allow_private: bool = False
    """Whether URLs may lead to private and loopback addresses (EYRIE_WEBHOOKS_ALLOW_PRIVATE)."""

    private_hosts: tuple[str, ...] = ()
    """Hosts that may have such addresses all the same: an administrator named them (EYRIE_CREDENTIAL_HOSTS)."""

    def with_job(self, job_id: str | None) -> "ReadRules":
        """With the directory of a job, which the control plane itself names; None: as they are."""
        return self if job_id is None else self.model_copy(update={"places": (*self.places, f"jobs/{job_id}")})


class EndpointRules(Frozen):
    """Which files the engines of an endpoint may open, stored with it; they depend on who made it."""

    rules: ReadRules | None
    """None: who made it has a role in all projects."""


def reads_of_job() -> Any:
    """A stage's field for them. It is not in the JSON of a stage that has none, whose digest it therefore does not
    change: stages that finished before there were rules stay finished."""
    return Field(None, exclude_if=lambda rules: rules is None)
