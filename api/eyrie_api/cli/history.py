"""An endpoint's history as a table: one row per entry, the checks below a decision, the command to accept an offer.

There are many windows, and one alone says little: of consecutive ones only the latest is shown unless all are
requested.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.v1alpha1.history import History, HistoryEntry
from eyrie_api.v1alpha1.reports import PromotionDecision

_STYLE = {"rejected": "bold red", "rolled-back": "yellow", "drift": "yellow", "activated": "green", "canary": "cyan",
          "window": "dim"}


def history_view(history: History, endpoint: str, server: str, *, every_window: bool = False) -> RenderableType:
    """The entries, oldest first."""
    if not history.items:
        return Text(f"No history of endpoint {endpoint} yet.")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("TIME", "KIND", "REVISION", "ACTOR", "REASON"):
        table.add_column(name, justify="right" if name == "REVISION" else "left")
    items = history.items if every_window else _thinned(history.items)
    for entry in items:
        why = Text(f"{entry.reason}: {entry.message}" if entry.message else entry.reason)
        for line in _checks(entry):
            why.append("\n").append(line)
        table.add_row(entry.time.astimezone().strftime("%m-%d %H:%M:%S"),
                      Text(entry.kind, _STYLE.get(entry.kind, "")), "-" if entry.revision is None else
                      str(entry.revision), entry.actor, why)
    parts: list[RenderableType] = [table]
    if history.next_before is not None:
        parts.append(Text("older entries: --limit, or GET .../history?before="
                          f"{history.next_before}", "dim"))
    if any("job" in entry.data for entry in items):
        parts.append(Text("\nAccept the latest offer to retrain on recent traffic:\n"
                          f"  eyrie endpoints history {endpoint} --kind drift --json | jq '.items[-1].data.job' | "
                          f"curl -d @- -H 'content-type: application/json' {server}/v1alpha1/jobs"))
    return Group(*parts)


def _thinned(items: tuple[HistoryEntry, ...]) -> list[HistoryEntry]:
    """Without windows directly followed by another window of the same revision."""
    following = [*items[1:], None]
    return [entry for entry, after in zip(items, following, strict=True)
            if entry.kind != "window" or after is None or (after.kind, after.revision) != ("window", entry.revision)]


def _checks(entry: HistoryEntry) -> list[Text]:
    if "decision" not in entry.data:
        return []
    decision = PromotionDecision.model_validate(entry.data["decision"])
    return [Text(f"{'ok ' if check.passed else 'NO '} {check.name}: {check.words}", "" if check.passed else "bold red")
            for check in decision.checks]
