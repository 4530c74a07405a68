"""Requests to the engine, the tokens it returns per step, and the state of each running request. No tensors but noise.

A request ends for one of two reasons: `stop`, when the target generated one of its stop ids (which is the last token of
the answer), or `length`, when it has `max_new_tokens` tokens or its text fills the context. Tokens that a round
accepted beyond the end are dropped and not counted: the histogram holds draft tokens that are part of the answer.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_workers.speculation.noise import NoiseTable
from eyrie_workers.speculation.protocol import NO_TOKEN
from eyrie_workers.speculation.verify import TokenLogprobs

FinishReason = Literal["stop", "length"]
GREEDY = SamplingSpec(temperature=0.0)


@dataclass(frozen=True)
class Request:
    """One prompt to be completed."""

    id: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingSpec = GREEDY
    seed: int = 0
    """Determines the sampled answer, independently of the other requests in the batch."""

    stop_ids: Sequence[int] = ()
    top_logprobs: int | None = None
    """Alternatives that each token's log probability is returned with, in `StepOutput`; None for no log probabilities.
    The answers of a `DecodingEngine` have none."""

    draft: bool = True
    """False decodes this request without drafting, next to others that draft."""

    trace: bool = False
    """Return every round's tree in `StepOutput.rounds`."""


@dataclass(frozen=True)
class TracedRound:
    """What one round proposed for a request, and what became of it."""

    tokens: list[int]
    """Of each node; node 0 is the last token before the round. Empty for the prefill, which has no tree."""

    parents: list[int]
    """Index of each node's parent; the root is its own."""

    accepted: list[int]
    """Nodes whose tokens are part of the answer, in its order."""

    emitted: list[int]
    """Tokens of this round: those of the accepted nodes, then the bonus token unless the answer ended before it."""


@dataclass(frozen=True)
class StepOutput:
    """New tokens of one request after one step."""

    id: str
    token_ids: list[int]
    accepted: list[int]
    """Draft tokens accepted in each round of this step; empty for the prefill."""

    finish_reason: FinishReason | None = None
    generation: "Generation | None" = None
    """The whole answer, with the finish reason."""

    drafted: list[int] = field(default_factory=list)
    """Draft tokens requested in each of these rounds; 0 for a round without drafting."""

    error: EyrieError | None = None
    """Why the request ended without an answer."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, where the request asks for them."""

    rounds: list[TracedRound] = field(default_factory=list)
    """Of this step, where the request asks for them."""


@dataclass(frozen=True)
class Generation:
    """A finished answer. Times are wall-clock seconds since the request was submitted."""

    id: str
    num_prompt_tokens: int
    token_ids: list[int]
    """With the stop id, when finish_reason is `stop`."""

    finish_reason: FinishReason
    rounds: int
    """Target passes after the prefill (whose pass yields the first token)."""

    accepted_histogram: list[int]
    """[k]: rounds in which k draft tokens were accepted."""

    first_token_s: float
    total_s: float

    @property
    def tau(self) -> float:
        """Mean tokens per target pass, bonus token included; 1 when there was no round."""
        accepted = sum(k * count for k, count in enumerate(self.accepted_histogram))
        return 1.0 + accepted / self.rounds if self.rounds else 1.0


def check_request(request: Request, vocab_size: int, max_length: int) -> None:
    """Raises InvalidInput for a request that cannot be decoded."""
    if not request.prompt_ids:
        raise InvalidInput(f"request {request.id!r}: prompt_ids is empty", "give at least one token")
    if request.max_new_tokens < 1:
        raise InvalidInput(f"request {request.id!r}: max_new_tokens is {request.max_new_tokens}", "give at least 1")
    if request.top_logprobs is not None and request.top_logprobs < 0:
        raise InvalidInput(f"request {request.id!r}: top_logprobs is {request.top_logprobs}", "give at least 0")
    if len(request.prompt_ids) >= max_length:
        raise InvalidInput(f"request {request.id!r}: a prompt of {len(request.prompt_ids)} tokens leaves no room in a "
                           f"context of {max_length}", "shorten the prompt")
    if not all(0 <= token < vocab_size for token in request.prompt_ids):
        raise InvalidInput(f"request {request.id!r}: prompt_ids go beyond the vocabulary of {vocab_size}",
                           "tokenise with the target's own tokenizer")


@dataclass
class RequestState:
    """One request being decoded."""

    request: Request
    drafter_row: int
    noise: NoiseTable | None
    """None for greedy decoding."""

    submitted_at: float
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far. The last token has not been through the target."""

    histogram: list[int] = field(default_factory=list)
    rounds: int = 0
    drafting: bool = False
    """Whether the drafter has received all committed tokens of this row."""

    first_token_s: float = 0.0
    finish_reason: FinishReason | None = None
    error: EyrieError | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take(self, tokens: Sequence[int], max_length: int) -> list[int]:
        """Append accepted tokens up to the first that ends the request; return those appended."""
        taken: list[int] = []
        most = len(self.request.prompt_ids) + self.request.max_new_tokens  # prompt and answer
        for token in tokens:
            taken.append(token)
            if token in self.request.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) + len(taken) >= min(most, max_length):
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        self.tokens += taken
        return taken

    def count_round(self, accepted: int) -> None:
        self.rounds += 1
        self.histogram += [0] * (accepted + 1 - len(self.histogram))  # up to the most accepted so far
        self.histogram[accepted] += 1

    def progress(self, taken: list[int], accepted: list[int], drafted: list[int],
                 logprobs: list[TokenLogprobs], rounds: list[TracedRound]) -> StepOutput:
        generation = None
        if self.error is None and self.finish_reason is not None:
            num_prompt = len(self.request.prompt_ids)
            generation = Generation(
                id=self.request.id, num_prompt_tokens=num_prompt, token_ids=self.tokens[num_prompt:],
                finish_reason=self.finish_reason, rounds=self.rounds, accepted_histogram=list(self.histogram),
                first_token_s=self.first_token_s, total_s=time.perf_counter() - self.submitted_at)
        return StepOutput(self.request.id, taken, accepted, self.finish_reason, generation, drafted, self.error,
                          logprobs, rounds)


def traced_round(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int],
                 emitted: list[int]) -> TracedRound:
    """One row's round, without the nodes that hold no proposal.

    path     accepted nodes in order, root included
    emitted  tokens that the answer took: of a path beyond the end of the answer only the first
    """
    filled = [node for node, token in enumerate(tokens) if token != NO_TOKEN]  # the root, and proposals
    place = {node: index for index, node in enumerate(filled)}  # of a node among those
    return TracedRound(tokens=[tokens[node] for node in filled], parents=[place[parents[node]] for node in filled],
                       accepted=[place[node] for node in path[1:len(emitted) + 1]], emitted=emitted)
