"""DFlash: a block of tokens drafted in one pass by a small diffusion model over the target's features
(arXiv:2602.06036). What it computes is in `drafters.blocks`."""

from eyrie_workers.drafters.blocks import BlockDiffusion, DFlashProposer, create, load, save
from eyrie_workers.drafters.family import FamilyImplementation

# 286 steps of 512 tokens, two layers: theoretical speed-up (loss) 1.25 (3.61) at 2.5e-4, 1.29 (3.54) at 5e-4, 1.27
# (3.70) at 1e-3; 130 steps of 1024: 1.25 (3.77) at 1e-3, 1.25 (3.99) at 2e-3, 1.18 (4.29) at 4e-3. It learns slowly: on
# the same data a standalone drafter reaches 2.39.
FAMILY = FamilyImplementation("dflash", create, BlockDiffusion, save, load, DFlashProposer, learning_rate=5e-4,
                              rate_falls=False)
