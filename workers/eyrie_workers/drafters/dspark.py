"""DSpark: DFlash's block with a Markov head, so that each token reads the one drafted before it (arXiv:2607.05147).

What it computes is in `drafters.blocks`. The objective is `train.loss` over the target's distribution; the authors' is
`tv` with a tenth of cross-entropy. The confidence head, by which an engine verifies a part of a block, is trained with
it; Eyrie's engine and SGLang's default, `SGLANG_RAGGED_VERIFY_MODE=static`, verify whole blocks and do not read it.

Experimental: above DFlash at equal steps (docs/results/experiments/block_heads.md), below it at equal time on a CPU
with a large vocabulary (docs/results/published.md).
"""

from eyrie_workers.drafters.blocks import BlockDiffusion, DFlashProposer, create, load, save
from eyrie_workers.drafters.family import FamilyImplementation

FAMILY = FamilyImplementation("dspark", create, BlockDiffusion, save, load, DFlashProposer, learning_rate=5e-4,
                              rate_falls=False)
