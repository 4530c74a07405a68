"""Whether a drafter's confidence predicts acceptance, as EAGLE-2 assumes (arXiv:2406.16858, section 3.2).

    python -m benchmarks.calibration --target quickstart --drafter DIR --out DIR

The target answers prompts with the drafter, and every proposed tree is recorded: a node's score is the logarithm of the
product of confidences along its path. The answer then determines the accepted nodes: those whose path continues the
text. Two curves are computed:

    path   over all nodes: the share of accepted paths against the product of their confidences
    step   over nodes whose parent was accepted: the share accepted against the node's own confidence

in equal bins of confidence, each with its count and a 95 % Wilson interval, and the expected calibration error

    ECE = sum over bins of (n_b / n) |accepted_b - confidence_b|          (Guo et al., arXiv:1706.04599)

with confidence_b the mean confidence of the bin; also without the lowest bin, which has nearly all nodes of a wide tree
and would hide the rest. Nodes of one tree are not independent, so the intervals are somewhat too narrow. A dynamic tree
needs ordered confidences; calibrated ones make its products acceptance rates.

`by_rank` counts, where the parent was accepted, how often the best candidate was accepted, the second best, and so on:
the prior of static trees (`speculation.tree`). Nodes beyond the end of an answer are not counted: their
acceptance is unknown.

The trees have every node that `--num-steps` and `--top-k` can grow, 5/4/69 by default. Works for any family that
proposes with confidences; an n-gram drafter has none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.contract.benchmark import QUICKSTART_SUITES
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import Environment
from eyrie_api.errors import InvalidInput
from eyrie_workers.data.suites import load_suite, select
from eyrie_workers.machine import environment
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, CommittedTokens, Drafter, DrafterState, DraftTree
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.templates import ChatTokenizer

NUM_BINS = 10
_Z = 1.96  # 95 %


class Bin(Frozen):
    """Nodes whose confidence lies in [low, high), the last bin's high included."""

    low: float
    high: float
    count: int
    accepted: int
    confidence: float
    """Mean of the bin's nodes; the middle of an empty bin."""

    accepted_low: float
    accepted_high: float
    """95 % Wilson interval of the share accepted."""

    @property
    def share(self) -> float:
        """Of the bin's nodes, those accepted."""
        return self.accepted / max(1, self.count)


class Curve(Frozen):
    """One kind of confidence against acceptance."""

    bins: tuple[Bin, ...]
    error: float
    """Expected calibration error."""

    error_likely: float
    """The same over all bins but the lowest."""

    @property
    def count(self) -> int:
        """Nodes."""
        return sum(one.count for one in self.bins)


class RankCount(Frozen):
    """Guesses of one rank whose parent was accepted."""

    rank: int
    count: int
    accepted: int


class CalibrationReport(Frozen):
    """`calibration.json`."""

    target: str
    drafter: str
    shape: DraftTreeShape
    temperature: float
    prompts: int
    rounds: int
    tokens: int
    path: Curve
    step: Curve
    by_rank: tuple[RankCount, ...]
    environment: Environment


@dataclass(frozen=True)
class Proposal:
    """One row's tree; its root is the text's token `at`."""

    at: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class EvaluatedNode:
    """A node of a tree within the answer, with its acceptance."""

    path: float
    step: float
    rank: int
    accepted: bool
    parent_accepted: bool


class RecordingDrafter:
    """A drafter whose proposals for a single row are recorded, with the row's length."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._settled = 0
        self.proposals: list[Proposal] = []

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The drafter's."""
        return self._drafter.aux_layers

    @property
    def max_length(self) -> int:
        """The drafter's."""
        return self._drafter.max_length

    def new_state(self, num_rows: int) -> DrafterState:
        """The drafter's."""
        return self._drafter.new_state(num_rows)

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Begin a new text and discard the proposals of the previous one."""
        self.proposals = []
        self._drafter.admit(state, row, prompt)

    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Pairs up to i settle token i+1."""
        self._settled = pairs.ends[0]
        self._drafter.extend(state, pairs)

    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """The drafter's tree, recorded."""
        tree = self._drafter.propose(state, rows, shape, noise)
        assert tree.tokens.shape[0] == 1, "texts are answered one at a time"
        tokens, parents, scores = (tuple(x[0].tolist()) for x in (tree.tokens, tree.parents, tree.scores))
        self.proposals.append(Proposal(self._settled, tokens, parents, scores))
        return tree


def evaluate(proposal: Proposal, text: Sequence[int]) -> list[EvaluatedNode]:
    """Which nodes the text accepted, of those within the text. Siblings are ranked by their scores."""
    depths, accepted, nodes = [0], [True], []
    siblings: dict[int, list[int]] = {}
    for node in range(1, len(proposal.tokens)):
        siblings.setdefault(proposal.parents[node], []).append(node)
    rank_of = {node: rank for group in siblings.values()
               for rank, node in enumerate(sorted(group, key=lambda node: (-proposal.scores[node], node)))}
    for node in range(1, len(proposal.tokens)):
        parent, token, score = proposal.parents[node], proposal.tokens[node], proposal.scores[node]
        depths.append(depths[parent] + 1)
        at = proposal.at + depths[node]
        known = at < len(text)
        accepted.append(known and accepted[parent] and token == text[at])
        if known and token != NO_TOKEN and math.isfinite(score):
            step = math.exp(min(0.0, score - proposal.scores[parent]))
            nodes.append(EvaluatedNode(math.exp(score), step, rank_of[node], accepted[node], accepted[parent]))
    return nodes


def curve(outcomes: Sequence[tuple[float, bool]], num_bins: int = NUM_BINS) -> Curve:
    """Outcomes (confidence, accepted) in equal bins."""
    members: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    for confidence, accepted in outcomes:
        members[min(num_bins - 1, int(confidence * num_bins))].append((confidence, accepted))
    bins = []
    for number, inside in enumerate(members):
        count, right = len(inside), sum(accepted for _, accepted in inside)
        low, high = wilson(right, count)
        middle = (number + 0.5) / num_bins
        bins.append(Bin(low=number / num_bins, high=(number + 1) / num_bins, count=count, accepted=right,
                        confidence=sum(confidence for confidence, _ in inside) / count if count else middle,
                        accepted_low=low, accepted_high=high))
    return Curve(bins=tuple(bins), error=_error(bins), error_likely=_error(bins[1:]))


def _error(bins: Sequence[Bin]) -> float:
    return sum(one.count * abs(one.share - one.confidence) for one in bins) / max(1, sum(one.count for one in bins))


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927), within [0, 1] and valid near its ends. [0, 1] for an empty sample."""
    if count == 0:
        return 0.0, 1.0
    share, square = right / count, _Z**2 / count
    centre = (share + square / 2) / (1 + square)
    reach = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def ranks(nodes: Sequence[EvaluatedNode]) -> tuple[RankCount, ...]:
    """Counts by rank, where the parent was accepted."""
    reached = [node for node in nodes if node.parent_accepted]
    return tuple(RankCount(rank=rank, count=sum(node.rank == rank for node in reached),
                           accepted=sum(node.rank == rank and node.accepted for node in reached))
                 for rank in range(1 + max((node.rank for node in reached), default=-1)))


def measure(target: TargetModel, drafter: Drafter, requests: Sequence[Request],
            shape: DraftTreeShape) -> tuple[list[EvaluatedNode], int, int]:
    """Answer the requests, one at a time. Returns nodes, number of rounds, number of tokens.

    Raises InvalidInput when nothing was proposed.
    """
    recorder, nodes, rounds, tokens = RecordingDrafter(drafter), [], 0, 0
    engine = Engine(target, recorder)
    for request in requests:
        answer = engine.generate([request], shape)[0]
        text = [*request.prompt_ids, *answer.token_ids]
        nodes += [node for proposal in recorder.proposals for node in evaluate(proposal, text)]
        rounds += len(recorder.proposals)
        tokens += len(answer.token_ids)
    if not nodes:
        raise InvalidInput("the drafter proposed nothing with a confidence", "give a drafter that was trained")
    return nodes, rounds, tokens


def calibrate(target: TargetModel, drafter: Drafter, requests: Sequence[Request], shape: DraftTreeShape,
              named: tuple[str, str], temperature: float) -> CalibrationReport:
    """Measure and report. `named`: names of target and drafter."""
    nodes, rounds, tokens = measure(target, drafter, requests, shape)
    return CalibrationReport(
        target=named[0], drafter=named[1], shape=shape, temperature=temperature, prompts=len(requests), rounds=rounds,
        tokens=tokens, path=curve([(node.path, node.accepted) for node in nodes]),
        step=curve([(node.step, node.accepted) for node in nodes if node.parent_accepted]), by_rank=ranks(nodes),
        environment=environment(str(target.dtype).removeprefix("torch.")))


def prompts_for(directory: Path, num_prompts: int, max_new_tokens: int, sampling: SamplingSpec) -> list[Request]:
    """The first prompts of the quickstart suites, in turn, rendered for the target."""
    tokenizer = ChatTokenizer(directory)
    suites = [select(load_suite(suite), 0, num_prompts) for suite in QUICKSTART_SUITES]
    mixed = [prompt for turn in zip(*suites, strict=False) for prompt in turn][:num_prompts]
    return [Request(prompt.id, tokenizer.render(list(prompt.messages), list(prompt.tools) or None), max_new_tokens,
                    sampling, seed=number, stop_ids=tokenizer.eos_ids)
            for number, prompt in enumerate(mixed)]
