"""DSpark's export in SGLang's own code: its parser reads the block, its heads give what ours give.

Rounds of a whole server are in `test_blocks`.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.contract.drafter import MarkovHeadKind
from eyrie_workers.drafters.dspark import FAMILY
from eyrie_workers.targets.model import TargetModel
from tests.sglang.servers import environment, sglang_python
from tests.workers.drafters.test_dflash import HIDDEN, STEPS, VOCAB, target
from tests.workers.drafters.test_dspark import KINDS, drafter_for

__all__ = ["target"]  # the fixture
PROGRAM = Path(__file__).with_name("markov_bias.py")


@pytest.mark.parametrize("kind", KINDS)
def test_sglangs_heads_give_the_logits_and_confidences_of_ours(kind: MarkovHeadKind, target: TargetModel,
                                                              tmp_path: Path) -> None:
    drafter = drafter_for(target, kind)
    FAMILY.save(tmp_path / "drafter", drafter, "float32", None)
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(4, STEPS, HIDDEN, generator=generator)
    tokens = torch.randint(VOCAB, (4, STEPS), generator=generator)
    save_file({"hidden": hidden, "tokens": tokens}, tmp_path / "block.safetensors")
    done = subprocess.run([sglang_python(), PROGRAM, tmp_path / "drafter", tmp_path / "block.safetensors",
                           tmp_path / "bias.safetensors"], capture_output=True, text=True, timeout=600, check=False,
                          env=os.environ | environment() | {"SGLANG_RAGGED_VERIFY_MODE": "cap-accept"})
    assert done.returncode == 0, done.stderr[-3000:]
    head, confidence = drafter.markov_head, drafter.confidence_head
    assert head is not None
    assert confidence is not None
    with torch.no_grad():
        read = head.unroll(list(tokens.unbind(1)), list(hidden.unbind(1)))
        ours = torch.stack([head.markov_w2(z) for z in read], 1)
        accepted = confidence.proj(torch.cat([hidden, head.markov_w1(tokens)], -1)).squeeze(-1).sigmoid()
    theirs = load_file(tmp_path / "bias.safetensors")
    torch.testing.assert_close(theirs["bias"], ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(theirs["confidence"], accepted, rtol=1e-5, atol=1e-5)
