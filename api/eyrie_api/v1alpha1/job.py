"""What a user asks for: one target, some conversations, and how the drafter is trained, measured and served.

Every field has a default that suits a first run except `target` and `data`; every number has a bound and a unit.
Sections are handed whole to the stage they configure (`v1alpha1.stages`), never copied field by field.
"""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from eyrie_api.v1alpha1.codecs import Codec, FinalState
from eyrie_api.v1alpha1.model import Frozen, Name, Probability
from eyrie_api.v1alpha1.requests import JobPlacement, PlacementRequest

Dtype = Literal["float32", "bfloat16", "float16"]
Family = Literal["eagle3", "eagle1", "medusa", "hydra", "standalone", "dflash"]
"""Drafters that are trained. EAGLE-2 is eagle1's checkpoint in a dynamic tree; DDTree is dflash's in a tree."""

SGLANG_ALGORITHMS: dict[Family, str] = {
    "eagle3": "EAGLE3", "eagle1": "EAGLE", "standalone": "STANDALONE", "dflash": "DFLASH"}
"""`--speculative-algorithm` by family. What is missing here SGLang 0.5.23 cannot serve."""

EngineKind = Literal["embedded", "sglang"]


class TargetSpec(Frozen):
    """The frozen large model whose output must not change."""

    model: str = Field(min_length=1, max_length=4096)
    """A local Hugging Face directory, a Hub id (`org/name`), or `quickstart` for the model shipped with Eyrie."""

    revision: str | None = Field(None, max_length=256)
    """Hub branch, tag or commit. Ignored for a local directory, whose content digest is recorded instead."""

    dtype: Dtype = "float32"
    """Arithmetic of the target here. float32 is the lossless reference on CPU; bfloat16 is usual on GPU."""


class DataSource(Frozen):
    """One source of conversations."""

    path: str = Field(min_length=1, max_length=4096)
    """JSONL or parquet file, Hub data set id, or `quickstart` for locally generated conversations."""

    format: Literal["auto", "messages", "sharegpt"] = "auto"
    """Row layout: OpenAI `messages`, ShareGPT `conversations`, or decided by the first readable row."""

    split: str = "train"
    """Split of a Hub data set."""

    weight: float = Field(1.0, gt=0.0, le=1e6)
    """Share of the mix, relative to the other sources."""

    max_rows: int | None = Field(None, ge=1)
    """Read at most this many rows."""


class DataSpec(Frozen):
    """The conversations whose last assistant turn the target answers anew."""

    sources: tuple[DataSource, ...] = Field(min_length=1, max_length=64)

    max_conversations: int = Field(1000, ge=1, le=100_000_000)
    """Conversations drawn from the mix."""

    held_out_fraction: Probability = 0.02
    """Share of prompts split off by hash before anything else; never answered for training, never trained on."""

    max_prompt_tokens: int = Field(1024, ge=8, le=1_048_576)
    """Longer prompts are quarantined, with the reason."""

    near_duplicates: float | None = Field(None, gt=0.0, le=1.0)
    """Leave out prompts whose similarity to an earlier one (Jaccard, by MinHash) reaches this; 0.8 is usual.
    Not set, only equal prompts are left out."""

    overlaps: Literal["report", "drop"] = "report"
    """What becomes of conversations that share 13 words in a row with a benchmark suite. Whole prompts of a suite are
    always left out."""

    seed: int = Field(0, ge=0, le=2**63 - 1)


class SamplingSpec(Frozen):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0.0, le=4.0)
    """0 is greedy."""

    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 keeps the whole vocabulary."""


class RegenerateSpec(Frozen):
    """How the target rewrites the answers."""

    engine: Literal["embedded", "openai", "openai-batch"] = "embedded"
    """`embedded`: our engine, in process. `openai`: any OpenAI-compatible endpoint. `openai-batch`: its Batch API."""

    base_url: str | None = Field(None, pattern=r"^https?://")
    """Endpoint for the openai engines, up to and including `/v1`."""

    endpoints: tuple[Annotated[str, Field(pattern=r"^https?://", max_length=4096)], ...] = Field((), max_length=1024)
    """More endpoints of the same model, asked beside `base_url`: each request goes to the one with the least in flight.
    Only for engine `openai`."""

    served_model: str | None = None
    """Model name to send to the endpoint; default: the target's name."""

    api_key_env: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """Environment variable that holds the key. The key itself never enters a spec."""

    sampling: SamplingSpec = SamplingSpec(temperature=0.7)
    max_new_tokens: int = Field(256, ge=1, le=131_072)
    concurrency: int = Field(24, ge=1, le=4096)
    """Conversations in flight."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Row i is sampled with a seed derived from this and the row id, so a restart repeats the same answer."""

    turns: Literal["last", "all"] = "last"
    """`all`: each assistant turn is answered anew in the context of the answers before it, and is a row of its own."""

    truncated: Literal["train", "quarantine"] = "train"
    """Answers cut at `max_new_tokens` do not end with an end-of-turn token; here they may be kept from training."""

    timeout_s: float = Field(600.0, gt=0.0)
    """Of one request."""

    max_retries: int = Field(5, ge=0, le=100)
    deadline_s: float = Field(3600.0, gt=0.0)
    """Of one row, all its retries together."""

    @model_validator(mode="after")
    def _endpoint_named(self) -> "RegenerateSpec":
        if self.engine != "embedded" and self.base_url is None and not self.endpoints:
            raise ValueError(f"regenerate.base_url is required when regenerate.engine is {self.engine!r}: "
                             "give the endpoint's URL including /v1, or use engine 'embedded'")
        if self.endpoints and self.engine != "openai":
            raise ValueError(f"regenerate.endpoints is for engine 'openai', the engine is {self.engine!r}: "
                             "remove the field or change the engine")
        return self

    @property
    def base_urls(self) -> tuple[str, ...]:
        """Every endpoint once, `base_url` first."""
        urls = (self.base_url, *self.endpoints) if self.base_url is not None else self.endpoints
        return tuple(dict.fromkeys(url.rstrip("/") for url in urls))


class CaptureSpec(Frozen):
    """Which hidden states are recorded, and how."""

    aux_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1, max_length=16)
    """`hidden_states` indices, ascending. Default: low, middle, high; moved onto full-attention layers on hybrids."""

    codec: Codec = "int8"
    """How states are stored. What each costs in acceptance length is in workers/README.md, with its spread."""

    final_state: FinalState = "keep"
    """`topk` stores the target's opinion (`final_top_k` logits and the mass of the rest) instead of its final state."""

    final_top_k: int = Field(16, ge=1, le=256)
    draft_vocab_size: int | None = Field(None, ge=8, le=4_194_304)
    """The draft vocabulary of `final_state: topk`, built from the answers: drafters trained from the store have it.
    Default: the whole vocabulary up to 32768."""

    max_bytes: int | None = Field(None, ge=2**16)
    """Disk for the store. `codec` is then the best that may be taken: where it does not fit, the best that does is."""

    shard_size_bytes: int = Field(256 * 2**20, ge=2**16, le=2**40)
    max_length: int = Field(2048, ge=16, le=1_048_576)
    """Longer rows are cut at the end of this many tokens."""

    batch_tokens: int = Field(4096, ge=64)
    """Tokens per target forward pass."""

    feed: Literal["store", "stream"] = "store"
    """`stream`: no state is written. Training computes them with the target as it goes, just ahead of the drafter, in
    every epoch anew: for disks that hold no store, and data that is seen once or twice."""

    stream_buffer_bytes: int = Field(512 * 2**20, ge=2**16)
    """Of `feed: stream`: states held in memory, those being learnt from included. A batch that is larger is computed
    when it is asked for, and none ahead of it."""

    probe_layers: bool = False
    """Before states are captured, rank the target's layers by what a linear reading of each foresees of the target's
    next choices. Told in an event beside the layers chosen; `aux_layers` chooses."""

    check_rows: int = Field(2, ge=0, le=64)
    """Rows whose states are compared with `transformers` before anything is stored. It loads the target once more, and
    lets it go before our own is loaded; 0 leaves the check out."""

    @model_validator(mode="after")
    def _vocabulary_has_a_use(self) -> "CaptureSpec":
        if self.draft_vocab_size is not None and self.final_state != "topk":
            raise ValueError("capture.draft_vocab_size is given with capture.final_state 'keep', which serves any "
                             "draft vocabulary: set drafter.draft_vocab_size, or capture.final_state to 'topk'")
        return self


class DrafterSpec(Frozen):
    """The shape of the drafter."""

    family: Family = "eagle3"
    intermediate_size: int | None = Field(None, ge=8, le=1_048_576)
    """MLP width; default: the target's; for `standalone`, in proportion to its width."""

    hidden_size: int | None = Field(None, ge=8, le=65_536)
    """Width of a `standalone` drafter; default: the family's choice. The others have their target's."""

    num_layers: int | None = Field(None, ge=1, le=64)
    """Decoder layers of `standalone` and `dflash`; default: the family's choice. eagle3 and eagle1 have one."""

    max_draft_tokens: int | None = Field(None, ge=1, le=16)
    """How far `medusa`, `hydra` and `dflash` can look ahead: their heads, or their block less its first token. Default:
    train.ttt_length. The other families go as deep as they are asked."""

    num_attention_heads: int | None = Field(None, ge=1, le=1024)
    """Default: the target's."""

    aux_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=2, max_length=16)
    """`hidden_states` indices that eagle3 and dflash fuse, ascending. As an axis of a sweep it compares choices of
    layers: the store then holds those of all candidates. Default: capture.aux_layers."""

    draft_vocab_size: int | None = Field(None, ge=8, le=4_194_304)
    """Reduced output vocabulary, built from the data; default: the whole vocabulary up to 32768."""

    max_position_embeddings: int | None = Field(None, ge=16)
    """Default: the target's. Engines refuse a drafter with less context than they serve."""

    fc_norm: bool = False
    """EAGLE-3.1: normalise each aux state before they are fused."""

    norm_before_fc: bool = False
    """Normalise the concatenated aux states before they are fused (one norm over all of them)."""

    norm_output: bool = False
    """EAGLE-3.1: feed back the state after the final norm instead of before it."""

    sliding_window: int | None = Field(None, ge=8, le=1_048_576)
    """The drafter attends to this many latest positions; trained and served alike. Default: all."""

    @model_validator(mode="after")
    def _one_norm_in_front(self) -> "DrafterSpec":
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("drafter.fc_norm and drafter.norm_before_fc are both true: no engine applies both; "
                             "choose fc_norm (EAGLE-3.1) or norm_before_fc")
        return self


class TrainSpec(Frozen):
    """How one drafter is trained."""

    ttt_length: int = Field(7, ge=1, le=16)
    """Drafter steps unrolled per position. Match or exceed the depth you will serve."""

    step_decay: float = Field(0.8, gt=0.0, le=1.0)
    """Weight of TTT step s is step_decay ** s (EAGLE-3 reference: 0.8)."""

    unrolled_fraction: float = Field(0.33, gt=0.0, le=1.0)
    """Share of the answer positions unrolled beyond the first TTT step, drawn anew at every optimiser step. Neighbours
    predict the same tokens, so a third of them teaches nearly as much for less than half of the arithmetic."""

    single_step_ratio: Probability = 0.45
    """Share of the optimiser steps, at the beginning, that train the first TTT step alone: it is what the later steps
    build on, and costs a seventh."""

    loss: Literal["kl", "tv", "lk", "lk_hybrid"] = "kl"
    """kl: match the target's distribution. tv, lk (minus log), lk_hybrid (kl first, then tv): raise the chance that a
    sampled draft token is accepted (arXiv:2602.23881); for drafters served at temperature above 0."""

    normalisation: Literal["token", "sequence"] = "token"
    """Whether every supervised token of a batch weighs the same, or every answer, however long."""

    learning_rate: float | None = Field(None, gt=0.0, le=1.0)
    """Peak; default: the family's own, measured on the quickstart target. Targets of billions of parameters want less:
    5e-5 to 6e-4 is what others train EAGLE-3 with."""

    warmup_ratio: Probability = 0.05
    schedule: Literal["cosine", "wsd", "constant"] = "wsd"
    """wsd: warm up, stay, decay linearly over the last fifth."""

    weight_decay: float = Field(0.0, ge=0.0, le=1.0)
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    max_grad_norm: float = Field(0.5, gt=0.0)
    epochs: float = Field(4.0, gt=0.0, le=1000.0)
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimiser steps even if epochs remain."""

    early_stop_patience: int | None = Field(None, ge=1, le=1000)
    """Stop after this many evaluations in a row without a better simulated speed-up on held-out rows (about ten are
    made over a run). A wsd run stopped early misses its decay. Default: never."""

    max_tokens_per_batch: int = Field(2048, ge=64)
    """Packed tokens per step, over all processes. What autograd keeps is bounded and does not grow with it."""

    num_checkpoints: int = Field(3, ge=1, le=100)
    """Exported drafters, evenly spaced over the run, the last at its end; each is benchmarked."""

    save_every_steps: int = Field(50, ge=1)
    """Resumable training state is written this often."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the matrix products; all else is float32. auto: bfloat16 where the hardware multiplies it natively."""

    grad_checkpoint: bool = False
    """Keep less of the MLP for the gradient and compute it again: memory for arithmetic."""

    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of each process; default: all."""

    trackers: tuple[Literal["mlflow", "wandb", "tensorboard"], ...] = Field((), max_length=3)
    """Where curves are sent besides the job's own record; each finds its server in its own environment variables."""


class SweepAxis(Frozen):
    """One setting, and the values tried for it: a list, or for `sweep.random` also a range."""

    field: str = Field(pattern=r"^(train|drafter)\.[a-z0-9_]+$")
    """Dotted field of this spec, for example `train.learning_rate`."""

    values: tuple[JsonValue, ...] = Field((), max_length=64)
    low: float | None = Field(None, allow_inf_nan=False)
    """Lower end of the range; both ends may be drawn. Whole numbers are drawn for fields that take no others."""

    high: float | None = Field(None, allow_inf_nan=False)
    log: bool = False
    """Draw the logarithm evenly, as suits learning rates: from 1e-4 to 1e-2 as many below 1e-3 as above."""

    @property
    def is_range(self) -> bool:
        """Whether values are drawn between two ends."""
        return not self.values

    @model_validator(mode="after")
    def _a_list_or_a_range(self) -> "SweepAxis":
        ends = (self.low, self.high)
        if bool(self.values) == (ends != (None, None)):
            raise ValueError(f"sweep axis {self.field!r} needs values, or low and high, and not both: write "
                             "values: [..], or low: .. and high: ..")
        if self.values:
            if self.log:
                raise ValueError(f"sweep axis {self.field!r} lists values and says log, which is for a range: "
                                 "leave log out")
            return self
        if self.low is None or self.high is None or self.low >= self.high:
            raise ValueError(f"sweep axis {self.field!r}: low {self.low} and high {self.high} are no range: "
                             "give both, low below high")
        if self.log and self.low <= 0:
            raise ValueError(f"sweep axis {self.field!r}: low {self.low:g} has no logarithm: raise it above 0, or "
                             "leave log out")
        return self


class SweepSpec(Frozen):
    """Candidates trained from the same captured states: the grid of all axes, or draws from them; no axis means one
    candidate."""

    axes: tuple[SweepAxis, ...] = Field((), max_length=8)
    families: tuple[Family, ...] = Field((), max_length=16)
    """Families trained beside each other, each at every point of the grid; default: drafter.family alone."""

    max_candidates: int = Field(16, ge=1, le=256)
    random: int | None = Field(None, ge=1, le=256)
    """Instead of the whole grid, so many points drawn from the axes (for each family the same ones)."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Of the draws."""

    together: Literal["auto", "always", "never"] = "auto"
    """Whether one program trains all candidates: states are read once, the target is asked once, and `rungs` stop what
    will not win. auto: together, except on a cluster whose training pods have more than one GPU each or order a
    TrainJob. never: each candidate in a pod of its own, all to the end: sooner done where GPUs are free."""

    rungs: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] = Field((0.25, 0.5), max_length=8)
    """Successive halving: at these shares of the training, the half of a family's candidates with the lower simulated
    speed-up stops, with a checkpoint. Empty trains all to the end. Only for candidates trained together."""

    @model_validator(mode="after")
    def _possible(self) -> "SweepSpec":
        if list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(f"sweep.rungs {list(self.rungs)} must ascend: write {sorted(set(self.rungs))}")
        ranges = [axis.field for axis in self.axes if axis.is_range]
        if ranges and self.random is None:
            raise ValueError(f"sweep axis {ranges[0]!r} is a range, of which a grid has no points: say sweep.random, "
                             "how many points to draw, or list values")
        if self.random is not None and not self.axes:
            raise ValueError(f"sweep.random is {self.random} and there is no axis to draw from: give sweep.axes, or "
                             "leave sweep.random out")
        return self


class DraftTreeShape(Frozen):
    """The shape of one round of drafting. top_k 1 is a chain, whose num_draft_tokens is num_steps + 1."""

    num_steps: int = Field(5, ge=1, le=16)
    """Drafter passes per round (depth)."""

    top_k: int = Field(1, ge=1, le=64)
    """Children kept per node."""

    num_draft_tokens: int = Field(6, ge=2, le=512)
    """Nodes sent to verification, root included."""

    static: bool = False
    """The same branching in every round, whatever the drafter is sure of (EAGLE-1); for trees in our engine."""

    @model_validator(mode="after")
    def _possible(self) -> "DraftTreeShape":
        if self.top_k == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} does not fit a chain of num_steps "
                             f"{self.num_steps}: with top_k 1 it must be num_steps + 1 = {self.num_steps + 1}")
        most = 1 + self.top_k + (self.num_steps - 1) * self.top_k**2
        if self.num_draft_tokens > most:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} is more than a tree of num_steps "
                             f"{self.num_steps} and top_k {self.top_k} can grow: at most {most}")
        if self.num_draft_tokens < self.num_steps + 1:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} cannot hold one path of num_steps "
                             f"{self.num_steps}: give at least {self.num_steps + 1} or lower num_steps")
        return self

    def label(self) -> str:
        """`num_steps/top_k/num_draft_tokens`, the way the field writes it."""
        return f"{self.num_steps}/{self.top_k}/{self.num_draft_tokens}" + ("/static" if self.static else "")


class SuiteSpec(Frozen):
    """A held-out set of prompts."""

    name: Name
    path: str = Field(min_length=1, max_length=4096)
    """`quickstart:<suite>`, a JSONL file of `messages` or `prompt` rows, `held-out` for the prompts split off the
    data, or a Hub data set: `openai/gsm8k`, `openai/openai_humaneval`, `lmsys/mt_bench` layouts are understood."""

    max_prompts: int = Field(8, ge=1, le=100_000)
    required: bool = True
    """Whether promotion demands a speed-up in this suite."""


QUICKSTART_SUITES = tuple(
    SuiteSpec(name=name, path=f"quickstart:{name}") for name in ("chat", "math", "code", "tools")
)


class BenchmarkSpec(Frozen):
    """How every checkpoint is measured in the decode engine, against the same engine without a drafter."""

    suites: tuple[SuiteSpec, ...] = Field(QUICKSTART_SUITES, min_length=1, max_length=64)
    temperatures: tuple[Annotated[float, Field(ge=0.0, le=4.0)], ...] = Field((0.0, 1.0), min_length=1)
    tree: DraftTreeShape = DraftTreeShape()
    max_new_tokens: int = Field(96, ge=2, le=131_072)
    repeats: int = Field(1, ge=1, le=100)
    """Interleaved repetitions of every prompt in every variant."""

    warmup_prompts: int = Field(2, ge=0, le=1000)
    seed: int = Field(0, ge=0, le=2**31 - 1)
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of the engine; default: all."""


class TuneSpec(Frozen):
    """Which settings are compared for the chosen checkpoint, at which loads, and how much may be measured.

    Every setting is predicted from one run and its replay, so a wide grid costs little; what could be best is measured.
    """

    num_steps: tuple[Annotated[int, Field(ge=1, le=16)], ...] = Field((1, 2, 3, 4, 5, 6, 7), min_length=1)
    top_k: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field((1, 2, 4), min_length=1)
    num_draft_tokens: tuple[Annotated[int, Field(ge=2, le=512)], ...] = Field((4, 8, 16), min_length=1)
    """For trees (top_k > 1); a chain always verifies num_steps + 1. Impossible shapes are left out."""

    ngram: bool = True
    """Also compare n-gram look-up, in chains of the same depths. Off is always compared."""

    concurrencies: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field((1, 4), min_length=1, max_length=16)
    """Requests decoded at once: the loads to find the best setting for."""

    trials_share: float = Field(0.25, gt=0.0, le=1.0)
    """Of all pairs of setting and concurrency, at most this share is measured (but three at each concurrency)."""

    budget_s: float = Field(600.0, gt=0.0)
    """Seconds the race may take, over all concurrencies. What is undecided then goes by prediction and measurement
    together."""

    max_prompts: int = Field(8, ge=1)
    """Prompts to predict from, and as many again to race on, drawn evenly from the suites."""

    temperatures: tuple[Annotated[float, Field(ge=0.0, le=4.0)], ...] = Field((0.0, 1.0), min_length=1)
    repeats: int = Field(1, ge=1, le=100)


class ProveSpec(Frozen):
    """How the tuned candidate is tried in the serving engine before promotion."""

    loads: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field((1, 4), min_length=1, max_length=32)
    """Concurrencies the endpoint has to be good at, ascending: the load you expect."""

    requests: int = Field(24, ge=4, le=100_000)
    """Requests per load and variant."""

    max_new_tokens: int = Field(64, ge=2, le=131_072)
    parity_prompts: int = Field(12, ge=1, le=10_000)
    system_prompt: str = Field("You answer briefly and to the point.", max_length=65_536)
    """The changed system prompt a promoted drafter has to survive; empty skips that question."""


class CanarySpec(Frozen):
    """How traffic moves to a new revision."""

    shares: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] = (0.2,)
    """Shares of the requests it gets, step by step, before all of them; empty switches at once."""

    min_requests: int = Field(5, ge=0, le=1_000_000)
    """Requests a step must have answered before the next, unless `max_step_s` passes first."""

    max_step_s: float = Field(10.0, ge=0.0, le=86_400.0)
    """A quiet endpoint must not wait for ever: the step ends after this long."""

    @model_validator(mode="after")
    def _ascending(self) -> "CanarySpec":
        if list(self.shares) != sorted(set(self.shares)):
            raise ValueError(f"canary.shares {list(self.shares)} must ascend: traffic moves to the new revision step "
                             "by step, as in [0.05, 0.2, 0.5]")
        return self


class DriftSpec(Frozen):
    """What happens when live acceptance sinks slowly: the traffic has moved away from the training data."""

    ratio: Probability = 0.85
    """Drift is told when windowed tau stays below this share of the proven one for `windows` windows in a row."""

    windows: int = Field(3, ge=1, le=1000)
    window_s: float = Field(60.0, ge=0.0, le=86_400.0)
    """A window lasts at least this long, and as many verify rounds as a mean can be believed of."""

    action: Literal["ignore", "offer", "retrain"] = "offer"
    """offer: an event and a ready-made job spec. retrain: the job is started."""

    traffic_file: str | None = Field(None, max_length=4096)
    """JSONL of recent requests (`messages` rows) to retrain on; default: what the gateway recorded, when told to
    (`serve.record_prompts`)."""


class PromotionPolicy(Frozen):
    """When a candidate replaces the incumbent."""

    mode: Literal["auto", "manual", "never"] = "auto"
    min_speedup: float = Field(1.05, gt=0.0)
    """Over no drafter, in every required suite and temperature, and at every declared load (prove.loads)."""

    min_speedup_over_incumbent: float = Field(1.02, gt=0.0)
    """Over the incumbent's speed-up, averaged over suites and temperatures, and at the declared loads together."""

    require_identical: bool = True
    """Refuse when any greedy or position-keyed sampled output differed from the target's."""

    require_confidence: bool = True
    """The lower end of the 95 % interval of the speed-up at each declared load must be above 1."""

    max_ttft_p99_ratio: float = Field(1.5, gt=0.0)
    """p99 time to first token against no drafter, at each declared load; the median where a load was asked fewer than
    100 times (prove.requests), since p99 would then be one request. The bound is loose on purpose."""

    ttft_tolerance_s: float = Field(0.05, ge=0.0)
    """A first token that comes at most this much later than without a drafter passes whatever the ratio: nobody feels
    it, and where prefill takes milliseconds a round of drafting is a multiple of it."""

    max_ttft_p99_s: float | None = Field(None, gt=0.0)
    min_speedup_changed_prompt: float = Field(1.0, gt=0.0)
    """With prove.system_prompt in place of the prompts' own."""

    canary: CanarySpec = CanarySpec()
    drift: DriftSpec = DriftSpec()


class ServeSpec(Frozen):
    """The endpoint the winner is promoted to."""

    enabled: bool = True
    engine: EngineKind = "embedded"
    """What serves, and what the candidate is proven in: our reference engine, or SGLang."""

    endpoint: Name = "default"
    port: int = Field(0, ge=0, le=65535)
    """Stable port on this machine; 0 picks a free one when the endpoint is created and keeps it."""

    max_concurrency: int = Field(8, ge=1, le=1024)
    """Requests decoded at once; more wait in line."""

    health_timeout_s: float | None = Field(None, gt=0.0)
    """A new engine that is not healthy by then is rolled back. Default: 60; 600 for SGLang, which loads weights and
    captures graphs for minutes. Raise it for a target of hundreds of gigabytes."""

    min_acceptance_ratio: Probability = 0.5
    """Roll back when served acceptance length falls below this share of the benchmarked one."""

    record_prompts: int = Field(0, ge=0, le=1_000_000)
    """Keep the messages of this many latest chat requests, to retrain on when the traffic drifts; 0 keeps none.
    Privacy: users' words are written in clear to `traffic.jsonl` of the endpoint's directory, readable by the
    operating user alone (mode 0600), never sent anywhere, and pushed out by newer ones. Tell your users."""

    replicas: int | None = Field(None, ge=1, le=1000)
    """On a cluster; default: the administrator's."""

    hardware_profile: str | None = Field(None, min_length=1, max_length=64)
    """On a cluster, what SGLang is launched for (`eyrie_workers.engines.sglang.profiles`); default: the
    administrator's."""

    placement: PlacementRequest = PlacementRequest()
    """On a cluster, over the administrator's placement of engines."""

    @property
    def healthy_within_s(self) -> float:
        """`health_timeout_s`, or its default for the engine."""
        if self.health_timeout_s is not None:
            return self.health_timeout_s
        return 600.0 if self.engine == "sglang" else 60.0


class JobSpec(Frozen):
    """Train, choose, tune and serve a drafter for one target."""

    name: Name | None = None
    """For people; the server assigns the id."""

    target: TargetSpec
    data: DataSpec
    regenerate: RegenerateSpec = RegenerateSpec()
    capture: CaptureSpec = CaptureSpec()
    drafter: DrafterSpec = DrafterSpec()
    train: TrainSpec = TrainSpec()
    sweep: SweepSpec = SweepSpec()
    benchmark: BenchmarkSpec = BenchmarkSpec()
    tune: TuneSpec = TuneSpec()
    prove: ProveSpec = ProveSpec()
    promotion: PromotionPolicy = PromotionPolicy()
    serve: ServeSpec = ServeSpec()
    placement: JobPlacement = JobPlacement()
    """Where its stages run on a cluster."""

    labels: dict[Name, str] = Field(default_factory=dict, max_length=64)

    @model_validator(mode="after")
    def _depth_was_trained(self) -> "JobSpec":
        deepest = max(self.benchmark.tree.num_steps, *self.tune.num_steps)
        if deepest > self.train.ttt_length + 4:
            raise ValueError(f"num_steps {deepest} is far beyond train.ttt_length {self.train.ttt_length}: "
                             "the drafter would serve on states it never saw; raise ttt_length or lower num_steps")
        return self

    @model_validator(mode="after")
    def _variants_are_eagle3s(self) -> "JobSpec":
        for family in self.sweep.families or (self.drafter.family,):
            given = [field for field in ("fc_norm", "norm_before_fc", "norm_output", "sliding_window")
                     if getattr(self.drafter, field)]
            if family != "eagle3" and given:
                raise ValueError(f"drafter.{given[0]} is a variant of eagle3, and {family!r} is to be trained too: "
                                 "leave it out, or train that family in a job of its own")
        return self

    @model_validator(mode="after")
    def _engine_can_serve(self) -> "JobSpec":
        if self.serve.engine != "sglang":
            return self
        for family in self.sweep.families or (self.drafter.family,):
            if family not in SGLANG_ALGORITHMS:
                field = "sweep.families" if self.sweep.families else "drafter.family"
                raise ValueError(f"{field} names {family!r}, which serve.engine 'sglang' cannot serve: use one of "
                                 f"{', '.join(SGLANG_ALGORITHMS)}, or serve.engine 'embedded'")
        if self.benchmark.tree.static:
            raise ValueError("benchmark.tree.static is true, and serve.engine 'sglang' grows dynamic trees only: set "
                             "it to false, or serve.engine to 'embedded'")
        return self

    @model_validator(mode="after")
    def _one_program_is_one_pod(self) -> "JobSpec":
        if self.sweep.together == "always" and self.placement.train_launcher == "trainjob":
            raise ValueError("sweep.together is 'always', one program in one pod, and placement.train_launcher is "
                             "'trainjob': set sweep.together to 'auto', or the launcher to 'pod'")
        return self
