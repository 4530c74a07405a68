"""Contract values as tables and panels: pure functions of the value and the present time.

Columns are chosen so that a usual row fits 80 characters; a narrower terminal wraps the last column first. Numbers
carry their setting: a tau never stands without its draft tree.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import zip_longest

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.contract.alerts import AlertItem
from eyrie_api.contract.endpoints import History
from eyrie_api.contract.model import Interval
from eyrie_api.contract.plan import Plan, PlannedAndActual, PlannedStages, TimeLeft
from eyrie_api.contract.reports import LeaderboardEntry, PromotionDecision
from eyrie_api.contract.stages import STAGES
from eyrie_api.contract.status import (
    Condition,
    Endpoint,
    Event,
    Job,
    MetricSeries,
    Progress,
    Revision,
    StageState,
    StageStatus,
)
from eyrie_api.decisions.promotion import summarize_decision
from eyrie_api.planning.sweep import axes_words
from eyrie_api.quantities import duration, size

STATE_STYLE = {
    "Pending": "dim", "Running": "cyan", "Succeeded": "green", "Failed": "bold red", "Cancelled": "yellow",
    "Cancelling": "yellow", "Skipped": "dim",
}


def count(number: float) -> str:
    """A count with thousands separated by thin commas, or in millions and billions when large."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(number) >= limit:
            return f"{number / limit:.2f}{suffix}"
    return f"{number:,.0f}"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def ago(time: datetime, now: datetime) -> str:
    return f"{duration((now - time).total_seconds())} ago"


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # The last column is the talkative one: on a narrow terminal it alone wraps, as long as that suffices.
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column != columns[-1])
    return table


def jobs_table(jobs: Sequence[Job], now: datetime) -> RenderableType:
    if not jobs:
        return Text("No jobs yet. Start one: eyrie train --target <model> --data <chats.jsonl>")
    table = _table("ID", "NAME", "PHASE", "STAGE", "SPEED-UP", "AGE", "TARGET", right=("SPEED-UP", "AGE"))
    for job in jobs:
        best = job.status.best
        first = {stage.state: stage.stage for stage in reversed(job.status.stages)}  # the first stage in each state
        table.add_row(job.id, job.spec.name or "-", Text(job.status.phase, STATE_STYLE[job.status.phase]),
                      first.get("Running") or first.get("Failed", "-"), times(best.speedup if best else None),
                      duration((now - job.created_at).total_seconds()), short_target(job.spec.target.model))
    return table


def short_target(model: str) -> str:
    """The last part of a path or Hub id."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def alerts_view(items: Sequence[AlertItem], now: datetime) -> RenderableType:
    """What needs a person: a title, what was seen, what to do."""
    if not items:
        return Text("Nothing needs a person.")
    text = Text()
    for item in items:
        text.append(f"{item.title}\n", "bold")
        text.append(f"  {item.message}" + (f" ({ago(item.since, now)})" if item.since else "") + "\n")
        if item.hint:
            text.append("  hint: ", "bold green").append(f"{item.hint}\n")
    text.right_crop(1)
    return text


def job_view(job: Job, now: datetime, left: TimeLeft | None = None) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold")
    head.add_column()
    head.add_row("job", job.id + (f"  ({job.spec.name})" if job.spec.name else ""))
    head.add_row("phase", Text(job.status.phase, STATE_STYLE[job.status.phase]))
    head.add_row("target", f"{job.spec.target.model} ({job.spec.target.dtype})")
    head.add_row("created", ago(job.created_at, now))
    if left is not None:
        head.add_row("time left", f"about {duration(left.seconds)}" + (
            "" if left.low is None else f" ({duration(left.low)} to {duration(left.high)})"))
    if job.status.attempt > 1:
        head.add_row("attempt", str(job.status.attempt))
    if job.status.best is not None:
        head.add_row("best", entry_line(job.status.best))
    if job.status.decision is not None:
        head.add_row("decision", decision_line(job.status.decision))
    if job.status.endpoint is not None:
        head.add_row("endpoint", job.status.endpoint)
    stages = _table("STAGE", "KEY", "STATE", "TIME", "PROGRESS", right=("TIME",))
    for stage in in_order(job.status.stages):
        stages.add_row(stage.stage, stage.key or "-", Text(stage.state, STATE_STYLE[stage.state]),
                       duration(stage_seconds(stage, now)), progress_text(stage.progress, stage.state))
    parts: list[RenderableType] = [
        head, Text(), stages if job.status.stages else Text("No stage has started yet.", "dim")]
    parts += [failure_text(stage) for stage in job.status.stages if stage.state == "Failed" or stage.reason]
    if job.status.conditions:
        parts += [Text(), conditions_table(job.status.conditions, now)]
    return Group(*parts)


def in_order(stages: Sequence[StageStatus]) -> list[StageStatus]:
    """In the pipeline's order; keys with numbers in them by those numbers."""
    return sorted(stages, key=lambda stage: (
        STAGES.index(stage.stage), [(part.isdigit() and int(part), part) for part in re.split(r"(\d+)", stage.key)]))


def stage_seconds(stage: StageStatus, now: datetime) -> float | None:
    """How long it ran, or has run."""
    if stage.started_at is None:
        return None
    return ((stage.finished_at or now) - stage.started_at).total_seconds()


def progress_text(progress: Progress | None, state: StageState) -> str:
    """Done of total, rate and time left."""
    if progress is None:
        return ""
    words = f"{count(progress.done)}"
    if progress.total is not None:
        words += f"/{count(progress.total)}"
    words += f" {progress.unit}".rstrip()
    if progress.rate is not None:
        words += f", {progress.rate:,.1f}/s"
    if state == "Running" and progress.eta_s is not None:
        words += f", {duration(progress.eta_s)} left"
    return f"{words}, {progress.message}" if progress.message else words


def failure_text(stage: StageStatus) -> RenderableType:
    """Why a stage failed, or why its pod has no node, and what to do."""
    key = f" {stage.key}" if stage.key else ""
    label = ("error: ", "bold red") if stage.state == "Failed" else ("waits: ", "bold yellow")
    text = Text.assemble(label, f"{stage.stage}{key}: {stage.reason or 'Failed'}: ",
                         stage.message or "no message")
    if stage.hint:
        text.append("\nhint:  ", "bold green").append(stage.hint)
    return text


def conditions_table(conditions: Sequence[Condition], now: datetime) -> RenderableType:
    table = _table("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE", right=("SINCE",))
    for condition in conditions:
        table.add_row(condition.type, condition.status, condition.reason,
                      duration((now - condition.last_transition_time).total_seconds()), condition.message)
    return table


def entry_line(entry: LeaderboardEntry) -> str:
    """One measured checkpoint in a sentence."""
    tree = entry.tree
    shape = "no drafter" if tree is None else (
        f"depth {tree.num_steps}, top-k {tree.top_k}, {tree.num_draft_tokens} draft tokens")
    return (f"{entry.checkpoint}: {times(entry.speedup)} "
            f"(greedy {times(entry.speedup_greedy)}, sampled {times(entry.speedup_sampled)}), "
            f"tau {entry.tau:.2f} at {shape}{'' if entry.lossless else ', NOT lossless'}")


def decision_line(decision: PromotionDecision) -> str:
    """The verdict with what decided it."""
    return f"{'undecided, ' * decision.undecided}{decision.verdict}: {summarize_decision(decision)}"


def leaderboard_table(entries: Sequence[LeaderboardEntry]) -> RenderableType:
    """Measured checkpoints, best first."""
    if not entries:
        return Text("Nothing has been measured yet.")
    is_swept = any(entry.axes for entry in entries)
    table = _table("#", "CHECKPOINT", *(("SWEEP",) if is_swept else ()), "FAMILY", "SPEED-UP", "95 %", "GREEDY",
                   "SAMPLED", "AT ONCE", "TAU", "DEPTH/K/TOKENS", "TOK/S", "LOSSLESS", "TARGET", "JOB",
                   right=("#", "SPEED-UP", "95 %", "GREEDY", "SAMPLED", "TAU", "TOK/S"))
    for entry in entries:
        # One at a time is the column before.
        at_once = ", ".join(f"{concurrency}: {times(speedup)}"
                            for concurrency, speedup in entry.speedup_by_concurrency.items() if concurrency > 1)
        table.add_row(str(entry.rank), entry.checkpoint + (" (tuned)" if entry.tuned else ""),
                      *((axes_words(entry.axes) or "-",) if is_swept else ()),
                      entry.family + (", not trained here" if entry.rival else ""),
                      times(entry.speedup),
                      f"{entry.speedup_interval.low:.2f}-{entry.speedup_interval.high:.2f}"
                      if entry.speedup_interval else "-", times(entry.speedup_greedy),
                      times(entry.speedup_sampled), at_once or "-",
                      f"{entry.tau:.2f}", "-" if entry.tree is None else entry.tree.label(),
                      f"{entry.tokens_per_s:.0f}",
                      Text("yes", "green") if entry.lossless else Text("NO", "bold red"),
                      short_target(entry.target), entry.job_id)
    return table


def endpoints_table(endpoints: Sequence[Endpoint]) -> RenderableType:
    """One line per endpoint, with what it serves."""
    if not endpoints:
        return Text("No endpoints yet: a job creates one when it promotes a drafter.")
    table = _table("NAME", "STATE", "MODEL", "SERVES", "REVISION", "URL", right=("REVISION",))
    for endpoint in endpoints:
        active = endpoint.revision(endpoint.active_revision)
        number = "-" if endpoint.active_revision is None else str(endpoint.active_revision)
        state = Text("off", "dim") if endpoint.desired == "off" else Text("starting", "yellow") \
            if endpoint.active_revision is None or endpoint.url is None else Text("on", "green")
        table.add_row(endpoint.name, state, endpoint.model, revision_words(active), number, endpoint.url or "-")
    return table


def endpoint_view(endpoint: Endpoint, now: datetime) -> RenderableType:
    table = _table("REVISION", "SERVES", "SPEED-UP", "TAU", "AGE", "WHY", right=("REVISION", "SPEED-UP", "TAU"))
    for revision in endpoint.revisions:
        mark = "*" if revision.number == endpoint.active_revision else ""
        table.add_row(f"{mark}{revision.number}", revision_words(revision), times(revision.speedup),
                      "-" if revision.tau is None else f"{revision.tau:.2f}",
                      duration((now - revision.created_at).total_seconds()), revision.reason)
    parts: list[RenderableType] = [endpoints_table([endpoint]), Text(), table]
    if endpoint.conditions:
        parts += [Text(), conditions_table(endpoint.conditions, now)]
    return Group(*parts)


def revision_words(revision: Revision | None) -> str:
    if revision is None:
        return "-"
    if revision.checkpoint is None:
        return "target alone"
    return f"{revision.checkpoint} {revision.tree.label() if revision.tree else ''}".rstrip()


def plan_view(plan: Plan) -> RenderableType:
    """What a job will cost, and what the numbers rest on."""
    on_gpus = any(stage.num_gpus for stage in plan.stages)
    heads = ["TOKENS", "DISK", "TIME", *(["RANGE", "GPUS", "GPU HOURS", "COST"] if on_gpus else [])]
    table = _table("STAGE", *heads, *(["BOUND BY"] if on_gpus else []), right=tuple(heads))
    for stage in plan.stages:
        cells = [f"{stage.stage} {stage.key}".rstrip(), count(stage.tokens), size(stage.bytes_on_disk),
                 duration(stage.hours * 3600)]
        if on_gpus:
            seen = stage.hours_range
            cells += ["-" if seen is None else f"{duration(seen.low * 3600)} - {duration(seen.high * 3600)}",
                      f"{stage.num_gpus} {stage.gpu_type}" if stage.num_gpus else "-", f"{stage.gpu_hours:,.1f}",
                      "-" if stage.cost is None else f"{stage.cost:,.0f}", stage.bound_by]
        table.add_row(*cells)
    totals = ["total", count(plan.total_tokens), size(plan.total_bytes_on_disk), duration(plan.total_hours * 3600)]
    if on_gpus:
        totals += ["", "", f"{plan.total_gpu_hours:,.1f}",
                   "-" if plan.total_cost is None else f"{plan.total_cost:,.0f}", ""]
    table.add_row(*totals, style="bold")
    assumed = _table("ASSUMED", "VALUE", "FROM", right=("VALUE",))
    for assumption in plan.assumptions:
        assumed.add_row(assumption.name, f"{assumption.value:,.6g} {assumption.unit}".rstrip(), assumption.source)
    per_token = Text(f"\n{plan.bytes_per_token:,} bytes of hidden states per token\n")
    hints = [Text(f"{stage.stage}: {stage.hint}") for stage in plan.stages if stage.hint]
    parts: list[RenderableType] = [table, Text(plan.bottleneck), *hints, per_token, *_store_view(plan), assumed]
    if plan.candidate_rows:  # the rows of each source that every candidate trains on
        sources = tuple(dict.fromkeys(name for rows in plan.candidate_rows.values() for name in rows))
        columns = (*(f"ROWS OF {name}" for name in sources), "ROWS")
        mixes = _table("CANDIDATE", *columns, right=columns)
        for candidate, rows in plan.candidate_rows.items():
            mixes.add_row(candidate, *(count(rows.get(name, 0)) for name in sources), count(sum(rows.values())))
        parts.append(mixes)
    parts += _needed_tau_view(plan)
    parts += [Text(f"warning: {warning}", "yellow") for warning in plan.warnings]
    parts += [Text(note) for note in plan.notes]
    if plan.serving is not None:
        parts.append(Text(f"serving: {plan.serving.words}"))
    if plan.fits_disk is False:
        parts.append(Text("This does not fit the free disk space.", "bold red"))
    if not plan.possible:
        parts.append(Text("Such a job is refused: see the warnings.", "bold red"))
    return Group(*parts)


def _needed_tau_view(plan: Plan) -> list[RenderableType]:
    """One line per number of users; empty where nothing is trained."""
    if not plan.needed_tau:
        return []
    depths = tuple(dict.fromkeys(f"DEPTH {row.num_steps}" for row in plan.needed_tau))
    table = _table("TAU NEEDED", *depths, right=depths)
    by_users: dict[int, list[str]] = {}
    for row in plan.needed_tau:
        by_users.setdefault(row.users, []).append("-" if row.tau is None else f"{row.tau:.2f}")
    for users, cells in by_users.items():
        table.add_row(f"{users} user{'s' if users > 1 else ''}", *cells)
    how = "Predicted" if plan.timed_by is None else f"Timed by job {plan.timed_by}"
    return [Text(), table, Text(f"{how}: tokens per target pass that make a chain of that depth pay; "
                                "-: none does, speculation loses\n")]


def planned_words(planned: PlannedStages) -> str:
    """What an accepted job will take, in a line: time with its range on GPUs, disk, GPU hours, the longest stage."""
    stages = planned.stages
    total = sum(stage.hours for stage in stages)
    ranges = [stage.hours_range for stage in stages if stage.hours_range is not None]
    ends = ""
    if len(ranges) == len(stages):
        low, high = sum(stage.low for stage in ranges), sum(stage.high for stage in ranges)
        ends = f" ({duration(3600 * low)} to {duration(3600 * high)})"
    gpu_hours = sum(stage.gpu_hours for stage in stages)
    longest = max(stages, key=lambda stage: stage.hours)
    return (f"planned: {duration(3600 * total)}{ends}, {size(sum(stage.bytes_on_disk for stage in stages))} on disk"
            + (f", {gpu_hours:,.1f} GPU hours" if gpu_hours else "")
            + (f"; {longest.stage} takes {longest.hours / total:.0%}" if total else "") + "; eyrie plan has the rest")


def calibration_view(compared: PlannedAndActual) -> RenderableType:
    """Planned and actual time by stage, and the settings that would have made them equal."""
    table = _table("STAGE", "PLANNED", "TOOK", "RATIO", right=("PLANNED", "TOOK", "RATIO"))
    for row in compared.stages:
        planned, took = (None if seconds is None else duration(seconds)
                         for seconds in (row.planned_seconds, row.seconds))
        table.add_row(row.stage, planned or "-", (took or "-") + (" so far" if row.is_running else ""),
                      times(row.time_ratio))
    settings = [f"{name}={value:g}" for name, value in compared.rates.items()]
    said = ("Plans follow these times when the control plane starts with:", *settings) if settings else (
        "No stage on CPUs has finished; rates of GPUs are published ones.",)
    return Group(table, Text(), *map(Text, said))


def _store_view(plan: Plan) -> list[RenderableType]:
    """The use of the object store by stage, and its cost; empty without an object store."""
    uses = [(f"{stage.stage} {stage.key}".rstrip(), stage.store) for stage in plan.stages if stage.store is not None]
    if not uses:
        return []
    heads = ("OBJECTS", "WRITES", "READS", "BYTES READ", "COST", "RANGE")
    table = _table("OBJECT STORE", *heads, right=heads)
    for name, use in uses:
        table.add_row(name, count(use.objects), count(use.put_requests), count(use.get_requests), size(use.read_bytes),
                      _money(use.cost), _money_range(use.cost_range))
    table.add_row("total", *(count(sum(getattr(use, field) for _, use in uses))
                             for field in ("objects", "put_requests", "get_requests")),
                  size(sum(use.read_bytes for _, use in uses)), _money(plan.total_store_cost),
                  _money_range(plan.total_store_cost_range), style="bold")
    if plan.store_month_cost is None:
        return [table, Text("The prices of the object store are not known: set EYRIE_STORE_PRICES\n")]
    return [table, Text(f"{_money(plan.store_month_cost)} for each month that the files stay after the job\n")]


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _money_range(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.low:,.2f} - {interval.high:,.2f}"


def event_text(event: Event) -> Text:
    where = f"{event.stage}{'/' + event.key if event.key else ''} " if event.stage else ""
    style = "yellow" if event.type == "Warning" else ""
    return Text.assemble((event.time.astimezone().strftime("%H:%M:%S "), "dim"), (where, "cyan"), (event.reason, style),
                         ": ", event.message)


def series_table(series: Sequence[MetricSeries]) -> RenderableType:
    """Logged quantities: where each stands, and its course in one line."""
    if not series:
        return Text("No metrics yet: they are logged while a drafter trains.")
    table = _table("SERIES", "STAGE", "KEY", "STEP", "LAST", "COURSE", right=("STEP", "LAST"))
    for line in series:
        last = line.points[-1] if line.points else None
        table.add_row(line.name, line.stage, line.key or "-", str(last.step) if last else "-",
                      f"{last.value:.4g}" if last else "-", sparkline([point.value for point in line.points]))
    return table


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The course of a series in `width` characters, each the mean of its share; ASCII, lowest `_` to highest `#`."""
    if not values:
        return ""
    levels = "_.-:=+*#"
    width = min(width, len(values))
    shares = [values[i * len(values) // width:(i + 1) * len(values) // width] for i in range(width)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(levels[min(len(levels) - 1, int((mean - low) / span * len(levels)))] for mean in means)


_STYLE = {"rejected": "bold red", "rolled-back": "yellow", "drift": "yellow", "activated": "green", "canary": "cyan",
          "window": "dim"}


def history_view(history: History, endpoint: str, server: str, *, every_window: bool = False) -> RenderableType:
    """The entries, oldest first."""
    if not history.items:
        return Text(f"No history of endpoint {endpoint} yet.")
    table = _table("TIME", "KIND", "REVISION", "ACTOR", "REASON", right=("REVISION",))
    # Without windows that are followed directly by another window of the same revision.
    items = [entry for entry, after in zip_longest(history.items, history.items[1:])
             if every_window or entry.kind != "window" or after is None
             or (after.kind, after.revision) != ("window", entry.revision)]
    for entry in items:
        why = Text(f"{entry.reason}: {entry.message}" if entry.message else entry.reason)
        decision = entry.data.get("decision")
        for check in PromotionDecision.model_validate(decision).checks if decision is not None else ():
            why.append(f"\n{'ok ' if check.passed else 'NO '} {check.name}: {check.words}",
                       "" if check.passed else "bold red")
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
                          "curl -d @- -H 'content-type: application/json' "
                          f'-H "Authorization: Bearer $EYRIE_TOKEN" {server}/v1alpha1/jobs'))
    return Group(*parts)
