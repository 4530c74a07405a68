"""The n-gram drafter that remembers: what it knows, what not, and that no output tells that it was there."""

from collections.abc import Sequence

import pytest
import torch

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.speculation.protocol import NO_TOKEN, CommittedTokens
from eyrie_workers.targets.loading import load_target
from tests.sglang.ngram_trie import PADDING_TOKEN, WINDOW, TrieDrafter, TrieState
from tests.tiny import tiny_target

NARROW = DraftTreeShape(num_steps=4, top_k=1, num_draft_tokens=5)
WIDE = DraftTreeShape(num_steps=7, top_k=4, num_draft_tokens=8)


class Server:
    """One drafter and the texts it is shown."""

    def __init__(self, shape: DraftTreeShape, num_rows: int = 1) -> None:
        self.shape, self.drafter, self.lengths = shape, TrieDrafter(), [0] * num_rows
        self.state: TrieState = self.drafter.new_state(num_rows)

    def ask(self, prompt: Sequence[int], row: int = 0) -> list[list[int]]:
        self.drafter.admit(self.state, row, prompt)
        self.lengths[row] = 0
        return self.go_on(prompt[1:], row)

    def go_on(self, tokens: Sequence[int], row: int = 0) -> list[list[int]]:
        """The paths proposed after these tokens too, from the root to each leaf; filling nodes left out."""
        if tokens:
            self.drafter.extend(self.state, CommittedTokens(
                [row], [self.lengths[row]], [tokens], torch.empty(1, len(tokens), 0, 8)))
            self.lengths[row] += len(tokens)
        tree = self.drafter.propose(self.state, [row], self.shape)
        tokens_N, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        assert len(tokens_N) == self.shape.num_draft_tokens
        leaves = [node for node in range(1, len(tokens_N)) if node not in parents[1:]]
        paths = [path_to(leaf, tokens_N, parents) for leaf in leaves]
        return [path for path in paths if path[-1] not in (NO_TOKEN, PADDING_TOKEN)]


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    return [] if node == 0 else [*path_to(parents[node], tokens, parents), tokens[node]]


def test_what_followed_a_suffix_in_another_request_is_proposed_latest_first() -> None:
    server = Server(NARROW)
    server.ask([5, 1, 2, 3, 7, 8])
    assert server.ask([9, 2, 3]) == [[7, 8]]
    server.ask([6, 2, 3, 4])
    assert server.ask([8, 2, 3])[0] == [4]


def test_a_text_is_inserted_after_it_was_drafted_for() -> None:
    server = Server(NARROW)
    assert server.ask([1, 2, 3, 1, 2]) == []
    assert server.ask([1, 2, 3, 1, 2])[0][0] == 3


def test_of_a_prompt_only_the_last_window_is_inserted() -> None:
    server = Server(NARROW)
    server.ask([1, 2, *range(10, 10 + WINDOW)])
    assert server.ask([1, 2]) == []
    assert server.ask([50, 10, 11])[0] == [12, 13, 14, 15]


def test_a_suffix_inserted_after_its_node_was_advanced_is_not_found_until_its_first_token_is_new() -> None:
    server = Server(NARROW)
    text = [1, 2, 7, 1, 7, 9, 2]
    server.ask(text)
    assert server.go_on([7]) == [[9, 2]]  # what followed 7; that 1 followed 2 7 was learned when 2 had been passed
    assert server.ask([*text, 7])[0] == [1, 7, 9, 2]


def test_a_tree_contains_matches_of_shorter_and_longer_suffixes_up_to_its_nodes() -> None:
    server = Server(WIDE)
    server.ask([1, 2, 3, 4, 5])
    server.ask([8, 3, 6, 5])
    assert server.ask([7, 2, 3]) == [[4, 5], [6, 5]]
    assert Server(NARROW).ask([1]) == []


def test_top_k_limits_the_children_of_short_matches_and_long_matches_have_fewer() -> None:
    server = Server(WIDE)
    for follower in range(20, 30):
        server.ask([3, follower])
    assert server.ask([9, 3]) == [[29], [28], [27]]  # int(1 + 16 * 3 / 17) of the ten
    long = list(range(60, 77))
    for follower in (20, 21):
        server.ask([*long, follower])
    assert server.ask(long)[0] == [21]


def test_it_is_lossless_and_a_repeated_request_is_drafted_entirely(
        tmp_path_factory: pytest.TempPathFactory) -> None:
    target = load_target(tiny_target(tmp_path_factory.mktemp("target"), "llama", seed=5))
    prompt = [7, 30, 12, 55]
    plain, = Engine(target).generate([Request("plain", prompt, 40)])
    engine = Engine(target, TrieDrafter())
    first, second = (engine.generate([Request(name, prompt, 40)], WIDE)[0] for name in ("first", "second"))
    assert first.token_ids == second.token_ids == plain.token_ids
    assert second.tau > first.tau
    assert second.tau > 4
