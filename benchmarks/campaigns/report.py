"""What every campaign shares: its options, its findings, its JSON report.

A campaign is a program with a seed and a time bound. It stops at the bound, writes what it counted and what it found,
and exits with 1 if it found anything. The same seed draws the same choices; where processes and clocks take part, the
same choices need not meet the same states.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAX_FINDINGS = 50
"""Findings that a report lists in full; it counts them all."""


@dataclass
class Campaign:
    """One execution of a campaign."""

    name: str
    seed: int
    seconds: float
    out: Path | None
    findings: list[dict[str, Any]] = field(default_factory=list)
    found: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        """Whether the time bound is reached."""
        return self.elapsed_s >= self.seconds

    def add_finding(self, rule: str, **facts: Any) -> None:
        """Record that `rule` was broken, with the facts that reproduce it."""
        self.found += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append({"rule": rule, **facts})
            print(f"{self.name}: FOUND {rule}: {json.dumps(facts, default=str)[:2000]}", file=sys.stderr, flush=True)

    def print_progress(self, done: int, what: str) -> None:
        """One line on stderr: what was done, its rate, and the time that is left."""
        print(f"{self.name}: {done} {what}, {done / max(self.elapsed_s, 1e-9):.1f}/s, "
              f"{max(0.0, self.seconds - self.elapsed_s):.0f} s left, {self.found} found", file=sys.stderr, flush=True)

    def finish(self, figures: Mapping[str, Any]) -> int:
        """Write and print the report; returns the exit code, 1 if anything was found."""
        report = {
            "campaign": self.name, "seed": self.seed, "bound_s": self.seconds, "seconds": round(self.elapsed_s, 1),
            "commit": _commit(), "python": platform.python_version(), "cores": os.cpu_count(),
            "figures": dict(figures), "found": self.found, "findings": self.findings}
        text = json.dumps(report, indent=2, default=str) + "\n"
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(text)
        print(text)
        return 1 if self.found else 0


def options(name: str, description: str, seconds: float) -> argparse.ArgumentParser:
    """The options of every campaign; `seconds` is the default bound."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.campaigns.{name}", description=description)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=seconds, help=f"time bound (default {seconds:g})")
    parser.add_argument("--out", type=Path, default=ROOT / f".eyrie/campaigns/{name}.json", help="the JSON report")
    return parser


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
