"""A load test from the command line (`eyrie load` starts this program).

    python -m eyrie_workers.load --variant off=http://127.0.0.1:30000/v1 \\
        --variant candidate=http://127.0.0.1:30001/v1 \\
        --prompts quickstart --concurrency 1,4,16 --slo ttft=0.5,itl=0.05 --out report.json --plots plots

Progress goes to stderr, the result to stdout: tables, or with --json the report. API keys are read from environment
variables (--api-key-env), because other users of a machine can read command lines.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from eyrie_api.artifacts import write_model
from eyrie_api.cli.tables import count
from eyrie_api.cli.verbs import Screen
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.quantities import duration
from eyrie_api.v1alpha1.benchmark import QUICKSTART_SUITES, SuiteSpec
from eyrie_api.v1alpha1.load import LoadSpec, ServiceLevel
from eyrie_api.v1alpha1.rules import rule_of
from eyrie_workers.conversations.suites import load_suite
from eyrie_workers.load.client import served_models
from eyrie_workers.load.endpoint_url import parse_url
from eyrie_workers.load.endpoints import LoadEndpoint, LoadPrompt
from eyrie_workers.load.report_tables import load_view
from eyrie_workers.load.run import run_load

_SLO_FIELDS = {"ttft": "ttft_s", "itl": "inter_token_s", "e2e": "end_to_end_s"}
_MAX_PROMPTS = 100_000
_PROGRESS_EVERY_S = 1.0
_MODELS_TIMEOUT_S = 30.0


def build_parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    parser = argparse.ArgumentParser(
        prog="eyrie load", description="Load-test OpenAI-compatible servers and compare them.",
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
                        help="per level, variant and repeat (at least two per user)")
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
                           "see eyrie load --help") from None


def read_variants(arguments: argparse.Namespace) -> list[LoadEndpoint]:
    """The endpoints, with keys from the environment and models as the servers list them.

    Raises InvalidInput or EndpointUnusable.
    """
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
        key = None
        if name in variables:
            key = os.environ.get(variables[name])
            if not key:
                raise InvalidInput(f"--api-key-env names {variables[name]}, which is not set",
                                   f"export {variables[name]}=<key>, or leave the option out")
        model = models.get(name) or _only_model(name, url, key)
        variants.append(LoadEndpoint(name, url, model, key, what.get(name, "")))
    return variants


def _only_model(name: str, url: str, key: str | None) -> str:
    listed = asyncio.run(served_models(url, key, _MODELS_TIMEOUT_S))
    if len(listed) != 1:
        raise InvalidInput(f"variant {name!r} serves {len(listed)} models: {', '.join(listed[:8])}",
                           f"choose one: --model {name}=<model>")
    return listed[0]


def read_prompts(sources: Sequence[str], seed: int) -> list[LoadPrompt]:
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
        try:
            suites.append(SuiteSpec(name=_as_name(category), path=path, max_prompts=_MAX_PROMPTS))
        except ValidationError:
            raise InvalidInput(f"--prompts {source!r} has no valid category name",
                               "write <category>=<file>, with the category in lower-case letters") from None
    return [LoadPrompt.of(prompt) for suite in suites for prompt in load_suite(suite, seed=seed)]


def _as_name(text: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower()).strip("-")


def _numbers(text: str | None, flag: str) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise InvalidInput(f"{flag} {text!r} is not numbers", f"write it like {flag} 1,4,16") from None


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        # The value may contain credentials, so the message does not quote it.
        raise InvalidInput(f"{flag} must have the form <name>=<value>", "see eyrie load --help")
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


class _Progress:
    """Progress on stderr: one updated line on a terminal, a line every ten seconds in a log, nothing with --json."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._started = time.monotonic()
        self._last_report = 0.0

    def report(self, done: int, total: int, label: str) -> None:
        """Report the number of completed requests."""
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
    """Run the program; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    screen = Screen(as_json=arguments.json)
    try:
        spec = read_spec(arguments)
        prompts = read_prompts(arguments.prompts, spec.seed)
        variants = read_variants(arguments)
        names = [variant.name for variant in variants]
        baseline = arguments.baseline or ("off" if "off" in names else names[0])
        report = run_load(variants, prompts, spec, baseline, _Progress(screen).report)
        if arguments.out is not None:
            write_model(arguments.out, report)
        screen.show(report, load_view(report))
        if arguments.plots is not None:
            from eyrie_workers.load.plots import draw_load

            files = draw_load(report, arguments.plots)
            screen.note(f"figures: {', '.join(str(path) for path in files if path.suffix == '.png')}")
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
