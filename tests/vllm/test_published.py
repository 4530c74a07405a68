"""vLLM's CPU build with the published target and the drafter that `make demo-published` trained for it: the answers
and the rounds of the reference engine, one request at a time and all at once."""

from itertools import chain
from pathlib import Path

from eyrie_workers.measure.intervals import acceptance_length, add_histograms
from eyrie_workers.measure.parity_reference import Reference
from tests.published_drafter import published
from tests.vllm.test_vllm import CHAIN, drafting, run_vllm


def test_vllm_answers_and_drafts_as_the_reference_engine_on_a_published_model(tmp_path: Path) -> None:
    found = published()
    prompts = list(chain.from_iterable(found.prompts.values()))
    plain = run_vllm(found.target, None, prompts, tmp_path / "plain")
    drafted = run_vllm(found.target, drafting(found.drafter), prompts, tmp_path / "drafted")
    reference = Reference(found.target, found.drafter, "sglang", CHAIN, "float32")
    seen = [reference.examine(f"prompt {index}", prompt, one, other, search=True)
            for index, (prompt, one, other) in enumerate(zip(prompts, plain.alone, drafted.alone, strict=True))]
    assert [one.divergence for one in seen if not one.identical] == []
    assert [one.name for one in seen if one.deviations is None] == []
    total = add_histograms([one.histogram for one in seen])
    assert drafted.together == plain.together == tuple(one.token_ids for one in plain.alone)
    print(f"{len(prompts)} of {len(prompts)} answers identical, alone and together; tau {acceptance_length(total):.3f} "
          f"in chains of {CHAIN.num_steps}, {sum(one.deviations or 0 for one in seen)} rounds explained by near-ties")
