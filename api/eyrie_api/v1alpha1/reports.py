"""What was measured: stage reports, leaderboard entries, decisions. Speed is always against the same engine undrafted.

Definitions, once: tau counts the bonus token (tau = 1 + accepted draft tokens / rounds). `acceptance[d]` is
P(draft token d+1 accepted | token d was). `speedup` is the ratio of tokens per second of interleaved variants.
"""

from typing import Literal

from pydantic import Field

from eyrie_api.v1alpha1.capture import StateSourceName
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.engine import EngineKind
from eyrie_api.v1alpha1.model import Frozen, Interval, Probability
from eyrie_api.v1alpha1.tuning import DraftTime, OperatingMap, StepTime, Trial


class Environment(Frozen):
    """Where a number was measured; without it a number is gossip."""

    hardware: str
    cpu_count: int
    threads: int
    torch: str
    python: str
    dtype: str
    code_version: str
    date: str


class EngineUsed(Frozen):
    """The engine that a stage measured in."""

    kind: EngineKind
    version: str
    """As the engine reports it; of the embedded engine, Eyrie's own version and digest of its source."""

    dtype: str
    device: str
    limits: tuple[str, ...] = ()
    """What could not be measured or shown in this engine on this device, one sentence each."""

    restarts: int = 0
    """Servers that ended while they were measured and were started again, over all runs of the stage."""


QuarantineKind = Literal["malformed", "too-long", "benchmark", "declined", "filtered", "failed", "empty", "truncated"]


class QuarantinedRow(Frozen):
    """One input row that could not be used."""

    source: str
    line: int = Field(ge=1)
    reason: str
    kind: QuarantineKind = "malformed"
    """Of the data: malformed, too-long, benchmark. Of the endpoint: declined, filtered, failed. Of the answer: empty,
    truncated."""


class Lengths(Frozen):
    """How long texts are, in tokens."""

    p50: int
    p90: int
    p99: int
    most: int


class RegenerateReport(Frozen):
    """What became of the conversations."""

    engine: str = ""
    """Where the answers were generated: `embedded`, `sglang`, `openai` or `openai-batch`; `none` for answers of the
    data (`data.answered`)."""

    rows_read: int
    rows_answered: int
    rows_held_out: int
    rows_quarantined: int
    rows_resumed: int = 0
    """Answered by an earlier run of this stage and kept."""

    duplicates: int = 0
    near_duplicates: int = 0
    outcomes: dict[str, dict[str, int]] = {}
    """By source: rows `answered`, of them `truncated`, and rows quarantined, by kind."""

    conversations_ended: dict[str, int] = {}
    """With `turns: all`: conversations that ended before their last turn, by reason."""

    rows_retokenised: int = 0
    """Answered in text alone, by an endpoint or in the data: their ids are the tokenizer's, not the target's."""

    rows_ids_differ: int = 0
    """Of these, rows whose ids are certainly not those the target produced: another number of them, or another text."""

    overlaps: dict[str, int] = {}
    """Rows that share 13 words in a row with a benchmark suite (`suites`) or a held-out prompt (`held-out`)."""

    prompt_lengths: Lengths | None = None
    answer_lengths: Lengths | None = None
    languages: dict[str, int] = {}
    """Prompts by language, guessed from their letters and commonest words."""

    prompt_tokens: int
    answer_tokens: int
    finish_reasons: dict[str, int]
    sources: dict[str, int]
    seconds: float
    tokens_per_s: float
    quarantined: tuple[QuarantinedRow, ...] = ()
    """The first hundred; the file holds all."""


class LayerChoice(Frozen):
    """Which hidden states are captured, and why."""

    aux_layers: tuple[int, ...]
    """`hidden_states` indices (0 = embeddings)."""

    reason: str


class CaptureReport(Frozen):
    """What was recorded."""

    source: StateSourceName
    """What computed the states, whatever the job's engine is."""

    rows: int
    tokens: int
    supervised_tokens: int
    bytes: int
    bytes_per_token: float
    shards: int
    layers: LayerChoice
    hidden_size: int
    codec: str
    final_state: str = "keep"
    states_error: dict[str, float] = {}
    """What the codec changes: |stored - state| / |state|, root mean square over a sample, by aux layer, and `final`."""

    checked: dict[str, float] = {}
    """By aux layer: relative distance to the same state computed by `transformers`, on a few rows."""

    repaired_shards: tuple[str, ...] = ()
    """Made again because they were damaged."""

    restarts: int = 0
    """Servers of the serving engine that ended during the capture and were replaced, over all runs of the stage."""

    rows_cut: int = 0
    """Cut at `max_length` tokens."""

    rows_dropped: int = 0
    """Left out because their prompt alone reaches `max_length`."""

    seconds: float
    tokens_per_s: float
    """While states were being recorded: loading the target and the check left out."""

    prefill_tokens_per_s: float = 0.0
    """Of the target's forward passes alone: what capture could reach if storing cost nothing."""


class VocabularyReport(Frozen):
    """What share of the supervised tokens the draft vocabulary covers."""

    draft_vocab_size: int
    vocab_size: int
    coverage: Probability
    coverage_curve: dict[int, float]
    """Coverage at other sizes, for choosing one."""


class CheckpointReport(Frozen):
    """One exported drafter."""

    name: str
    """`<candidate>-step-<n>`."""

    candidate: str
    step: int
    path: str
    """Relative to the stage's output directory."""

    digest: str
    epoch: float
    loss: float
    accuracy: tuple[float, ...]
    """Top-1 agreement with the target at each TTT step, on held-out captured rows."""

    conditional_acceptance: tuple[float, ...]
    """P(step d right | all before right), same rows."""

    theoretical_speedup: float
    """Expected tokens per target pass if drafting and verifying were free: 1 + sum of cumulative acceptance."""


class SourceRows(Frozen):
    """The rows of one source that a candidate was trained on."""

    rows: int
    """Different rows: each is read once in every epoch."""

    tokens: int
    """Of these rows, prompts included."""


class TrainReport(Frozen):
    """One candidate's training run."""

    candidate: str
    family: str = "eagle3"
    steps: int
    tokens: int
    supervised_tokens: int
    seconds: float
    tokens_per_s: float
    padding_share: Probability
    """Of the rows that were computed, how many were there for a round number only."""

    data_wait_share: Probability
    vocabulary: VocabularyReport
    checkpoints: tuple[CheckpointReport, ...]
    resumed_from_step: int = 0
    parameters: int = 0
    mfu: float = 0.0
    """Arithmetic the loss and its gradient need, per second, over the fastest matrix product measured here."""

    processes: int = 1
    stopped_early: bool = False
    rows: int = 0
    """Different rows of the capture that it was trained on: all but those kept for evaluation, or a draw of them
    (`data.mix`)."""

    sources: dict[str, SourceRows] = {}
    """These rows by source; empty for captures of earlier versions, which do not name the sources."""

    init_from: str | None = None
    """`drafter.init_from`: the drafter whose training this run continued."""

    init_digest: str | None = None
    """Of its configuration and weights."""


class CellReport(Frozen):
    """One suite at one temperature: a drafter against the same engine without it."""

    suite: str
    temperature: float
    tree: DraftTreeShape | None
    """None in the line of no drafter (`rivals: [off]`)."""

    prompts: int
    tokens: int
    """Generated by the drafted variant."""

    tau: float
    acceptance: tuple[float, ...]
    """Conditional acceptance by position."""

    accepted_histogram: tuple[int, ...]
    """Index k: rounds in which exactly k draft tokens were accepted."""

    tokens_per_s: float
    baseline_tokens_per_s: float
    speedup: float
    speedup_interval: Interval
    ttft_s: float
    """Median time to first token, drafted variant."""

    baseline_ttft_s: float
    identical: int
    """Prompts whose tokens equal the undrafted engine's (greedy, or under the same position-keyed noise)."""

    near_ties: int = 0
    """Prompts that differed by near-ties of the target's dtype alone (`decisions.near_ties`)."""

    compared: bool = True
    """False for sampled answers of an engine whose noise is not keyed by position: they differ although their
    distributions are equal, and `identical` is no finding."""

    divergences: tuple[str, ...] = ()
    """One line per prompt that differed: id, position, logit gap."""

    @property
    def shape(self) -> str:
        """`num_steps/top_k/num_draft_tokens`, or `off`."""
        return "off" if self.tree is None else self.tree.label()


class ConcurrencyReport(Frozen):
    """A drafter against the same engine without it, with several requests decoded at once: all suites mixed.

    Speeds are of all requests together, while every slot is busy. Only first turns are asked.
    """

    concurrency: int
    temperature: float
    requests: int
    tau: float
    tokens_per_s: float
    baseline_tokens_per_s: float
    speedup: float
    speedup_interval: Interval
    identical: int
    """Requests whose tokens equal the undrafted engine's, up to the shorter answer where one was cut off."""

    near_ties: int = 0
    """As in `CellReport`."""

    compared: bool = True
    """As in `CellReport`."""

    divergences: tuple[str, ...] = ()
    """As in `CellReport`."""


class BenchmarkReport(Frozen):
    """One checkpoint, every suite and temperature."""

    checkpoint: str
    candidate: str
    path: str
    cells: tuple[CellReport, ...]
    """One request at a time."""

    concurrent: tuple[ConcurrencyReport, ...] = ()
    """At the higher `benchmark.concurrencies`."""

    family: str | None = None
    """Of a rival; a candidate's is in its training report."""

    rival: bool = False
    """It was not trained by this job."""

    dropped: str | None = None
    """Why a rival could not be measured: there are no cells, and the speed-up is 0."""

    lossless: bool
    """Every prompt of every compared cell, and every request at every concurrency, is identical, or differs by
    near-ties alone."""

    speedup: float
    """Mean over suites and temperatures, one request at a time: what selection ranks by."""

    baseline_tokens_per_s: float
    """The same engine without a drafter, over all prompts and temperatures: what the speed-ups are against."""

    transformers_generate_tokens_per_s: float | None = None
    """`transformers` generate with its KV cache, same dtype and threads, greedy, on `transformers_prompts` prompts.
    Comparable with `transformers_baseline_tokens_per_s` alone."""

    transformers_baseline_tokens_per_s: float | None = None
    """The engine without a drafter on those prompts, interleaved with `transformers` generate."""

    transformers_prompts: int = 0
    engine: EngineUsed | None = None
    """None only in reports from before the engine was a choice: they are of the embedded engine."""

    environment: Environment
    seconds: float


class TuneCell(Frozen):
    """One draft-tree shape of the drafter, measured at the lowest concurrency over a sample of every suite."""

    tree: DraftTreeShape
    tau: float
    tau_by_temperature: dict[str, float]
    tokens_per_s: float
    speedup: float
    speedup_by_temperature: dict[str, float]
    speedup_interval: Interval
    identical: int
    prompts: int


class TuneReport(Frozen):
    """What every setting was predicted to do at every load, what was measured of it, and what is best where."""

    checkpoint: str
    path: str
    cells: tuple[TuneCell, ...]
    """The shapes that were measured at the lowest concurrency."""

    winner: DraftTreeShape
    """The drafter's best shape at the lowest concurrency. Whether the drafter is best there at all, `map` says:
    n-gram look-up or no speculation may be."""

    map: OperatingMap | None = None
    """Best setting by load. None only in reports from before there were maps."""

    trials: tuple[Trial, ...] = ()
    """Every setting at every concurrency, tried or not."""

    step_times: tuple[StepTime, ...] = ()
    draft_times: tuple[DraftTime, ...] = ()
    finding: str
    final: BenchmarkReport
    """The winner measured on prompts of every suite: what promotion decides on."""

    rival: "TuneReport | None" = None
    """The best rival, tuned in the same way for `promotion.beat: rivals`."""

    engine: EngineUsed | None = None
    """As in `BenchmarkReport`."""

    environment: Environment
    seconds: float


class LeaderboardEntry(Frozen):
    """One measured checkpoint of one job."""

    job_id: str
    checkpoint: str
    candidate: str
    family: str
    target: str
    tree: DraftTreeShape | None
    """None for no drafter."""

    tau: float
    tokens_per_s: float
    speedup: float
    speedup_greedy: float | None
    speedup_sampled: float | None
    lossless: bool
    tuned: bool
    rival: bool = False
    """Not trained by the job."""

    suites: dict[str, float]
    """Mean speed-up by suite."""

    speedup_by_concurrency: dict[int, float] = {}
    """Mean speed-up over temperatures, by requests decoded at once."""

    rank: int = Field(ge=1)


class PromotionCheck(Frozen):
    """One question promotion asks, what was found, and what was demanded."""

    name: str
    """`<question>` or `<question>:<of what>`: identical, proof, parity, suite:chat, load:4, ttft:4, incumbent, ..."""

    passed: bool
    figure: float | None = None
    bound: float | None = None
    interval: Interval | None = None
    words: str
    """The finding in one sentence; also among the decision's reasons."""


class PromotionDecision(Frozen):
    """Whether the candidate replaces the incumbent, and every reason."""

    promote: bool
    verdict: Literal["promote", "keep-incumbent", "no-drafter", "awaits-approval"]
    reasons: tuple[str, ...]
    checks: tuple[PromotionCheck, ...] = ()
    """Every question asked, in order, passed or not."""

    candidate_speedup: float | None = None
    incumbent_speedup: float | None = None
