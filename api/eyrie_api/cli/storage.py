"""`eyrie storage`: the files that jobs hold and which may be removed, as a table."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.artifacts.storage_usage import RemovalDecision, StorageUsage, StoredItem
from eyrie_api.client import Client
from eyrie_api.contract.status import Job
from eyrie_api.contract.storage import JobStorage, StoragePage
from eyrie_api.quantities import size

_PAGE = 200


def all_jobs(client: Client) -> Iterator[Job]:
    """Every job the server knows, page by page."""
    cursor: str | None = None
    while True:
        page = client.jobs(limit=_PAGE, cursor=cursor)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return


def measured_by(client: Client) -> tuple[StorageUsage, StoragePage]:
    """What the server has measured, as it would be measured here but for the names of files; and the last page."""
    jobs: dict[str, JobStorage] = {}
    cursor: str | None = None
    while True:
        page = client.storage(limit=_PAGE, cursor=cursor)
        jobs |= {job.job_id: job for job in page.items}
        cursor = page.next_cursor
        if cursor is None:
            break
    decisions = tuple(
        RemovalDecision(item=StoredItem(job_id=job.job_id, kind=held.kind, name=held.name, size_bytes=held.size_bytes,
                                        files=()), removable=held.removable, reason=held.reason)
        for job in jobs.values() for held in job.files)
    return StorageUsage(decisions=decisions, total_bytes=sum(job.size_bytes for job in jobs.values()),
                        removable_bytes=sum(job.removable_bytes for job in jobs.values())), page


def storage_view(usage: StorageUsage, freed: int | None, readers: Mapping[str, Sequence[str]]) -> RenderableType:
    """Items by size, the largest first; the records of all jobs in one row.

    readers   of a job's answers: job id -> jobs
    """
    table = Table(box=None, pad_edge=False)
    for name in ("JOB", "KIND", "SIZE", "REMOVABLE", "REASON"):
        table.add_column(name, justify="right" if name == "SIZE" else "left", overflow="fold")
    shown = [decision for decision in usage.decisions if decision.item.kind != "record"]
    for decision in sorted(shown, key=lambda decision: -decision.item.size_bytes):
        item = decision.item
        table.add_row(item.job_id, " ".join(filter(None, (item.kind, item.name))), size(item.size_bytes),
                      "yes" if decision.removable else "no", decision.reason)
    records = sum(decision.item.size_bytes for decision in usage.decisions if decision.item.kind == "record")
    table.add_row("(all)", "records", size(records), "no", "records are small and are kept")
    end = f"{size(usage.total_bytes)} held; " + (
        f"{size(freed)} removed" if freed is not None else
        f"{size(usage.removable_bytes)} removable: eyrie storage --clean")
    shared = [Text(f"{job}: its answers are read by {', '.join(others)}") for job, others in readers.items()]
    return Group(table, *shared, Text(end, "bold"))
