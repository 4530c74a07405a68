"""`eyrie storage`: what jobs hold and what may go, as a table; the pages of jobs it rests on."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.artifacts.storage_usage import Storage
from eyrie_api.cli.tables import size
from eyrie_api.client import Client
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


def storage_view(storage: Storage, freed: int | None) -> RenderableType:
    """The largest first; records of all jobs in one line."""
    table = Table(box=None, pad_edge=False)
    for name in ("JOB", "WHAT", "SIZE", "GOES", "WHY"):
        table.add_column(name, justify="right" if name == "SIZE" else "left", overflow="fold")
    told = [one for one in storage.findings if one.holding.kind != "record"]
    for one in sorted(told, key=lambda one: -one.holding.size_bytes):
        table.add_row(one.holding.job_id, " ".join(filter(None, (one.holding.kind, one.holding.name))),
                      size(one.holding.size_bytes), "yes" if one.removable else "no", one.reason)
    records = sum(one.holding.size_bytes for one in storage.findings if one.holding.kind == "record")
    table.add_row("(all)", "records", size(records), "no", "records are small and stay")
    end = f"{size(storage.total_bytes)} held; " + (
        f"{size(freed)} removed" if freed is not None else
        f"{size(storage.removable_bytes)} may go: eyrie storage --clean")
    return Group(table, Text(end, "bold"))
