"""Whether drafting changed the output, and whether rounding explains it.

Greedy output must equal the undrafted engine's token by token; so must sampled output, because the noise depends on the
position and not on the round. Where two answers differ, the target runs once more, teacher-forced, on the tokens before
the first difference. The gap between its two largest logits there separates a rounding tie (a few 1e-6 in float32, a
few 1e-2 in bfloat16) from a defect (anything wider). At temperature > 0 the choice was
argmax(logits / temperature + noise), so the gap is taken of these scores. A near-tie still counts as a difference; the
report line names it as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyrie_workers.measurement.benchmark.samples import first_difference
from eyrie_workers.speculation.noise import gumbel
from eyrie_workers.targets.model import TargetModel

# Relative rounding error of one logit, times the few roundings that a different batching reorders.
TIE_RELATIVE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}


@dataclass(frozen=True)
class Divergence:
    """One answer that drafting changed."""

    prompt_id: str
    position: int
    """Index of the first differing generated token."""

    baseline_token: int | None
    drafted_token: int | None
    chosen: int
    """The target's own choice there, teacher-forced: normally one of the two."""

    gap: float
    """Top-1 minus top-2 of the scores the choice was made by at that position, teacher-forced."""

    scale: float
    """Largest absolute score there before noise: the rounding error is relative to it."""

    def is_tie(self, dtype: str) -> bool:
        """Whether the gap is within the rounding error of `dtype`."""
        return self.gap <= TIE_RELATIVE[dtype] * self.scale

    def line(self, dtype: str) -> str:
        """One line for the report."""
        tie = "a rounding tie" if self.is_tie(dtype) else "NOT a rounding tie"
        return (f"{self.prompt_id}: position {self.position}, {_token(self.baseline_token)} undrafted, "
                f"{_token(self.drafted_token)} drafted, logit gap {self.gap:.3g} ({tie} in {dtype})")


def _token(token: int | None) -> str:
    return "end" if token is None else f"token {token}"


def explain(target: TargetModel, prompt_id: str, prompt_ids: Sequence[int], baseline: Sequence[int],
            drafted: Sequence[int], *, temperature: float = 0.0, seed: int = 0) -> Divergence | None:
    """Find and explain the first difference between the two answers to one prompt; None when identical.

    `temperature` and `seed` are those of the request: at temperature > 0 its noise is added to the logits.
    """
    position = first_difference(baseline, drafted)
    if position is None:
        return None
    text = torch.tensor([*prompt_ids, *baseline[:position]], dtype=torch.int64)
    with torch.inference_mode():
        ((_, last_TH),) = target.hidden_states([text], ())
        logits_V = target.logits(last_TH[-1:]).double().flatten().cpu()
    if temperature > 0.0:
        logits_V = logits_V / temperature
    scale = float(logits_V.abs().max())
    if temperature > 0.0:
        logits_V = logits_V + gumbel(seed, text.numel(), 1, logits_V.numel())[0]
    best = logits_V.topk(2).values
    return Divergence(
        prompt_id=prompt_id, position=position,
        baseline_token=baseline[position] if position < len(baseline) else None,
        drafted_token=drafted[position] if position < len(drafted) else None,
        chosen=int(logits_V.argmax()), gap=float(best[0] - best[1]), scale=scale)
