"""vLLM with a really trained drafter, as Eyrie writes it: the same answers, the same rounds as our reference engine."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.contract.benchmark import SuiteSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.data.suites import load_suite
from eyrie_workers.drafters.export import to_speculators
from eyrie_workers.measure.intervals import acceptance_length, add_histograms
from eyrie_workers.measure.parity import Served
from eyrie_workers.measure.parity_reference import Reference
from eyrie_workers.targets.loading import QUICKSTART, resolve
from eyrie_workers.targets.templates import ChatTokenizer
from tests.sglang.broken_drafters import copy_drafter, edit_config
from tests.sglang.trained_drafter import ROOT, SUITES, trained_drafter

ENVIRONMENT = Path(__file__).parent / "environment"
TARGET = resolve(TargetSpec(model=QUICKSTART))
CHAIN = DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)
"""vLLM verifies chains; it has no trees."""

TOKENS = 64
LIMIT_S = 600.0
"""A run takes about half a minute on two idle cores, most of it imports."""


@dataclass(frozen=True)
class Run:
    """One process of vLLM: every prompt by itself, then all at once."""

    alone: tuple[Served, ...]
    together: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""

    together_histogram: tuple[int, ...]
    """Over all prompts."""


def run_vllm(model: Path, speculative_config: dict[str, Any] | None, prompts: Sequence[Sequence[int]],
             directory: Path) -> Run:
    """Run `environment/answer.py`; fails with the last lines of vLLM's output."""
    directory.mkdir(exist_ok=True)
    request, answers, log = (directory / name for name in ("request.json", "answers.json", "log.txt"))
    request.write_text(json.dumps({"model": str(model), "speculative_config": speculative_config,
                                   "prompts": [list(prompt) for prompt in prompts], "max_tokens": TOKENS}))
    python = Path(os.environ.get("EYRIE_VLLM_VENV", str(ROOT / ".eyrie" / "vllm-venv"))) / "bin" / "python"
    with log.open("wb") as output:
        ended = subprocess.run([python, ENVIRONMENT / "answer.py", request, answers], stdout=output,
                               stderr=subprocess.STDOUT, timeout=LIMIT_S, cwd=directory,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    found = json.loads(answers.read_text())
    return Run(tuple(Served(token_ids=tuple(one["token_ids"][0]), histogram=histogram(one)) for one in found["alone"]),
               tuple(map(tuple, found["together"]["token_ids"])), histogram(found["together"]))


def histogram(answer: dict[str, Any]) -> tuple[int, ...]:
    """Rounds by accepted tokens: those that accepted at least k less those that accepted at least k + 1."""
    at_least = [answer["drafts"], *answer["accepted_per_position"], 0]
    counts = [more - fewer for more, fewer in pairwise(at_least)]
    while counts and counts[-1] == 0:
        counts.pop()
    return tuple(counts)


@pytest.fixture(scope="session")
def drafter() -> Path:
    """A drafter trained by the stages, read-only. EYRIE_VLLM_DRAFTER replaces it by another for the same target."""
    given = os.environ.get("EYRIE_VLLM_DRAFTER")
    return Path(given) if given else trained_drafter()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of four prompts of each quickstart suite."""
    tokenizer = ChatTokenizer(TARGET)
    return [tokenizer.render(list(prompt.messages), list(prompt.tools) or None) for name in SUITES
            for prompt in load_suite(SuiteSpec(name=name, path=f"quickstart:{name}"))[:4]]


@pytest.fixture(scope="session")
def plain(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """vLLM without a drafter."""
    return run_vllm(TARGET, None, prompts, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def reference(drafter: Path) -> Reference:
    """Our engine, counting as vLLM counts: all accepted tokens of the last round, which is SGLang's way as well."""
    return Reference(TARGET, drafter, "sglang", CHAIN, "float32")


def drafting(drafter: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": CHAIN.num_steps}


@pytest.mark.parametrize("form", ["native", "speculators"])
def test_an_exported_drafter_gives_the_same_answers_and_exactly_the_rounds_of_the_reference_engine(
        form: str, plain: Run, reference: Reference, drafter: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    if form == "native":
        drafted = run_vllm(TARGET, drafting(drafter), prompts, tmp_path / "run")
    else:  # the directory names its target and the number of steps itself
        to_speculators(drafter, tmp_path / "drafter", target=str(TARGET), num_steps=CHAIN.num_steps)
        drafted = run_vllm(tmp_path / "drafter", None, prompts, tmp_path / "run")
    found = [reference.examine(f"prompt {index}", prompt, one, other, search=True)
             for index, (prompt, one, other) in enumerate(zip(prompts, plain.alone, drafted.alone, strict=True))]
    assert [one.divergence for one in found if not one.identical] == []
    assert [one.target_differs for one in found if one.target_differs] == []
    assert [one.histogram for one in found] == [one.reference_histogram for one in found]
    total = add_histograms([one.histogram for one in found])
    # In batches the answers are equal too; of the rounds only the sum over all prompts is known.
    assert drafted.together == plain.together == tuple(one.token_ids for one in plain.alone)
    assert drafted.together_histogram == total
    # Acceptance is high and mixed, so that sameness means something.
    assert acceptance_length(total) >= 2.5
    assert len(total) == CHAIN.num_steps + 1
    assert min(total) > 0
    print(f"{form}: {len(prompts)} of {len(prompts)} answers identical, alone and in batches; {sum(total)} rounds, tau "
          f"{acceptance_length(total):.3f}, by accepted tokens {list(total)}: in vLLM and in the reference engine")


def test_layer_ids_that_are_off_by_one_are_found_by_their_rounds_and_change_no_answer(
        plain: Run, reference: Reference, drafter: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    def shift(config: dict[str, Any]) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = [
            layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]

    broken = copy_drafter(drafter, tmp_path / "drafter")
    edit_config(broken, shift)
    drafted = run_vllm(TARGET, drafting(broken), prompts[:6], tmp_path / "run")
    assert [one.token_ids for one in drafted.alone] == [one.token_ids for one in plain.alone[:6]]
    own = [reference.histogram(prompt, len(one.token_ids)) for prompt, one in zip(prompts, drafted.alone, strict=False)]
    assert [one.histogram for one in drafted.alone] != own
    assert "layer" in reference.diagnose(list(zip(prompts, drafted.alone, strict=False)))
