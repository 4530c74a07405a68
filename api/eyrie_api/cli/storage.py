"""`eyrie storage`: the files that jobs hold and which may be removed, as a table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.artifacts.storage_usage import RemovalDecision, StorageUsage, StoredItem
from eyrie_api.client import Client
from eyrie_api.contract.status import Job, JobList
from eyrie_api.contract.storage import StoragePage
from eyrie_api.quantities import size

_PAGE = 200
PageT = TypeVar("PageT", JobList, StoragePage)


def all_jobs(client: Client) -> list[Job]:
    """Every job the server knows."""
    return [job for page in _pages(client.jobs) for job in page.items]


def _pages(read: Callable[..., PageT]) -> Iterator[PageT]:
    page = read(limit=_PAGE)
    yield page
    while page.next_cursor is not None:
        page = read(limit=_PAGE, cursor=page.next_cursor)
        yield page


def measured_by(client: Client) -> tuple[StorageUsage, StoragePage]:
    """What the server has measured, as it would be measured here but for the names of files; and the last page."""
    pages = list(_pages(client.storage))
    jobs = {job.job_id: job for page in pages for job in page.items}
    decisions = tuple(
        RemovalDecision(item=StoredItem(job_id=job.job_id, kind=held.kind, name=held.name, size_bytes=held.size_bytes,
                                        files=()), removable=held.removable, reason=held.reason)
        for job in jobs.values() for held in job.files)
    return StorageUsage(decisions=decisions, total_bytes=sum(job.size_bytes for job in jobs.values()),
                        removable_bytes=sum(job.removable_bytes for job in jobs.values())), pages[-1]


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
