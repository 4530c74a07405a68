"""Records of a running stage: one JSON line each in `events.jsonl` next to its manifest.

The same file is read by the embedded world (tailed into SQL) and shipped by a pod. Records carry no ids: the reader
numbers them by line, which makes reading them again harmless.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, JsonValue, TypeAdapter

from eyrie_api.contract.model import Frozen
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.status import Progress


class ProgressRecord(Progress):
    """How far the stage is."""

    kind: Literal["progress"] = "progress"
    time: datetime
    done: float


class MetricRecord(Frozen):
    """One point of a series."""

    kind: Literal["metric"] = "metric"
    time: datetime
    name: str
    step: int
    value: float


class EventRecord(Frozen):
    """Something worth telling a person."""

    kind: Literal["event"] = "event"
    time: datetime
    type: Literal["Normal", "Warning"] = "Normal"
    reason: str
    message: str
    data: dict[str, JsonValue] = Field(default_factory=dict)


class Failure(Frozen):
    """Why a stage program ended without a manifest: `failure.json`."""

    reason: str
    message: str
    hint: str = ""
    transient: bool = False
    exit_code: int
    time: datetime


class Wait(Frozen):
    """Why a pod has no node, or none of its containers."""

    reason: Literal["WaitingForNodes", "WaitingForQueue", "WaitingForContainers"]
    message: str
    hint: str
    since: datetime


class WaitingPod(Wait):
    """A pod of a run that waits, as the operator has seen it: a column of the job."""

    run_id: str
    stage: StageName
    key: str = ""
    """The hardware profile of a pod that measures one; otherwise empty, since pods of a loop have no name of ours."""


StageRecord = Annotated[ProgressRecord | MetricRecord | EventRecord, Field(discriminator="kind")]
STAGE_RECORD: TypeAdapter[StageRecord] = TypeAdapter(StageRecord)
