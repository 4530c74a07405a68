"""Ranks the target's layers by a linear probe, for comparison with the layers selected by position.

    python -m eyrie_workers.stages.layer_probe --target quickstart --rows <regenerate's directory>

A drafter at position i knows the committed token i + 1 and reads the target's states at i; it first predicts the
target's most probable token after i + 1. The value of a layer is what its state at i adds to the embedding of token
i + 1 in predicting that token. The probe is ridge regression onto the target's own final state at i + 1, whose product
with the output matrix gives the token,

    W = (X'X + c I)^-1 X' Y

    X   states at i of some layers, the embedding of token i + 1, and 1        Y   the final state at i + 1

Columns of X are scaled to one size first, so that c has the same meaning for every layer; of several c the best one
counts, for each probe alike. Where H is large, states are projected to `_WIDTH` values at random, and of many layers
only some are probed. The score is the share of held-out positions at which (X W) lm_head' has the target's most
probable token. The products X'X and X'Y of all layers are computed in one pass; any subset of layers is then a small
system of its own. *Alone* each layer is probed with the embedding only; *together* three are selected greedily, each
the one that adds most to those before (forward selection). A linear probe is not a drafter: it reads a single position.
The ranking is informative only: `targets.config` or `capture.aux_layers` select the layers.

    T positions, L layers, H hidden, V vocabulary
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import EyrieError, NoUsableData, report_error
from eyrie_workers.data.rows import ROWS, read_rows
from eyrie_workers.targets.config import choose_aux_layers
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.targets.model import TargetModel

PROBE_TOKENS = 12_288  # tokens of answered rows that are probed, at most
_HELD_OUT = 4  # every fourth row is used for scoring and not for fitting
_RIDGES = (0.03, 0.1, 0.3)  # of the number of positions, once every column has mean square 1
_WIDTH = 256
_MAX_LAYERS = 32
_MAX_SCORED = 2048  # of held-out positions: each costs a row of logits per reading and c


@dataclass(frozen=True)
class LayerScore:
    """Share of the target's tokens that one probe predicts."""

    layers: tuple[int, ...]
    agreement: float  # share of held-out positions


@dataclass(frozen=True)
class LayerProbe:
    embedding: float  # agreement of a probe of the embedding of token i + 1 alone
    alone: tuple[LayerScore, ...]  # each layer, the best first
    together: tuple[LayerScore, ...]  # the best of forward selection: one, two, three layers
    chosen: LayerScore  # the layers selected by position or by the spec
    positions: int

    def summary(self) -> str:
        best = self.together[-1]
        ranks = ", ".join(f"{score.layers[0]} ({score.agreement:.1%})" for score in self.alone[:5])
        noise = (best.agreement * (1 - best.agreement) / self.positions) ** 0.5
        return (f"a linear probe of layers {list(self.chosen.layers)} predicts {self.chosen.agreement:.1%} of the "
                f"target's next tokens, the best found, {list(best.layers)}, {best.agreement:.1%}; alone the best are "
                f"{ranks}; the token alone {self.embedding:.1%}; {self.positions} positions held out, "
                f"standard error {noise:.1%}")


@dataclass(frozen=True)
class _Readings:
    """X'X and X'Y of all layers, embedding and 1 side by side, and the held-out X with the target's choices."""

    gram: Tensor
    cross: Tensor
    held_out: Tensor
    choice: Tensor
    lm_head: Tensor
    width: int
    positions: int  # number of positions fitted to

    def columns(self, layers: Sequence[int]) -> Tensor:
        """Columns of some layers, by index, followed by those of the embedding and of 1."""
        last = self.gram.shape[0] - self.width - 1
        each = [*(range(at * self.width, (at + 1) * self.width) for at in layers), range(last, self.gram.shape[0])]
        return torch.tensor([*chain.from_iterable(each)], device=self.gram.device)

    def agreement(self, layers: Sequence[int]) -> float:
        """Agreement of a probe of some layers, by index."""
        which = self.columns(layers)
        # Scale every column to mean square 1, so that one ridge c has the same meaning for all layers.
        size = (self.gram.diagonal()[which] / self.positions).sqrt().clamp_min(1e-12)
        system = self.gram[which][:, which] / (size[:, None] * size)
        wanted, seen = self.cross[which] / size[:, None], self.held_out[:, which] / size
        shares = []
        for ridge in _RIDGES:
            factor = torch.linalg.cholesky(
                system + ridge * self.positions * torch.eye(which.numel(), device=system.device))
            logits = (seen @ torch.cholesky_solve(wanted, factor)).to(self.lm_head.dtype) @ self.lm_head.T
            shares.append(float((logits.argmax(-1) == self.choice).double().mean()))
        return max(shares)


def probe_layers(target: TargetModel, rows: Sequence[tuple[Tensor, int]], chosen: Sequence[int],
                 layers: Sequence[int] | None = None) -> LayerProbe:
    """Rank a target's layers on some rows (token ids [T], how many are prompt).

    chosen   the layers to compare with
    layers   those that are ranked; default: the embeddings and every layer but the last, whose state engines keep
    """
    among = range(target.config.num_layers) if layers is None else layers
    ranked = tuple(sorted({*among[::-(-len(among) // _MAX_LAYERS)], *chosen}))
    readings = _read(target, rows, ranked)
    place = {layer: at for at, layer in enumerate(ranked)}

    def score(some: Sequence[int]) -> LayerScore:
        return LayerScore(tuple(sorted(some)), readings.agreement([place[layer] for layer in some]))

    alone = sorted((score([layer]) for layer in ranked), key=lambda layer: -layer.agreement)
    best: list[int] = list(alone[0].layers)
    together = [alone[0]]
    while len(together) < min(3, len(ranked)):
        together.append(max((score([*best, layer]) for layer in ranked if layer not in best),
                            key=lambda layers: layers.agreement))
        best = list(together[-1].layers)
    return LayerProbe(readings.agreement([]), tuple(alone), tuple(together), score(chosen), readings.choice.numel())


def _read(target: TargetModel, rows: Sequence[tuple[Tensor, int]], layers: Sequence[int]) -> _Readings:
    hidden, fitted = target.config.hidden_size, 0
    width = min(_WIDTH, hidden)
    draw = torch.Generator().manual_seed(0)
    # A Gaussian projection of fixed seed, scaled so that it preserves squared norms up to the factor width / hidden.
    narrow = torch.eye(hidden) if width == hidden else torch.randn(hidden, width, generator=draw) / hidden**0.5
    narrow, size = narrow.to(target.device), len(layers) * width + width + 1
    gram, cross = narrow.new_zeros(size, size), narrow.new_zeros(size, hidden)
    held_out: list[Tensor] = []
    choices: list[Tensor] = []
    lm_head, embed = target.lm_head_weight, target.embed_weight
    for number, (ids, num_prompt) in enumerate(rows):
        states, last = target.hidden_states([ids], layers)[0]
        # Position i drafts when token i + 1 is an answer token; it predicts the target's token after i + 1.
        first = max(num_prompt - 1, 0)
        if ids.numel() - first < 2:
            continue
        tokens = embed[ids[first + 1:].to(embed.device)].float()
        x = torch.cat([(states[first:-1].float() @ narrow).flatten(1), tokens @ narrow,
                       tokens.new_ones(tokens.shape[0], 1)], 1)
        y = last[first + 1:].float()
        if number % _HELD_OUT == 0:
            held_out.append(x)
            choices.append((y.to(lm_head.dtype) @ lm_head.T).argmax(-1))
        else:
            gram.addmm_(x.T, x)
            cross.addmm_(x.T, y)
            fitted += x.shape[0]
    if not held_out or not bool(gram.any()):
        raise NoUsableData(f"{len(rows)} rows are too few to rank layers", "give at least two rows with answers")
    scored, choice = torch.cat(held_out)[:_MAX_SCORED], torch.cat(choices)[:_MAX_SCORED]
    return _Readings(gram, cross, scored, choice, lm_head, width, fitted)


def rows_to_probe(rows_dir: Path, num_tokens: int = PROBE_TOKENS, longest: int = 512) -> list[tuple[Tensor, int]]:
    """The first answered rows of a directory, each cut at `longest` tokens, until they hold `num_tokens` tokens."""
    rows: list[tuple[Tensor, int]] = []
    taken = 0
    for row in read_rows(rows_dir / ROWS):
        if len(row.prompt_ids) < longest:
            rows.append((torch.tensor((row.prompt_ids + row.answer_ids)[:longest]), len(row.prompt_ids)))
            taken += rows[-1][0].numel()
        if taken >= num_tokens:
            break
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rank a target's layers by the accuracy of a linear probe of each.")
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--rows", type=Path, required=True, help="output directory of regenerate")
    parser.add_argument("--tokens", type=int, default=PROBE_TOKENS)
    arguments = parser.parse_args(argv)
    try:
        target = load_target(resolve(TargetSpec(model=arguments.target)))
        config = target.config
        chosen = choose_aux_layers(config.num_layers, config.layer_types).aux_layers
        probe = probe_layers(target, rows_to_probe(arguments.rows, arguments.tokens), chosen)
    except EyrieError as error:
        return report_error(error)
    for score in probe.alone:
        print(f"layer {score.layers[0]:3}  {score.agreement:.4f}")
    for score in probe.together:
        print(f"together {list(score.layers)}  {score.agreement:.4f}")
    print(json.dumps({"embedding": probe.embedding, "chosen": list(probe.chosen.layers),
                      "chosen_agreement": probe.chosen.agreement, "best": list(probe.together[-1].layers),
                      "best_agreement": probe.together[-1].agreement, "positions": probe.positions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
