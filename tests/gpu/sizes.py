"""The sizes at which the tests and the benchmark of a GPU run: one table, so that both run the same code everywhere.

`REAL` is the drafter of an 8B target with a vocabulary of 128k; the target itself has four layers, which is what fits a
test. `TINY` runs on the CPU in the fast tier: it shows that the code of a test is correct before a GPU sees it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from eyrie_workers.targets.device import CPU
from tests.tiny import tiny_target


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    draft_vocab: int
    target_layers: int
    kernel_tokens: int
    """Packed tokens of a kernel's test, and of a forward pass of capture."""

    step_tokens: int
    """Packed tokens of a training step that is computed in float32 and in bfloat16."""

    context: int
    """Longest text of the target."""

    def lengths(self, total: int) -> tuple[int, ...]:
        """Documents of mixed lengths that sum to `total`."""
        return total // 2, total // 4, total // 8, total - total // 2 - total // 4 - total // 8

    def target(self, path: Path, dtype: str = "float32") -> Path:
        """Write a random target of these sizes; returns its directory."""
        return tiny_target(path, seed=5, dtype=dtype, device=str(this_device()),
                           num_layers=self.target_layers, hidden_size=self.hidden, vocab_size=self.vocab,
                           intermediate_size=self.intermediate, num_attention_heads=self.heads,
                           num_key_value_heads=self.kv_heads, head_dim=self.head,
                           max_position_embeddings=self.context,
                           # Attention is not uniform, and logits stay of order one, at either width.
                           initializer_range=0.9 * self.hidden**-0.5)


TINY = Sizes("tiny", hidden=32, intermediate=48, heads=4, kv_heads=2, head=8, vocab=320, draft_vocab=160,
             target_layers=4, kernel_tokens=256, step_tokens=64, context=512)
REAL = Sizes("real", hidden=4096, intermediate=14_336, heads=32, kv_heads=8, head=128, vocab=128_256,
             draft_vocab=32_000, target_layers=4, kernel_tokens=16_384, step_tokens=4096, context=32_768)

NO_GPU = "needs a GPU: torch sees none on this machine"


def this_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else CPU
