"""The drafter that `make demo-published` trained, its target, and prompts of the three suites, for tests of engines.

They are not in the checkout: tests skip where that job has not run. EYRIE_PUBLISHED=<another checkout's .eyrie>;
EYRIE_PUBLISHED_PROMPTS=<prompts of each suite, 6 by default; 24 in the full form>.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.published.demo import local_job
from eyrie_workers.data.suites import load_suite
from eyrie_workers.targets.templates import ChatTokenizer

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Published:
    target: Path
    drafter: Path
    prompts: dict[str, list[list[int]]]
    """Token ids by suite: the first turn of each."""


def published() -> Published:
    """Skips the test where there is no drafter."""
    home = Path(os.environ.get("EYRIE_PUBLISHED", ROOT / ".eyrie")).resolve()
    proofs = sorted(home.glob("demo-published/jobs/*/stages/prove/spec.json"), key=lambda path: path.stat().st_mtime)
    target = home / "published" / "target"
    drafters = [path for spec in proofs if (path := Path(json.loads(spec.read_text())["drafter_dir"])).exists()]
    if not drafters or not target.exists():
        pytest.skip(f"make demo-published has not trained a drafter in {home}")
    tokenizer, number = ChatTokenizer(target), int(os.environ.get("EYRIE_PUBLISHED_PROMPTS", "6"))
    return Published(target, drafters[-1], {
        suite.name: [tokenizer.render(list(prompt.messages)) for prompt in load_suite(suite)[:number]]
        for suite in local_job(target).benchmark.suites})
