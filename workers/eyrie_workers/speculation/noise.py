"""Sampling noise as a function of (request seed, position, token).

Drawing from softmax(z / temperature) is the same as taking argmax(z / temperature + G) with independent standard Gumbel
G (Gumbel 1954; Maddison et al., arXiv:1411.0030). When G is a fixed function of the request's seed, the position in the
text and the token id, the sampled text is a function of the target's logits alone: it does not depend on how many
tokens a round accepted, what the drafter proposed, or which requests share the batch. Sampled output with speculation
then equals sampled output without it, token by token, and its distribution is the target's because the noise of
different positions is independent.

The generator is counter-based: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) with the token id as its counter and a
start hashed from (seed, position), so any element is computed alone and a block of positions is one vectorised
expression. Its output function (variant 13 of Stafford's mixers) passes BigCrush. int64 tensors wrap on overflow,
which is the arithmetic it needs; only its logical right shifts have to be implemented.

Not for cryptography.
"""

# B rows, L positions ahead, V target vocabulary, D draft vocabulary, K nodes

from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_workers.targets.device import upload

# The share of the known noise that a drafter adds to its own logits. All of it would be right for a drafter with the
# target's probabilities: then both draw the same token. A drafter's distribution is flatter than the target's, and full
# noise on a flat distribution selects tokens to which the target gives almost no probability. Measured on the
# quickstart target at temperature 1 (642 positions; share of draws that equal the drafter's first proposal), for
# drafters that agree with the target's greedy token at the given share of positions:
#     agreement   noise 0.0   0.15    0.3    0.5    0.7    1.0
#       0.63        .609      .620   .615   .611   .572   .492
#       0.83        .791      .794   .791   .787   .771   .699
#       0.90        .854      .866   .886   .891   .882   .847
#       0.97        .905      .917   .928   .949   .960   .963
NOISE_SHARE = 0.4

_WORD = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(word: int) -> int:
    """A 64-bit word as the int64 with the same bits."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 words; `>>` shifts arithmetically, so copies of the sign are masked off."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's output function."""
    words = (words ^ _shift_right(words, 30)) * _signed(_MIX_1)
    words = (words ^ _shift_right(words, 27)) * _signed(_MIX_2)
    return words ^ _shift_right(words, 31)


def gumbel(seed: int, first_position: int, num_positions: int, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of consecutive positions.

    returns [num_positions, vocab_size] float64; element (i, v) depends on (seed, first_position + i, v) alone.
    """
    # Each position's stream starts at a word mixed twice, so that neighbouring seeds and positions have other streams.
    positions = torch.arange(first_position + 1, first_position + num_positions + 1, dtype=torch.int64)
    starts = _mix(_mix(upload([_signed(seed + _WEYL)])) + positions * _signed(_WEYL))
    counters = torch.arange(1, vocab_size + 1, dtype=torch.int64) * _signed(_WEYL)
    words = _mix(starts[:, None] + counters[None, :])
    # 53 random bits, centred in their intervals: u is never 0 and never 1, so both logarithms are finite.
    uniform = (_shift_right(words, 11).to(torch.float64) + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


# Positions and numbers that are computed at a time, 8 bytes each and per request. A vocabulary of 2k gets 32 positions,
# which saves calls. A large one gets those that are asked for alone: blocks of megabytes, held by many requests for
# different times, leave the heap in pieces.
_POSITIONS, _NUMBERS = 32, 2**16


class NoiseTable:
    """The noise of one request. Drafting and verification read the same positions, and each is computed once."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self._first = 0
        self._rows = torch.empty(0, vocab_size, dtype=torch.float64)

    def at(self, position: int, num_positions: int) -> Tensor:
        """Noise of positions [position, position + num_positions): [num_positions, V] float64, a view. A position
        before that of the last call is computed again."""
        known = self._first + len(self._rows)
        if position < self._first or position + num_positions > known:
            kept = self._rows[position - self._first:] if self._first <= position < known else self._rows[:0]
            begin = position + len(kept)
            num = max(min(_POSITIONS, _NUMBERS // self.vocab_size), position + num_positions - begin)
            more = gumbel(self.seed, begin, num, self.vocab_size)
            self._first, self._rows = position, torch.cat([kept, more])
        offset = position - self._first
        return self._rows[offset:offset + num_positions]


@dataclass(frozen=True)
class RowNoise:
    """The noise of the positions ahead of each row.

    temperature  [B]        float64   1 for greedy rows, whose noise is zero
    gumbel       [B, L, V]  float64   gumbel[b, d] belongs to the token chosen at depth d + 1 (root is depth 0)
    """

    temperature: Tensor
    gumbel: Tensor

    def confidence(self, logits: Tensor, depth: int, vocabulary: Tensor | None = None) -> Tensor:
        """Log-confidence of each draft token at `depth`, given the noise under which the target will sample.

        logits      [B, K, D]   the drafter's
        vocabulary  [D] int64   target id of each draft id; None when both vocabularies are the same
        returns     [B, K, D]   log-softmax of logits / temperature + NOISE_SHARE * noise
        """
        noise = self.gumbel[:, depth - 1]
        if vocabulary is not None:
            noise = noise[:, vocabulary]
        scores = logits / self.temperature[:, None, None].to(logits.dtype)
        return torch.log_softmax(scores.add_(noise[:, None].to(logits.dtype), alpha=NOISE_SHARE), dim=-1)
