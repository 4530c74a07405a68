"""Main memory of the stages that compute on CPUs, and which of a job's stages exceed what its machine has. Pure.

A need is the least that a stage takes at one time, so that no job is refused that would run: 1 GB for programs and
libraries, the target's weights in its dtype, and

    regenerate, benchmark, tune, prove   keys and values of the texts that are computed at once: mean prompt and longest
                                         answer; where no prompt was sampled, hardly any
    capture                              one pass of the target with the states that it returns
    train                                a step of the candidate with the highest need (`training_cost`), or weights,
                                         gradients and moments where its family's step is not described; these of all
                                         candidates where one program trains them; with `stream` also target and pass

Each grows with one field of the job, which the error names with the largest value that fits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.placement import StageKey
from eyrie_api.contract.resolved import Candidate
from eyrie_api.contract.targets import ELEMENT_BYTES
from eyrie_api.errors import MemoryTooSmall
from eyrie_api.planning.plan_work import OTHER_MEMORY, PlannedWork, text_bytes
from eyrie_api.planning.training_cost import StepSetting, expected_work, step_bytes, streamed_bytes
from eyrie_api.quantities import size

_STATE_BYTES = 16
"""Of a parameter in training: weight, gradient and two moments in float32."""

_FEWEST_TOKENS = 64
"""Of a pass and of a step, by their fields' bounds."""

_FEWEST_ROOTS = 32
"""That a CPU unrolls at a time."""


@dataclass(frozen=True)
class StageMemory:
    """The need of a stage, of which a part grows with a field of the job."""

    stage: StageKey
    fixed: int
    """Bytes that the field does not change."""

    field: str
    value: int
    each: int
    """Bytes for each of `value`."""

    least: int = 1
    """Of `value`, by the field's own bound."""

    @property
    def need(self) -> int:
        return self.fixed + self.value * self.each


def too_small_memory(work: PlannedWork, num_gpus: Mapping[str, int], available: int) -> list[MemoryTooSmall]:
    """One error for each stage that the memory of a machine cannot hold.

    num_gpus   on which a stage computes; 0: CPUs
    available  bytes that the machine has
    """
    narrower, errors = "set target.dtype to bfloat16, " if work.job.target.dtype == "float32" else "", []
    for needed in stage_memory(work):
        if needed.stage not in work.stages or num_gpus[needed.stage] or needed.need <= available:
            continue
        fitting = (available - needed.fixed) // needed.each
        errors.append(MemoryTooSmall(
            f"{needed.stage} needs at least {size(needed.need)} of memory, of which {size(needed.value * needed.each)} "
            f"follow from {needed.field} {needed.value} and {size(work.weight_bytes)} are the target's weights in "
            f"{work.job.target.dtype}; this machine has {size(available)}",
            f"lower {needed.field} to at most {fitting}" if fitting >= needed.least else
            f"{narrower}take a smaller target or drafter, or submit the job where there is more memory"))
    return errors


def stage_memory(work: PlannedWork) -> Iterator[StageMemory]:
    """What stages need where they compute on CPUs."""
    spec, dtype, target = work.spec, work.job.target.dtype, work.target
    computes = work.weight_bytes + OTHER_MEMORY
    engine = spec.regenerate.engine or spec.engine.kind
    if not spec.data.answered and engine in ("embedded", "sglang"):
        tokens = 1 if work.data.prompt_tokens is None else round(work.prompt + work.answer)
        yield StageMemory("regenerate", computes, "regenerate.concurrency", min(spec.regenerate.concurrency, work.rows),
                          tokens * text_bytes(target, dtype, engine))
    if spec.trains:
        drafter = work.drafter(work.job.candidates[0])
        passing = streamed_bytes(drafter, 0, ELEMENT_BYTES[dtype], work.num_aux + 1, 1, 0)
        if not work.streamed:
            yield StageMemory("capture", computes, "capture.batch_tokens",
                              min(spec.capture.batch_tokens, work.captured), passing, _FEWEST_TOKENS)
        streaming = work.streamed * (work.weight_bytes + spec.capture.batch_tokens * passing)
        yield _training(work, OTHER_MEMORY + streaming)
    measured: tuple[tuple[StageKey, Sequence[int], int], ...] = (
        ("benchmark", spec.benchmark.concurrencies, spec.benchmark.max_new_tokens),
        ("tune", spec.tune.concurrencies, spec.benchmark.max_new_tokens),
        ("prove", spec.prove.concurrencies, spec.prove.max_new_tokens))
    for stage, users, longest in measured:
        yield StageMemory(stage, computes, f"{stage}.concurrencies", max(users),
                          longest * text_bytes(target, dtype, spec.engine.kind))


def _training(work: PlannedWork, fixed: int) -> StageMemory:
    """Of the candidate with the highest need."""
    states = [_STATE_BYTES * work.drafter(candidate).parameters for candidate in work.job.candidates]
    others = sum(states) if work.job.trains_together else 0

    def needed(candidate: Candidate, own: int) -> StageMemory:
        tokens, drafter = work.step_tokens(candidate), work.drafter(candidate)
        head = (1 if drafter.tied else 2) * drafter.vocab_size * work.target.hidden_size
        head *= ELEMENT_BYTES[work.job.target.dtype]
        least = each = 0
        if FAMILIES[candidate.drafter.family].step_cost_known:
            least = _step(work, candidate, _FEWEST_ROOTS)
            each = max(0, _step(work, candidate, tokens) - least) // tokens
        return StageMemory("train", fixed + max(0, others - own) + max(least, own + head),
                           "train.max_tokens_per_batch", tokens, max(1, each), _FEWEST_TOKENS)

    return max(map(needed, work.job.candidates, states), key=lambda one: one.need)


def _step(work: PlannedWork, candidate: Candidate, tokens: int) -> int:
    """Bytes of a step of so many tokens."""
    train = candidate.train
    step = expected_work(tokens, supervised_share=work.supervised_share, ttt_length=train.ttt_length,
                         unrolled_fraction=train.unrolled_fraction, row_tokens=work.row_tokens)
    return step_bytes(work.drafter(candidate), step, StepSetting(
        compute_bytes=2 if train.dtype == "bfloat16" else 4, target_bytes=ELEMENT_BYTES[work.job.target.dtype],
        num_parts=max(1, ceil(step.alive[0] / _FEWEST_ROOTS)), recompute=train.grad_checkpoint,
        top_k=work.spec.capture.final_top_k if work.spec.capture.final_state == "topk" else None)).total
