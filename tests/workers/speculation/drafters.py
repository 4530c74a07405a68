"""Drafters for tests: real implementations of the protocol that know nothing, or everything."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import CommittedTokens, DraftStep, DraftTree
from eyrie_workers.speculation.tree import build_draft_tree
from eyrie_workers.targets.model import TargetModel


@dataclass
class TextState:
    """The text of every row as the pairs tell it, and the states that came with it."""

    texts: list[list[int]]
    aux: list[list[Tensor]]


@dataclass
class RandomDrafter:
    """Proposes noise, and checks that the engine feeds it every settled pair exactly once."""

    vocab_size: int
    seed: int = 0
    aux_layers: tuple[int, ...] = (1, 2)
    max_length: int = 512
    extended: int = 0

    def new_state(self, num_rows: int) -> TextState:
        return TextState([[] for _ in range(num_rows)], [[] for _ in range(num_rows)])

    def admit(self, state: TextState, row: int, prompt: Sequence[int]) -> None:
        state.texts[row], state.aux[row] = [prompt[0]], []

    def extend(self, state: TextState, pairs: CommittedTokens) -> None:
        assert len(set(pairs.rows)) == len(pairs.rows)
        assert pairs.aux.shape[1] == max(map(len, pairs.tokens))
        for index, (row, tokens) in enumerate(zip(pairs.rows, pairs.tokens, strict=True)):
            assert tokens
            assert pairs.starts[index] == len(state.texts[row]) - 1
            state.texts[row] += tokens
            state.aux[row] += list(pairs.aux[index, :len(tokens)])
        self.extended += 1

    def propose(self, state: TextState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        generator = torch.Generator().manual_seed(self.seed + sum(len(state.texts[row]) for row in rows))

        def logits(num_nodes: int) -> Tensor:
            return torch.randn(len(rows), num_nodes, self.vocab_size, generator=generator)

        def step(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
            assert mask.shape[:2] == tokens.shape
            assert shape.static or mask.shape[2] == depth * tokens.shape[1]
            assert bool((mask.sum(-1) == depth).all())  # itself and one ancestor per depth above
            return DraftStep(logits(tokens.shape[1]), hidden)

        return build_draft_tree(DraftStep(logits(1), torch.zeros(len(rows), 1, 1)), step, shape, None, noise)


@dataclass
class OracleDrafter(RandomDrafter):
    """Proposes what the target would say, by asking it, spoilt now and then; so that long paths are accepted."""

    target: TargetModel | None = None
    spoil_every: int = 4
    """Every n-th proposal the best token is made the second best."""

    calls: int = field(default=0)

    def propose(self, state: TextState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        assert self.target is not None
        target = self.target
        paths: list[list[list[int]]] = [[[]] for _ in rows]  # per row, the draft tokens above each frontier node

        def ask(texts: list[list[int]]) -> Tensor:
            states = target.hidden_states([torch.tensor(text) for text in texts], ())
            logits = torch.stack([target.logits(last[-1:])[0] for _, last in states]).float()
            self.calls += 1
            if self.spoil_every and self.calls % self.spoil_every == 0:
                best = logits.topk(2).indices
                swapped = logits.gather(1, best.flip(1))
                logits = logits.scatter(1, best, swapped)
            return logits

        def all_logits() -> Tensor:
            texts = [state.texts[row] + path for row, row_paths in zip(rows, paths, strict=True)
                     for path in row_paths]
            return ask(texts).view(len(paths), -1, target.config.vocab_size)

        def step(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
            # hidden carries the path of each node's parent, as numbers: what a real drafter's state stands for.
            for index in range(len(paths)):
                paths[index] = [[int(t) for t in hidden[index, node, 1:1 + int(hidden[index, node, 0])]]
                                + [int(tokens[index, node])] for node in range(tokens.shape[1])]
            return DraftStep(all_logits(), pack())

        def pack() -> Tensor:
            packed = torch.zeros(len(paths), len(paths[0]), 1 + shape.num_steps, dtype=torch.float64)
            for index, row_paths in enumerate(paths):
                for node, path in enumerate(row_paths):
                    packed[index, node, 0] = len(path)
                    packed[index, node, 1:1 + len(path)] = torch.tensor(path)
            return packed

        return build_draft_tree(DraftStep(all_logits(), pack()), step, shape, None, noise)
