"""Drafters of blocks in SGLang's own workers: the same answers, and the same rounds as our reference engine.

SGLang 0.5.23 refuses DFLASH and DSPARK on a CPU, and launch lines of ours with it; so the line is the tests' own, and
`environment/stand_in/block_workers.py` lets the workers in. Of a round, SGLang's are: the class that loads the
checkpoint, the features it makes of the target's layers, their keys and values in its cache, the block's forward, the
proposals (greedy over the target's head; Markov head; Domino's rollout; DFlash2's convolutions and selector; LiLiCorr's
candidates), the target's verification, acceptance, the commit of the accepted positions' features, and the scheduler
around them. Stood in for are attention and the tables of slots (`sgl_kernel`), and what `block_workers` names.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.sglang.process import SglangServer
from tests.sglang.servers import drafting, flags, serving
from tests.sglang.test_families import assert_same_rounds
from tests.sglang.test_parity import parity
from tests.sglang.trained_drafter import BLOCK, trained_drafter

CHAIN = DraftTreeShape(num_steps=BLOCK, top_k=1, num_draft_tokens=BLOCK + 1)


@pytest.mark.parametrize("family", [pytest.param("dflash", marks=pytest.mark.slow), "dspark", "domino",
                                    pytest.param("selector", marks=pytest.mark.slow), "dflash2", "lilicorr"])
def test_a_block_is_drafted_and_verified_as_in_the_reference_engine(
        family: str, plain: SglangServer, prompts: list[list[int]], tmp_path: Path) -> None:
    drafter = trained_drafter(family)
    with serving(flags(*drafting(drafter, CHAIN)), tmp_path) as drafted:
        assert_same_rounds(parity(family, plain, drafted, drafter, CHAIN, prompts))
        # Of several requests SGLang may score a LiLiCorr block after a neighbour's last position.
        together = parity(family, plain, drafted, drafter, CHAIN, prompts, in_flight=4)
        if family == "lilicorr":
            assert together.identical == together.prompts
        else:
            assert_same_rounds(together)


@pytest.mark.parametrize(("family", "size"), [("dspark", ("--speculative-dspark-block-size", "2")),
                                              ("domino", ("--speculative-dflash-block-size", "3")),
                                              ("lilicorr", ("--speculative-dflash-block-size", "3"))])
def test_a_block_shorter_than_the_trained_one_is_drafted_as_in_the_reference_engine(
        family: str, size: tuple[str, str], plain: SglangServer, prompts: list[list[int]], tmp_path: Path) -> None:
    drafter, shorter = trained_drafter(family), DraftTreeShape(num_steps=2, top_k=1, num_draft_tokens=3)
    with serving(flags(*drafting(drafter, shorter), *size), tmp_path) as drafted:
        assert_same_rounds(parity(family, plain, drafted, drafter, shorter, prompts))


def test_sglang_verifies_as_much_of_a_block_as_its_confidences_pay_for(plain: SglangServer, prompts: list[list[int]],
                                                                       tmp_path: Path) -> None:
    """It reads the exported confidence head and the table."""
    drafter, table = trained_drafter("dspark"), tmp_path / "steps.json"
    widths = range(1, BLOCK + 2)  # each token more that is verified makes a step longer by a third of the first
    table.write_text(json.dumps({"sample_batch_tokens": list(widths), "max_batch_tokens": 64,
                                 "sample_steps_per_sec": [1 / (1 + (width - 1) / 3) for width in widths],
                                 "temperatures": [1.25] * BLOCK}))  # one file for both, as launch lines have it
    line = flags(*drafting(drafter, CHAIN), "--speculative-dspark-sps-table-path", str(table),
                 "--speculative-dspark-confidence-sts-path", str(table))
    verified = Counter[int]()
    # Not compact, the mode of our launch lines: torch_native does not verify requests of different lengths together.
    with serving(line, tmp_path, SGLANG_RAGGED_VERIFY_MODE="cap-accept") as drafted:
        for prompt in prompts[::2]:
            without, capped = (generated(server, prompt) for server in (plain, drafted))
            assert capped["output_ids"] == without["output_ids"]
            verified.update(dict(enumerate(capped["meta_info"]["spec_cap_lens_histogram"])))
    chosen = {width for width, count in verified.items() if count >= 5}
    assert len(chosen) >= 2, verified
    assert min(chosen) < BLOCK + 1, verified


def generated(server: SglangServer, prompt: list[int]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/generate", timeout=120, trust_env=False, json={
        "input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 48}})
    answer.raise_for_status()
    return dict(answer.json())
