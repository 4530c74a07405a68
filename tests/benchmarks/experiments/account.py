"""What an experiment leaves: `<name>.json` for programs, `<name>.svg`, and `<name>.md` for people. Pure but for
writing.

An account says first what was found, then how to repeat it, then the figures, then what they cannot show. Where other
work ran on the machine, the account says so by itself, since timings then mean little.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from eyrie_api.artifacts import write_atomically, write_model
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.reports import Environment
from eyrie_workers.figure_style import SETTINGS
from eyrie_workers.machine.environment import cpu_count, environment
from eyrie_workers.machine.machine_lock import MachineTime, disturbance


class Account(Frozen):
    """One experiment, told."""

    name: str
    claim: str
    """What the seed says."""

    found: tuple[str, ...]
    """Sentences; the first alone is what the index says."""

    measured: str
    """How: data, drafters, seeds, prompts, temperature, shape."""

    limits: tuple[str, ...]
    columns: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    timed: bool
    """Whether seconds decide its figures, rather than counts."""

    short: bool
    command: str
    disturbed: str | None
    environment: Environment
    seconds: float


@dataclass(frozen=True)
class Finding:
    """What an experiment's own file decides; the frame adds where and when."""

    found: Sequence[str]
    measured: str
    limits: Sequence[str]
    columns: Sequence[str]
    table: Iterable[Sequence[str]]
    figure: Callable[[], Figure]
    """Drawn under `figure_style.SETTINGS`."""

    timed: bool = False


@dataclass
class Watch:
    """The machine while an experiment runs."""

    begun: MachineTime | None = field(default_factory=MachineTime.now)

    def disturbed(self) -> str | None:
        """What else ran since."""
        return disturbance(self.begun, MachineTime.now(), cpu_count(), os.getloadavg()[0])


def tell(name: str, claim: str, finding: Finding, *, short: bool, command: str, watch: Watch,
         seconds: float) -> Account:
    """The whole account."""
    return Account(
        name=name, claim=claim, found=tuple(finding.found), measured=finding.measured, limits=tuple(finding.limits),
        columns=tuple(finding.columns), table=tuple(tuple(row) for row in finding.table), timed=finding.timed,
        short=short, command=command, disturbed=watch.disturbed(), environment=environment("float32"), seconds=seconds)


def write(account: Account, figure: Callable[[], Figure], out: Path) -> list[Path]:
    """The three files."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{account.name}.{ending}" for ending in ("svg", "json", "md")]
    # Letters as text: a tenth of the size of letters as outlines, and they can be searched.
    with matplotlib.rc_context(SETTINGS | {"svg.fonttype": "none"}):
        figure().savefig(paths[0], metadata={"Date": None})
    write_model(paths[1], account)
    write_atomically(paths[2], page(account))
    return paths


def page(account: Account) -> str:
    """The account as Markdown."""
    e = account.environment
    where = (f"{e.date[:10]}, {e.hardware}, {e.threads} of {e.cpu_count} processors used, torch {e.torch}, {e.dtype}, "
             f"code {e.code_version}; {account.seconds:.0f} s beyond what was prepared before.")
    lines = [f"# {title(account.name)}", "", f"*The seed:* {account.claim}", "", f"**Found.** {account.found[0]}", "",
             *(sentence + "\n" for sentence in account.found[1:]),
             f"![{account.name}]({account.name}.svg)", "", *markdown_table(account.columns, account.table), "",
             f"**How.** {account.measured}", "", f"Measured {where}", *notes(account), "",
             "**What this cannot show.** " + " ".join(account.limits), "", f"Repeat: `{account.command}`", ""]
    return "\n".join(lines)


def notes(account: Account) -> list[str]:
    """Warnings about how far the figures go."""
    said = []
    if account.short:
        said.append("This is the short form, with fewer conversations, seeds and prompts: a trial of the command.")
    if account.disturbed:
        said.append(f"{account.disturbed[0].upper()}{account.disturbed[1:]}." if account.timed else
                    "Other work ran on the machine; nothing here is timed.")
    return said


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    return [lines[0], "|" + "---|" * len(columns), *lines[1:]]


def title(name: str) -> str:
    """`data_amount` as a heading."""
    words = name.replace("_", " ")
    return words[0].upper() + words[1:]


def index(accounts: Iterable[Account]) -> str:
    """README of a directory of accounts."""
    rows = [(f"[{title(a.name)}]({a.name}.md)", a.claim,
             a.found[0] + " (short form)" * a.short + " (machine disturbed)" * (a.timed and a.disturbed is not None))
            for a in sorted(accounts, key=lambda a: a.name)]
    return "\n".join([
        "# Experiments", "",
        "What the two texts that Eyrie began from claim, and what was measured here. Each is one command (`make "
        "experiments` runs all), one page, one plot.", "", *markdown_table(("", "the claim", "found here"), rows), "",
        "Confidence against acceptance of a drafter of your own: "
        "`python -m tests.benchmarks.calibration`.", ""])
