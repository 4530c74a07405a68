"""Whether drafting changed the output, and whether rounding explains it.

Greedy output must equal the undrafted engine's token by token; so must sampled output, because the noise depends on the
position and not on the round. Where two answers differ, the target runs once more, teacher-forced, on the drafted
answer, and each of its tokens from the first difference on is judged by `eyrie_api.decisions.near_ties`. At temperature
> 0 the choice was argmax(logits / temperature + noise), so the gap is taken of these scores and multiplied by the
temperature.
"""

# T tokens, H hidden, V vocabulary

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_api.decisions.near_ties import is_near_tie
from eyrie_workers.measure.parity import first_difference
from eyrie_workers.speculation.noise import gumbel
from eyrie_workers.targets.state_source import StateSource

_ROWS = 64  # positions whose logits are held at once, in float64: 80 MB with a vocabulary of 152k


@dataclass(frozen=True)
class Choice:
    """One token of an answer, compared with the target's own choice for the text before it."""

    gap: float  # largest score minus the token's, in units of logits: 0 when the target chooses it
    magnitude: float  # the larger absolute value of the two logits: rounding is relative to it
    chosen: int  # the target's choice


NOT_JUDGED = Choice(math.inf, 0.0, -1)
"""Where nothing computes the target but its serving engine."""


@dataclass(frozen=True)
class Divergence:
    """One answer that drafting changed."""

    prompt_id: str
    position: int  # index of the first differing generated token
    baseline_token: int | None
    drafted_token: int | None
    first: Choice  # at the first difference: of the two tokens, the one further below the target's choice
    later: tuple[Choice, ...] = ()  # the drafted answer's tokens after it

    def is_tie(self, dtype: str) -> bool:
        """Whether the difference is a near-tie, and every token after it the target's choice or a near-tie."""
        if self.baseline_token is None or self.drafted_token is None:
            return False  # one answer ended where the other continued
        return all(is_near_tie(choice.gap, choice.magnitude, dtype) for choice in (self.first, *self.later))

    def line(self, dtype: str) -> str:
        tie, later = "a rounding tie" if self.is_tie(dtype) else "NOT a rounding tie", ""
        if self.first is NOT_JUDGED:
            tie = "not judged, because SGLang alone reads the target's quantised weights,"
        if is_near_tie(self.first.gap, self.first.magnitude, dtype):
            later = next((f": position {place} is {choice.gap:.3g} below the target's choice"
                          for place, choice in enumerate(self.later, self.position + 1)
                          if not is_near_tie(choice.gap, choice.magnitude, dtype)), "")
        return (f"{self.prompt_id}: position {self.position}, {_token(self.baseline_token)} undrafted, "
                f"{_token(self.drafted_token)} drafted, logit gap {self.first.gap:.3g} ({tie} in {dtype}{later})")


def _token(token: int | None) -> str:
    return "end" if token is None else f"token {token}"


def explain(target: StateSource | None, prompt_id: str, prompt_ids: Sequence[int], baseline: Sequence[int],
            drafted: Sequence[int], *, temperature: float = 0.0, seed: int = 0,
            constrained: bool = False) -> Divergence | None:
    """Find and explain the first difference between the two answers to one prompt; None when identical.

    `temperature` and `seed` are those of the request: at temperature > 0 its noise is added to the logits. Without a
    target no difference is a near-tie.

    constrained   by a grammar, which is not known here: it allows both tokens at the first difference, so they are
                  compared with each other, and no later token is judged
    """
    position = first_difference(baseline, drafted)
    if position is None:
        return None
    text = [*prompt_ids, *drafted]
    start = len(prompt_ids) + position
    rows = max(1, len(text) - start)  # the row of a token that one answer lacks is judged too
    first: Choice | None = None
    later = []
    two = [answer[position] for answer in (baseline, drafted) if position < len(answer)]
    scored = () if target is None else _scores(target, text, start, rows, temperature, seed)
    for row, (logits_V, scores_V) in enumerate(scored):
        if first is None:
            if constrained:
                two_V = torch.full_like(scores_V, -math.inf)
                two_V[two] = scores_V[two]
                scores_V = two_V
            choices = [_choice(logits_V, scores_V, token, temperature) for token in two]
            first = max(choices, key=lambda choice: choice.gap)
        elif not constrained:
            later.append(_choice(logits_V, scores_V, text[start + row], temperature))
    return Divergence(
        prompt_id=prompt_id, position=position,
        baseline_token=baseline[position] if position < len(baseline) else None,
        drafted_token=drafted[position] if position < len(drafted) else None, first=first or NOT_JUDGED,
        later=tuple(later))


def _choice(logits_V: Tensor, scores_V: Tensor, token: int, temperature: float) -> Choice:
    chosen = int(scores_V.argmax())
    gap = float(scores_V[chosen] - scores_V[token]) * (temperature or 1.0)
    magnitude = max(abs(float(logits_V[chosen])), abs(float(logits_V[token])))
    return Choice(gap, magnitude, chosen)


def _scores(target: StateSource, text: Sequence[int], start: int, num_rows: int, temperature: float,
            seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and scores, by which the tokens text[start], text[start + 1] ... were chosen."""
    with torch.inference_mode():
        _, last_TH = target.packed_states([torch.tensor(text[:start + num_rows - 1], dtype=torch.int64)], ())
        head = target.output_head
        for begin in range(0, num_rows, _ROWS):
            end = min(begin + _ROWS, num_rows)
            logits_TV = head.logits(last_TH[start - 1 + begin:start - 1 + end]).double().cpu()
            scores_TV = logits_TV
            if temperature > 0.0:
                noise_TV = gumbel(seed, start + begin, end - begin, logits_TV.shape[-1]).to(logits_TV)
                scores_TV = logits_TV / temperature + noise_TV
            yield from zip(logits_TV, scores_TV, strict=True)
