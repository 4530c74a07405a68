"""The figures of a job.

`figures_of` takes the job's report and returns a figure for each question that it has data for. A figure's `spec` is
Vega-Lite; its inline rows are everything that is drawn, so that a table of them says the same.

Intervals are 95 % and drawn as lines through the point. Off, decoding without speculation, is the line at 1.
"""

from collections.abc import Sequence
from statistics import median

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.figures import Figure
from eyrie_api.contract.hardware import HardwareReport
from eyrie_api.contract.load import LoadReport
from eyrie_api.contract.model import Interval
from eyrie_api.contract.reports import BenchmarkReport, LeaderboardEntry, TuneReport
from eyrie_api.contract.status import JobReport
from eyrie_api.contract.tuning import OFF, OperatingMap, Trial
from eyrie_api.errors import NotFound
from eyrie_api.figures.vega_lite import INK, Row, figure, layer, layered, number, ordinal, points, rounded, series, tips

_MOST_SETTINGS = 5  # lines over concurrency; more are not distinguishable
_TAU = "acceptance length tau (tokens per target pass)"
_SPEEDUP = "speed-up over no drafter"


def figures_of(report: JobReport, selected: str = "") -> tuple[Figure, ...]:
    """Every figure there is data for.

    selected   what the leaderboard of the report is restricted to, for its caption: suite math, temperature 1
    """
    measured = [benchmark for benchmark in report.benchmark if benchmark.cells]
    figures = []
    if report.leaderboard:
        figures.append(leaderboard(report.leaderboard, selected))
    if measured:
        figures.append(throughput(measured))
    if measured or (report.tune and report.tune.cells):
        figures.append(tau_against_throughput(measured, report.tune))
    if report.tune:
        if shapes_of(report.tune):
            figures.append(tuning(report.tune))
        if report.tune.map is not None:
            figures.append(operating_map(report.tune.map, report.tune.trials))
        if report.tune.needed_tau:
            figures.append(needed_tau(report.tune))
    if report.prove and report.prove.load and any(level.mode == "closed" for level in report.prove.load.levels):
        figures.append(pareto(report.prove.load, report.devices_per_server))
    if report.hardware and report.hardware.rows:
        figures.append(hardware(report.hardware))
    return tuple(figures)


def figure_of(report: JobReport, name: str, selected: str = "") -> Figure:
    """One figure by name. Raises NotFound when the job has no data for it."""
    figures: dict[str, Figure] = {shown.name: shown for shown in figures_of(report, selected)}
    if name not in figures:
        available = f"it has {', '.join(figures)}" if figures else "it has none yet"
        raise NotFound(f"job {report.job_id} has no figure {name!r}",
                       f"{available}: figures appear when the benchmark, tune and prove stages finish")
    return figures[name]


def leaderboard(entries: Sequence[LeaderboardEntry], selected: str = "") -> Figure:
    """Mean speed-up of every entry with its interval, in the order of the leaderboard. There are entries."""
    rows = [{"rank": entry.rank, "checkpoint": f"{entry.checkpoint} (tuned)" if entry.tuned else entry.checkpoint,
             "family": entry.family, "shape": entry.tree.label() if entry.tree else "no drafter",
             "tau": rounded(entry.tau), "speedup": rounded(entry.speedup), **_interval(entry.speedup_interval),
             "output": "identical" if entry.lossless else "changed"} for entry in entries]
    y = {"field": "checkpoint", "type": "nominal", "sort": [row["checkpoint"] for row in rows], "title": None}
    colour = series("family", rows)
    ranges = layer("rule", {"x": number("low", None), "x2": {"field": "high"}, "y": y,
                            "color": colour | {"legend": None}}, "datum.low !== null", strokeWidth=2)
    means = points(rows, {"x": number("speedup", _SPEEDUP), "y": y}, colour, 80)
    first, of = entries[0], f" of the selection ({selected})" if selected else ""
    span = first.speedup_interval
    between = "" if span is None else f" ({span.low:.2f} to {span.high:.2f})"
    return figure("leaderboard", f"{rows[0]['checkpoint']} leads with {first.speedup:.2f}x{between}",
                  f"Mean speed-up over all suites and temperatures{of}, one request at a time, with its 95 % interval, "
                  "best first and lossless ones before the others; no drafter is the line at 1.", rows,
                  layered([_off_line("x"), ranges, means], {"step": 30}))


def throughput(reports: Sequence[BenchmarkReport]) -> Figure:
    """Speed-up of every checkpoint in each suite, best average first. The reports have cells."""
    ranked = sorted(reports, key=lambda report: -report.speedup)
    rows = [{"checkpoint": report.checkpoint, "suite": cell.suite, "temperature": cell.temperature,
             "shape": cell.shape, "tau": rounded(cell.tau), "tau_of_new_text": rounded(cell.tau_of_new_text),
             "repeated_share": rounded(cell.repeated_share), "tokens_per_s": rounded(cell.tokens_per_s),
             "baseline_tokens_per_s": rounded(cell.baseline_tokens_per_s), "speedup": rounded(cell.speedup),
             **_interval(cell.speedup_interval), "mean_speedup": rounded(report.speedup)}
            for report in ranked for cell in report.cells]
    y = {"field": "checkpoint", "type": "nominal", "sort": [report.checkpoint for report in ranked], "title": None}
    down = {"y": y, "yOffset": {"field": "suite", "type": "nominal", "sort": None}}
    colour = series("suite", rows)
    layers = [_off_line("x"),
              layer("rule", down | {"x": number("low", None), "x2": {"field": "high"}, "color": colour}, strokeWidth=2),
              layer("tick", {"x": {"aggregate": "mean", "field": "mean_speedup", "type": "quantitative"}, "y": y},
                    thickness=3, size=34, style=INK),
              points(rows, down | {"x": number("speedup", _SPEEDUP)}, colour)]
    body: Row = {"facet": {"row": {"field": "temperature", "type": "ordinal", "title": None,
                                   "header": {"labelExpr": "'temperature ' + datum.value", "labelOrient": "top",
                                              "labelAnchor": "start", "labelAngle": 0}}},
                 "spec": {"height": {"step": max(34, 12 * len({row["suite"] for row in rows})), "for": "position"},
                          "width": 480, "layer": layers}}
    best = ranked[0]
    return figure("throughput", f"{best.checkpoint} is {best.speedup:.2f}x as fast as no drafter, on average",
                  "Speed-up over the same engine without a drafter, one request at a time: a point with its 95 % "
                  "interval per suite, and the bar of each row is the mean over suites and temperatures; no drafter "
                  "is the line at 1.",
                  rows, body)


def tau_against_throughput(reports: Sequence[BenchmarkReport], tune: TuneReport | None) -> Figure:
    """Acceptance length against tokens per second: every cell of every checkpoint, every shape that was tuned."""
    rows: list[Row] = []
    for report in reports:
        rows += [{"kind": "checkpoint, greedy" if cell.temperature == 0 else "checkpoint, sampled",
                  "what": f"{report.checkpoint}, {cell.suite}", "shape": cell.shape, "tau": rounded(cell.tau),
                  "tokens_per_s": rounded(cell.tokens_per_s), "speedup": rounded(cell.speedup)}
                 for cell in report.cells]
    for cell in tune.cells if tune else ():
        rows.append({"kind": "chain of the tuner" if cell.tree.top_k == 1 else "tree of the tuner",
                     "what": tune.checkpoint if tune else "", "shape": cell.tree.label(), "tau": rounded(cell.tau),
                     "tokens_per_s": rounded(cell.tokens_per_s), "speedup": rounded(cell.speedup)})
    kinds, across = series("kind", rows), {"x": number("tau", _TAU), "y": number("tokens_per_s", "tokens per second")}
    body = {"width": 520, "height": 320} | layer("point", across | {
        "color": kinds, "shape": kinds, "tooltip": tips(rows)}, filled=True, size=70, opacity=0.85)
    return figure("tau-throughput", "Acceptance length against throughput",
                  "One request at a time: points that lie lower at the same tau spend more on drafting and verifying; "
                  "checkpoints and shapes were measured in separate runs on other prompts.", rows, body)


def tuning(report: TuneReport) -> Figure:
    """Speed-up by depth and width at the lowest load, one panel per number of draft tokens."""
    shown = shapes_of(report)
    speedups = [speedup for _, speedup, _, _ in shown]
    middle = (min(speedups) + max(speedups)) / 2
    rows = [{"panel": f"trees of {tree.num_draft_tokens} tokens" if tree.top_k > 1 else "chains" + (
                 "" if tree.verification == "target" else f", {tree.verification}")
             + tree.draft.label().replace("/", ", "),
             **{name: getattr(tree, name) for name in ("num_steps", "top_k", "num_draft_tokens")},
             "speedup": rounded(speedup), "tau": rounded(tau),
             "known_by": "measurement" if measured else "prediction", "winner": tree == report.winner,
             "label": f"{speedup:.2f}x" if measured else f"({speedup:.2f}x)"}
            for tree, speedup, tau, measured in sorted(
                shown, key=lambda shape: (shape[0].top_k > 1, shape[0].num_draft_tokens))]
    across = {"x": ordinal("top_k", "top_k"),
              "y": {"field": "num_steps", "type": "ordinal", "title": "num_steps"}}
    cells, best = _map_cells(across, "speedup", _SPEEDUP, rows), _map_frame(across, "winner")
    labels = layer("text", across | {
        "text": {"field": "label"},
        # The cell is dark below the middle of the scale, on either background.
        "color": {"condition": {"test": f"datum.speedup < {middle}", "value": "#ffffff"}, "value": "#000000"}},
                   fontSize=12)
    body: Row = {"facet": {"field": "panel", "type": "nominal", "sort": list(dict.fromkeys(r["panel"] for r in rows)),
                           "title": None, "header": {"labelFontSize": 12}},
                 "columns": 2, "resolve": {"scale": {"x": "independent"}, "axis": {"y": "independent"}},
                 "spec": {"width": {"step": 62}, "height": {"step": 30}, "layer": [cells, best, labels]}}
    fast = next((f": {speedup:.2f}x at tau {tau:.1f}" for tree, speedup, tau, _ in shown if tree == report.winner), "")
    return figure("tuning", f"{report.winner.label()} is the drafter's best shape{fast}",
                  "Lowest load, mean over temperatures: figures in brackets are predicted, the others measured; the "
                  "frame is the best shape, and a chain verifies num_steps + 1 tokens.", rows, body)


def operating_map(chart: OperatingMap, trials: Sequence[Trial]) -> Figure:
    """Speed-up over off by load: the settings that the map chooses, and the best of the others."""
    chosen = list(dict.fromkeys(point.setting for point in chart.points if point.setting != OFF))
    others = sorted((trial for trial in trials if trial.speedup is not None), key=lambda trial: -(trial.speedup or 0.0))
    shown = [*dict.fromkeys([*chosen, *(trial.setting for trial in others if trial.setting != OFF)])][:_MOST_SETTINGS]
    choice = {(point.setting, point.concurrency): point for point in chart.points}
    tried = {(trial.setting, trial.concurrency): trial for trial in trials}
    rows: list[Row] = []
    for setting, concurrency in [key for key in dict.fromkeys((*tried, *choice)) if key[0] in (*shown, OFF)]:
        trial, point = tried.get((setting, concurrency)), choice.get((setting, concurrency))
        rows.append({
            "concurrency": concurrency, "setting": setting.label(), "chosen": point is not None,
            "predicted": rounded(1.0 if setting == OFF else trial.predicted_speedup) if trial else None,
            "measured": rounded(trial.speedup) if trial else None,
            **_interval(trial.speedup_interval if trial else None),
            "combined": rounded(point.speedup) if point else None})
    rows.sort(key=lambda row: (row["concurrency"], row["setting"]))
    x = ordinal("concurrency", "requests decoded at once")
    labels = ["off", *(setting.label() for setting in shown)]
    colour = series("setting", [{"setting": label} for label in labels])
    no_legend = colour | {"legend": None}
    layers = [
        _off_line("y"),
        layer("line", {"x": x, "y": number("predicted", None), "color": no_legend}, "datum.predicted !== null",
              strokeDash=[5, 4], strokeWidth=1.5),
        layer("rule", {"x": x, "y": number("low", None), "y2": {"field": "high"}, "color": no_legend},
              "datum.low !== null", strokeWidth=2),
        points(rows, {"x": x, "y": number("measured", "tokens/s over no speculation")}, colour, 80,
               "datum.measured !== null"),
        layer("point", {"x": x, "y": number("combined", None)}, "datum.chosen", size=320, filled=False, strokeWidth=2,
              style=INK)]
    if chart.crossover is not None and any(row["concurrency"] == chart.crossover for row in rows):
        here: Row = {"transform": [{"filter": f"datum.concurrency === {chart.crossover}"},
                                   {"aggregate": [], "groupby": ["concurrency"]}]}
        layers += [here | layer("rule", {"x": x}, strokeDash=[2, 3], strokeWidth=1.5),
                   here | layer("text", {"x": x, "y": {"value": 0}}, align="right", dx=-5, dy=10, text="crossover")]
    pays = ("Speculation pays at every load examined" if chart.crossover is None else
            f"Speculation stops paying at {chart.crossover} requests at once")
    return figure("operating-map", pays,
                  "Points are measured with 95 % intervals, dashed lines predicted, rings the map's choice for a load "
                  "(prediction and measurement combined); off is the line at 1.",
                  rows, layered(layers, 320))


def _map_cells(across: Row, value: str, title: str, rows: Sequence[Row]) -> Row:
    """Cells coloured by a field, with a tooltip."""
    colour = {"field": value, "type": "quantitative", "title": title,
              "scale": {"scheme": "viridis", "zero": False, "nice": False},
              "legend": {"orient": "bottom", "gradientLength": 200}}
    return layer("rect", across | {"color": colour, "tooltip": tips(rows)}, tooltip=True)


def _map_frame(across: Row, flag: str) -> Row:
    """A frame around the cells of which a field is true."""
    return layer("rect", across, f"datum.{flag}", fillOpacity=0, stroke="#d55e00", strokeWidth=4)


def needed_tau(report: TuneReport) -> Figure:
    """The tau that a chain needs by users and depth, and the drafter's own. The report has needed taus."""
    rows = []
    for row in report.needed_tau:
        tau, measured = report.chain_tau(row.users, row.num_steps)
        own = "" if tau is None else f"{tau:.2f}" if measured else f"({tau:.2f})"
        rows.append({"users": row.users, "num_steps": row.num_steps, "needed_tau": rounded(row.tau),
                     "tau": rounded(tau), "known_by": "measurement" if measured else "prediction",
                     "enough": row.tau is not None and tau is not None and tau >= row.tau,
                     "label": f"{'none' if row.tau is None else f'{row.tau:.2f}'}\n{own}"})
    needed = [row.tau for row in report.needed_tau if row.tau is not None]
    middle = (min(needed, default=1.0) + max(needed, default=1.0)) / 2
    across = {"x": ordinal("users", "requests decoded at once"),
              "y": {"field": "num_steps", "type": "ordinal", "title": "num_steps of a chain"}}
    cells = _map_cells(across, "needed_tau", "tau needed", rows) | {
        "transform": [{"filter": "datum.needed_tau !== null"}]}
    enough = _map_frame(across, "enough")
    labels = layer("text", across | {
        "text": {"field": "label"},
        # A cell is dark below the middle of the scale, on either background; without one is the page.
        "color": {"condition": [
            {"test": f"datum.needed_tau !== null && datum.needed_tau < {middle}", "value": "#ffffff"},
            {"test": "datum.needed_tau !== null", "value": "#000000"}]}},
                   fontSize=12, lineBreak="\n", baseline="middle", dy=-6, style=INK)
    loads = list(dict.fromkeys(row["users"] for row in rows))
    paying = {row["users"] for row in rows if row["enough"]}
    return figure("needed-tau", f"The drafter's tau is enough at {len(paying)} of {len(loads)} loads",
                  "Above, the acceptance length with which a chain would be fast enough for promotion.min_speedup, "
                  "from timed rounds (none: no tau of that depth is enough); below, the drafter's own, in brackets "
                  "where it is predicted; a frame marks where it is enough.", rows,
                  {"width": {"step": 72}, "height": {"step": 40}, "layer": [cells, enough, labels]})


def pareto(report: LoadReport, num_devices: int) -> Figure:
    """Throughput of a device against interactivity: one line per variant, one point per number of users. It has closed
    levels; `num_devices` are of each server."""
    levels = sorted((level for level in report.levels if level.mode == "closed"),
                    key=lambda level: (level.variant != "off", level.variant, level.level))
    ratios = {(ratio.variant, ratio.level): ratio for ratio in report.comparisons if ratio.mode == "closed"}
    rows = []
    for level in levels:
        against = ratios.get((level.variant, level.level))
        rows.append({"variant": level.variant, "users": int(level.level),
                     "tokens_per_s_per_user": rounded(level.total.tokens_per_s_per_user),
                     "tokens_per_s_per_device": rounded(level.total.tokens_per_s / num_devices),
                     "tokens_per_s": rounded(level.total.tokens_per_s),
                     "throughput_ratio": rounded(against.throughput_ratio) if against else None,
                     **_interval(against.throughput_interval if against else None),
                     "tau": rounded(level.total.tau)})
    gains = [ratio.throughput_ratio for ratio in ratios.values() if ratio.variant == "candidate"]
    title = "Throughput against interactivity"
    if gains:
        title += f": the candidate's throughput is {median(gains):.2f}x (median over loads)"
    return figure("pareto", title,
                  f"Of one server on {num_devices} {'device' if num_devices == 1 else 'devices'}: up is more tokens "
                  "for each GPU (or for the CPU), right is a faster answer for each user, and the figure at a point "
                  "is the number of users.",
                  rows, _throughput_and_interactivity(rows, "device"))


def hardware(report: HardwareReport) -> Figure:
    """Throughput of a device against interactivity: one line per profile and variant. It has rows."""
    rows = [{"variant": f"{row.profile}/{row.variant}", "users": int(row.users),
             "tokens_per_s_per_user": rounded(row.tokens_per_s_per_user),
             "tokens_per_s_per_device": rounded(row.tokens_per_s_per_device),
             "ttft_p50_s": rounded(row.ttft_p50_s), "money_per_million_tokens": rounded(row.money_per_million_tokens),
             "money_ratio": rounded(row.money_ratio), **_interval(row.money_interval)}
            for row in sorted(report.rows, key=lambda row: (row.profile, row.variant != "off", row.users))]
    cheapest = min(report.rows, key=lambda row: row.money_per_million_tokens)
    return figure("hardware", f"{cheapest.profile}, {cheapest.variant}, has the cheapest tokens: "
                  f"{cheapest.money_per_million_tokens:.3g} a million with {cheapest.users:g} users",
                  "Of one server per profile: up is more tokens for each GPU, right is a faster answer for each user, "
                  "and the figure at a point is the number of users; a row has its money per million tokens.",
                  rows, _throughput_and_interactivity(rows, "GPU"))


def _throughput_and_interactivity(rows: list[Row], device: str) -> Row:
    across = {"x": number("tokens_per_s_per_user", "tokens per second, one user (interactivity)"),
              "y": number("tokens_per_s_per_device", f"tokens per second of a {device} (throughput)")}
    users, colour = {"field": "users", "type": "quantitative"}, series("variant", rows)
    return {"width": 520, "height": 320, "layer": [
        layer("line", across | {"color": colour, "order": users}, strokeWidth=2), points(rows, across, colour, 80),
        layer("text", across | {"text": users}, dx=8, dy=-8, align="left", fontSize=11)]}


def shapes_of(report: TuneReport) -> list[tuple[DraftTreeShape, float, float, bool]]:
    """All shapes of the drafter at the lowest load, each with its speed-up and tau, measured where they were, predicted
    otherwise, and whether it was; in a report without trials, the measured ones."""
    if not report.trials:
        return [(cell.tree, cell.speedup, cell.tau, True) for cell in report.cells]
    lowest = min(trial.concurrency for trial in report.trials)
    return [(trial.setting.tree, trial.speedup if trial.speedup is not None else trial.predicted_speedup,
             trial.tau if trial.tau is not None else trial.predicted_tau, trial.speedup is not None)
            for trial in report.trials
            if trial.concurrency == lowest and trial.setting.method == "drafter" and trial.setting.tree is not None]


def _off_line(axis: str) -> Row:
    return layer("rule", {axis: {"datum": 1.0, "type": "quantitative"}}, strokeWidth=1.5)


def _interval(interval: Interval | None) -> Row:
    return {"low": rounded(interval.low) if interval else None, "high": rounded(interval.high) if interval else None}
