"""The prove stage: the last measurement before a promotion, in the engine that will serve the drafter.

Parity asks whether what we trained is what the engine serves: output identical to the engine's own without a drafter,
for one user and next to others, and as many draft tokens accepted at each position as in our reference engine, on the
same prompts. Load asks whether it
is faster for the users the job declares. The changed system prompt asks whether that survives a trivial change.
"""

from typing import Annotated

from pydantic import Field

from eyrie_api.contract.engine import DraftTreeShape, EngineKind
from eyrie_api.contract.hardware import HardwareSpec, PlacedProfile
from eyrie_api.contract.load import LoadReport
from eyrie_api.contract.model import Frozen, Interval
from eyrie_api.contract.reports import Environment
from eyrie_api.contract.tuning import DrafterUse


class ParityReport(Frozen):
    """The serving engine against itself undrafted, and against our reference engine where that holds the target."""

    engine: EngineKind
    prompts: int
    identical: int
    """Prompts whose greedy output equals the same engine's without a drafter."""

    divergences: tuple[str, ...] = ()
    """One line per prompt that differed: id, position, logit gap of the two tokens in the reference target."""

    explained: int = 0
    """Divergences that are near-ties: the gap is within what the serving dtype can resolve."""

    tree: DraftTreeShape
    histogram: tuple[int, ...]
    """Index k: rounds of the serving engine in which exactly k draft tokens were accepted."""

    reference_histogram: tuple[int, ...] = ()
    """Empty when the rounds were not replayed in the reference engine; `reasons` says why."""

    tau: float
    tau_interval: Interval
    """Bootstrap over prompts."""

    reference_tau: float | None = None
    rounds_explained: int = 0
    """Of the rounds in which the two engines accepted differently, those a near-tie explains."""

    rounds_unexplained: int = 0
    passed: bool
    reasons: tuple[str, ...]
    """The findings as text; on failure with the likely cause (layer ids, d2t, norm flags) and a hint."""


class SampledParityReport(Frozen):
    """Answers at temperature 1 with the drafter and without, at the highest declared load."""

    engine: EngineKind
    prompts: int
    answers: int
    """With the drafter; as many without."""

    identical: int | None = None
    """Answers that are equal from the same seed; None where the engine draws noise of its own."""

    explained: int = 0
    divergences: tuple[str, ...] = ()
    p_value: float | None = None
    """Of the two-sample test, where the engine draws noise of its own."""

    power: float | None = None
    """How often that test would find an engine that answers greedily in half of the cases."""

    passed: bool | None
    """None where the engine could not be compared."""

    reasons: tuple[str, ...]


class ProveReport(Frozen):
    """What promotion decides on in addition to the benchmark."""

    checkpoint: str
    path: str
    engine: EngineKind
    use: DrafterUse
    """The setting that was proven: the one the operating map gives for the lowest declared load that drafts at all."""

    skipped: str = ""
    """Why nothing was measured: tuning found no declared load at which speculation pays. Then `use` is `off`, and
    parity and load are None: there is nothing to prove of an engine without a drafter."""

    parity: ParityReport | None = None
    loaded_parity: ParityReport | None = None
    """Answers at the highest declared load against those of one user without a drafter: plain, streamed, with a stop
    string, continued, in SGLang also within a JSON schema and calling tools. Their rounds are not replayed. None where
    no load is above one user."""

    sampled_parity: SampledParityReport | None = None

    load: LoadReport | None = None
    """Variants `off`, `candidate` and, when one serves, `incumbent`, at the declared loads."""

    changed_prompt: LoadReport | None = None
    """The same at the lowest declared load with another system prompt."""

    changed_parity: ParityReport | None = None
    """Answers with that system prompt, compared as in `parity`; their rounds are not replayed."""

    prompt_differences: tuple[str, ...] = ()
    """Where SGLang renders a conversation to other token ids than those that drafters are trained on."""

    disturbed: str = ""
    """Other work on the machine while the servers were measured, if it was more than tolerated."""

    restarts: int = 0
    """Servers that ended while they were measured and were started again."""

    starts: int = 0
    """Servers that were started, over all runs of the stage; not those that the stage before has passed on."""

    launch: tuple[str, ...] = Field((), max_length=4096)
    """The candidate's command line in the serving engine, without secrets."""

    environment: Environment
    seconds: float


class ProveSpec(Frozen):
    """How the tuned candidate is measured in the serving engine before promotion."""

    concurrencies: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field((1, 4), min_length=1, max_length=32)
    """Expected concurrencies of the endpoint, ascending; the candidate must be faster at each."""

    requests: int = Field(24, ge=4, le=100_000)
    """Requests per load and variant, at least."""

    most_pairs: int = Field(200, ge=2, le=10_000)
    """The budget of a load: with and without the drafter, blocks of two requests per user, or of one for a single user,
    are answered in turn, until the interval of their ratio decides, and at most so many pairs. About 100 tell 1.2x from
    1.05x where pairs vary by 30 %; other work that comes and goes makes them vary by more."""

    max_new_tokens: int = Field(64, ge=2, le=131_072)
    """Longest answer of the proof, in tokens."""

    parity_prompts: int = Field(12, ge=1, le=10_000)
    """Prompts whose answers and rounds are compared."""

    system_prompt: str = Field("You answer briefly and to the point.", max_length=65_536)
    """Another system prompt, with which the speed-up is measured again; empty skips that measurement."""

    hardware: HardwareSpec | None = None
    """After the proof, measure the drafter and no drafter on several kinds of hardware: tokens per second for one user
    and for each GPU, time to first token, and money per million tokens at each load. The job ends when they are
    measured."""

    def at_once(self, limit: int | None) -> int:
        """Requests that a server of the proof decodes at once: the endpoint's limit, else the highest load, or 8."""
        return limit or max(8, *self.concurrencies)

    @property
    def profiles(self) -> tuple[PlacedProfile, ...]:
        """Of `hardware`: the members of the stage of that name."""
        return () if self.hardware is None else self.hardware.profiles

    @property
    def profile_names(self) -> tuple[str, ...]:
        return tuple(profile.name for profile in self.profiles)
