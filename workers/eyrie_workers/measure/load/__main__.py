"""A load test from the command line (`eyrie load-test` starts this program).

    python -m eyrie_workers.measure.load --variant off=http://127.0.0.1:30000/v1 \\
        --variant candidate=http://127.0.0.1:30001/v1 \\
        --prompts quickstart --concurrency 1,4,16 --slo ttft=0.5,itl=0.05 --out report.json --plots plots

Progress goes to stderr, the result to stdout: tables and sentences, or with --json the report. API keys are read from
environment variables (--api-key-env), because other users of a machine can read command lines.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyrie_api.artifacts import write_model
from eyrie_api.cli.plots import write_figures
from eyrie_api.cli.tables import count, times
from eyrie_api.cli.verbs import Screen
from eyrie_api.contract.benchmark import QUICKSTART_SUITES, SuiteSpec
from eyrie_api.contract.load import LoadComparison, LoadReport, LoadSpec, Quantiles, ServiceLevel
from eyrie_api.contract.model import Interval
from eyrie_api.contract.rules import rule_of
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.figures.load_figures import load_figures
from eyrie_api.quantities import duration
from eyrie_workers.data.suites import Prompt, load_suite
from eyrie_workers.measure.load.client import LoadEndpoint, served_models
from eyrie_workers.measure.load.http_client import parse_url
from eyrie_workers.measure.load.run import run_load

_SLO_FIELDS = {"ttft": "ttft_s", "itl": "inter_token_s", "e2e": "end_to_end_s"}
_MAX_PROMPTS = 100_000
_PROGRESS_EVERY_S = 1.0
_MODELS_TIMEOUT_S = 30.0

Mode = Literal["closed", "open"]
_DESCRIPTIONS = {
    "closed": "Closed loop: a number of users, each sending its next request as soon as the previous one is complete.",
    "open": "Open loop: requests per second, arriving at random times whether or not earlier ones are complete.",
}
_UNITS = {"closed": "USERS", "open": "REQ/S"}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eyrie load-test", description="Load-test OpenAI-compatible servers and compare them.",
        epilog="The variant named `off`, or else the first one, is the baseline of the comparison.")
    parser.add_argument("--variant", action="append", required=True, metavar="NAME=URL",
                        help="a server, its URL up to and including /v1; once per server")
    parser.add_argument("--baseline", metavar="NAME", help="the baseline variant; default: off, else the first")
    parser.add_argument("--model", action="append", default=[], metavar="[NAME=]MODEL",
                        help="model name in requests, for all variants or one; default: the only one a server lists")
    parser.add_argument("--api-key-env", action="append", default=[], metavar="[NAME=]VARIABLE",
                        help="environment variable with the API key, for all variants or one")
    parser.add_argument("--what", action="append", default=[], metavar="NAME=TEXT",
                        help="description of a variant for the report: its engine and settings")
    parser.add_argument("--prompts", action="append", default=[], metavar="[CATEGORY=]SOURCE",
                        help="a .jsonl, .json or .parquet file, quickstart:chat (math, code, tools), or quickstart for "
                             "all four (the default); once per category")
    parser.add_argument("--concurrency", default=None, metavar="N,N,...",
                        help="closed loop: numbers of concurrent users; default 1,4,16")
    parser.add_argument("--rate", default=None, metavar="R,R,...",
                        help="open loop: requests per second, arriving as a Poisson process")
    parser.add_argument("--requests", type=int, default=32,
                        help="per level, variant and repeat (at least two per user where there are several)")
    parser.add_argument("--repeats", type=int, default=1, help="interleaved blocks per level")
    parser.add_argument("--warmup", type=int, default=2, help="unmeasured requests before each level")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="limit of generated tokens per request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--system-prompt", help="replaces the system message of every prompt")
    parser.add_argument("--slo", metavar="ttft=S,itl=S,e2e=S",
                        help="service level in seconds: goodput counts the requests that meet it")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until a request fails")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, sampling and intervals")
    parser.add_argument("--out", type=Path, help="write the report to this file as JSON")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the figures to this directory (PNG and SVG)")
    parser.add_argument("--json", action="store_true", help="print the report instead of tables")
    return parser


def read_spec(arguments: argparse.Namespace) -> LoadSpec:
    """The LoadSpec of the arguments. Raises InvalidInput."""
    rates = _numbers(arguments.rate, "--rate")
    levels = _numbers(arguments.concurrency, "--concurrency") or ([] if rates else [1, 4, 16])
    slo = {}
    for name, value in (_pair(part, "--slo") for part in (arguments.slo or "").split(",") if part.strip()):
        if name not in _SLO_FIELDS:
            raise InvalidInput(f"--slo {name!r} is not a service level", f"use one of {', '.join(_SLO_FIELDS)}")
        slo[_SLO_FIELDS[name]] = _numbers(value, "--slo")[0]
    if any(level != int(level) for level in levels):
        raise InvalidInput("--concurrency takes whole numbers of users", "use --rate for requests per second")
    try:
        return LoadSpec(
            concurrencies=tuple(map(int, levels)), rates_per_s=tuple(rates), requests=arguments.requests,
            repeats=arguments.repeats, warmup_requests=arguments.warmup, temperature=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens, system_prompt=arguments.system_prompt,
            slo=ServiceLevel.model_validate(slo) if slo else None, timeout_s=arguments.timeout, seed=arguments.seed)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(f"{'.'.join(map(str, first['loc'])) or 'load'}: {rule_of(first)} (got {first['input']!r})",
                           "see eyrie load-test --help") from None


def read_variants(arguments: argparse.Namespace) -> list[LoadEndpoint]:
    """The endpoints, with keys from the environment and models as the servers list them. Raises InvalidInput or
    EndpointUnusable."""
    urls = dict(_pair(variant, "--variant") for variant in arguments.variant)
    if len(urls) < len(arguments.variant):
        raise InvalidInput("two --variant have the same name", "give each server its own name")
    models = _by_variant(arguments.model, urls, "--model")
    variables = _by_variant(arguments.api_key_env, urls, "--api-key-env")
    what = dict(_pair(text, "--what") for text in arguments.what)
    if what.keys() - urls.keys():
        raise InvalidInput(f"--what names no variant: {', '.join(what.keys() - urls.keys())}", "see --variant")
    variants = []
    for name, url in urls.items():
        parse_url(url)
        key = read_key(variables.get(name))
        model = models.get(name)
        if not model:
            listed = asyncio.run(served_models(url, key, _MODELS_TIMEOUT_S))
            if len(listed) != 1:
                raise InvalidInput(f"variant {name!r} serves {len(listed)} models: {', '.join(listed[:8])}",
                                   f"choose one: --model {name}=<model>")
            model = listed[0]
        variants.append(LoadEndpoint(name, url, model, key, what.get(name, "")))
    return variants


def read_key(variable: str | None) -> str | None:
    """The API key in an environment variable, if one is named. Raises InvalidInput when it is not set."""
    if variable is not None and not os.environ.get(variable):
        raise InvalidInput(f"--api-key-env names {variable}, which is not set",
                           f"export {variable}=<key>, or leave the option out")
    return None if variable is None else os.environ[variable]


def read_prompts(sources: Sequence[str], seed: int) -> list[Prompt]:
    """All prompts. Their category is that of the option, the suite's name or the file's name. Raises EyrieError."""
    suites: list[SuiteSpec] = []
    for source in sources or ["quickstart"]:
        if source == "quickstart":
            suites += QUICKSTART_SUITES
            continue
        category, equals, path = source.partition("=")
        if not equals:
            path = source
            category = source.partition(":")[2] if source.startswith("quickstart:") else Path(source).name.split(".")[0]
        name = "".join(c if c.isascii() and c.isalnum() else "-" for c in category.lower()).strip("-")
        try:
            suites.append(SuiteSpec(name=name, path=path, max_prompts=_MAX_PROMPTS))
        except ValidationError:
            raise InvalidInput(f"--prompts {source!r} has no valid category name",
                               "write <category>=<file>, with the category in lower-case letters") from None
    return [prompt for suite in suites for prompt in load_suite(suite, seed=seed)]


def _numbers(text: str | None, flag: str) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise InvalidInput(f"{flag} {text!r} is not numbers", f"write it like {flag} 1,4,16") from None


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        # The value may contain credentials, so the message does not quote it.
        raise InvalidInput(f"{flag} must have the form <name>=<value>", "see eyrie load-test --help")
    return name.strip(), value.strip()


def _by_variant(values: Sequence[str], variants: dict[str, str], flag: str) -> dict[str, str]:
    """Values by variant: `name=value` takes precedence over a value for all variants."""
    named: dict[str, str] = {}
    for_all = None
    for value in values:
        name, equals, rest = value.partition("=")
        if equals and name in variants:
            named[name] = rest
        elif equals:
            raise InvalidInput(f"{flag} names no variant: {name!r}", f"the variants are {', '.join(variants)}")
        else:
            for_all = value
    return {**(dict.fromkeys(variants, for_all) if for_all else {}), **named}


def load_view(report: LoadReport) -> RenderableType:
    parts: list[RenderableType] = []
    modes: tuple[Mode, ...] = ("closed", "open")
    for mode in modes:
        if any(level.mode == mode for level in report.levels):
            parts += [Text(_DESCRIPTIONS[mode]), levels_table(report, mode), Text()]
        compared = [comparison for comparison in report.comparisons if comparison.mode == mode]
        if compared:
            parts += [Text(f"Against {compared[0].baseline}, with 95 % intervals over prompts:"),
                      comparisons_table(compared), Text()]
    parts += [Text(line) for line in findings(report)]
    parts += [Text(f"note: {note}", "yellow") for note in report.notes]
    return Group(*parts)


def levels_table(report: LoadReport, mode: Mode) -> Table:
    columns = [_UNITS[mode], "VARIANT", "ANSWERED", "TOKENS/S\nall", "TOKENS/S\none user", "FIRST TOKEN\np50 / p99 ms",
               "BETWEEN TOKENS\np50 / p99 ms", "WHOLE ANSWER\np50 / p99 s", "TAU"]
    if report.spec.slo is not None:
        columns.append("GOOD\nREQ/S")
    table = _table(columns, left=("VARIANT",))
    levels = sorted((level for level in report.levels if level.mode == mode), key=lambda level: level.level)
    previous_level = None
    for level in levels:
        cell = level.total
        row = [f"{level.level:g}" if level.level != previous_level else "", level.variant,
               f"{cell.completed}/{cell.requests}", f"{cell.tokens_per_s:.0f}", f"{cell.tokens_per_s_per_user:.1f}",
               _p50_p99(cell.ttft_s, 1e3), _p50_p99(cell.inter_token_s, 1e3), _p50_p99(cell.end_to_end_s, 1.0),
               "-" if cell.tau is None else f"{cell.tau:.2f}"]
        if report.spec.slo is not None:
            row.append("-" if cell.goodput_per_s is None else f"{cell.goodput_per_s:.2f}")
        table.add_row(*row)
        previous_level = level.level
    return table


def comparisons_table(comparisons: Sequence[LoadComparison]) -> Table:
    """One line per level and compared variant."""
    table = _table([_UNITS[comparisons[0].mode], "VARIANT", "ALL USERS", "ONE USER", "FIRST TOKEN p99", "SAME ANSWERS",
                    "VERDICT"], left=("VARIANT", "VERDICT"))
    for comparison in comparisons:
        table.add_row(
            f"{comparison.level:g}", comparison.variant,
            _ratio(comparison.throughput_ratio, comparison.throughput_interval),
            _ratio(comparison.user_ratio, comparison.user_interval), times(comparison.ttft_p99_ratio),
            f"{comparison.identical}/{comparison.compared}", _verdict(comparison))
    return table


def _verdict(comparison: LoadComparison) -> Text:
    """By the speed of one user in an open loop, where arrivals set the throughput, otherwise by all users together."""
    interval = comparison.throughput_interval if comparison.mode == "closed" else comparison.user_interval
    if interval.low > 1.0:
        return Text("faster", "green")
    if interval.high < 1.0:
        return Text("slower", "red")
    return Text("undecided", "yellow")


def findings(report: LoadReport) -> list[str]:
    lines = [f"{name}: {description}" for name, description in report.variants.items()]
    closed = [comparison for comparison in report.comparisons if comparison.mode == "closed"]
    if closed:
        variant, baseline = closed[0].variant, closed[0].baseline
        loads = sorted(comparison.level for comparison in closed if comparison.variant == variant)
        if report.crossover is None:
            lines.append(f"{variant} gives all users together at least as many tokens per second as {baseline} at "
                         f"every load measured ({loads[0]:g} to {loads[-1]:g} users).")
        elif report.crossover <= loads[0]:
            lines.append(f"{variant} is slower than {baseline} for all users together already at {loads[0]:g} users.")
        else:
            lines.append(f"{variant} falls below {baseline} for all users together at about "
                         f"{report.crossover:.1f} users: the crossover.")
    if report.spec.temperature == 0.0:
        differ = [comparison for comparison in report.comparisons if comparison.identical < comparison.compared]
        if differ:
            lines.append("Not all greedy answers were the same: speculation must not change them. Rounding in 16-bit "
                         "arithmetic can; compare the baseline with itself to see how often.")
        elif report.comparisons:
            lines.append("All greedy answers were the same in every variant.")
    return lines


def _ratio(value: float, interval: Interval) -> str:
    return f"{value:.2f}x ({interval.low:.2f}-{interval.high:.2f})"


def _p50_p99(q: Quantiles | None, scale: float) -> str:
    return "-" if q is None else f"{_number(q.p50 * scale)} / {_number(q.p99 * scale)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(columns: Sequence[str], left: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


class ProgressLine:
    """Progress on stderr: one updated line on a terminal, a line every ten seconds in a log, nothing with --json."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._started = time.monotonic()
        self._last_report = 0.0

    def report(self, done: int, total: int, label: str) -> None:
        now = time.monotonic()
        live = self._screen.err.is_terminal
        if self._screen.as_json or (done < total and now - self._last_report < (_PROGRESS_EVERY_S if live else 10.0)):
            return
        self._last_report = now
        elapsed = now - self._started
        line = f"{count(done)}/{count(total)} requests"
        if done:
            line += f", {done / elapsed:.1f}/s, {duration((total - done) * elapsed / done)} left"
        line += f" ({label})"
        self._screen.err.print(f"\r\x1b[K{line}" if live else line, end="" if live and done < total else "\n",
                               soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    screen = Screen(as_json=arguments.json)
    try:
        spec = read_spec(arguments)
        prompts = read_prompts(arguments.prompts, spec.seed)
        variants = read_variants(arguments)
        names = [variant.name for variant in variants]
        baseline = arguments.baseline or ("off" if "off" in names else names[0])
        report = run_load(variants, prompts, spec, baseline, ProgressLine(screen).report)
        if arguments.out is not None:
            write_model(arguments.out, report)
        screen.show(report, load_view(report))
        if arguments.plots is not None:
            figures = load_figures(report)
            write_figures(figures, arguments.plots, "svg", "light")
            files = write_figures(figures, arguments.plots, "png", "light")
            screen.note(f"figures: {', '.join(map(str, files))}")
        if arguments.out is not None:
            screen.note(f"report: {arguments.out}")
        return 0
    except EyrieError as error:
        screen.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
