"""`eyrie storage`: the files that jobs hold and which may be removed, as a table."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.artifacts.storage_usage import StorageUsage
from eyrie_api.client import Client
from eyrie_api.quantities import size
from eyrie_api.v1alpha1.status import Job

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
    shared = [Text(f"{job}: its answers are read by {', '.join(found)}") for job, found in readers.items()]
    return Group(table, *shared, Text(end, "bold"))
