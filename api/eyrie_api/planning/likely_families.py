"""Which families `sweep.families: [auto]` trains: those that the plan predicts within a tenth of the fastest. Pure.

A family is predicted with the tau that it had on the published model after equal time of training
(`DrafterFamily.published_tau`, docs/choosing_a_family.md), in rounds of this target in 16 bits at the plan's default
rates (`planned_speedup`), with as many users as the job declares fewest, and the draft vocabulary of as many answers as
it may have. docs/results/published.md has predicted speeds next to measured ones. Taus of another target differ, and so
may their order: that is why all that come near are trained. Rows without such a tau, which are experimental or parts of
a target, are not among them.
"""

from collections.abc import Iterator

from eyrie_api.contract.families import AUTO, FAMILIES, PUBLISHED_STEPS, VARIANT_FIELDS, VERIFICATIONS, Family
from eyrie_api.contract.job import JobSpec
from eyrie_api.errors import InvalidInput, UnsupportedTarget
from eyrie_api.planning.hardware import ASSUMED, Rates, gpu_rates, known_gpu
from eyrie_api.planning.needed_tau import planned_speedup
from eyrie_api.planning.plan_work import TargetFacts, expected_draft_vocabulary
from eyrie_api.planning.sglang_support import require_block_capture, require_capture
from eyrie_api.planning.sweep import expand

_NEAR = 0.9


def with_likely_families(spec: JobSpec, target: TargetFacts | None, architecture: str, gpu_type: str | None,
                         on_gpus: bool) -> JobSpec:
    """The job with families in place of `auto`, the fastest first. Raises InvalidInput for `auto` next to others, and
    for a target whose sizes are not known here."""
    families = spec.sweep.families
    if AUTO not in families:
        return spec
    if len(families) > 1:
        raise InvalidInput(f"sweep.families {list(families)} has auto next to others", "give auto alone, or name all")
    if target is None:
        raise InvalidInput("sweep.families is auto, which plans with the sizes of the target, and its config.json is "
                           "not on this machine", "name families, or load the target into the cache of this machine")
    speeds = predicted_speeds(spec, target, architecture, gpu_type, on_gpus)
    if not speeds:
        raise InvalidInput("sweep.families is auto, and no family that was compared suits this job: its engine, target "
                           "or fields of drafter exclude all", "name families")
    best = max(speeds.values())
    near = sorted((name for name, speed in speeds.items() if speed >= _NEAR * best), key=lambda name: -speeds[name])
    return spec.model_copy(update={"sweep": spec.sweep.model_copy(update={"families": tuple(near)})})


def predicted_speeds(spec: JobSpec, target: TargetFacts, architecture: str, gpu_type: str | None,
                     on_gpus: bool) -> dict[Family, float]:
    """Speed-up by family, for those that the job's engine computes for the target."""
    users = min(spec.prove.concurrencies)
    rates = Rates() if not on_gpus else gpu_rates(
        known_gpu(gpu_type) or ASSUMED, "expected", num_gpus=spec.engine.tp_size, tp_size=spec.engine.tp_size,
        batch=users, weight_bytes=2.0, active_share=target.active_parameters / target.parameters)
    most_tokens = spec.data.max_conversations * spec.regenerate.max_new_tokens
    vocabulary = spec.drafter.draft_vocab_size or expected_draft_vocabulary(target.vocab_size, most_tokens)
    speeds: dict[Family, float] = {}
    for name, tau in _computed(spec, architecture, on_gpus):
        (candidate,) = expand(spec.model_copy(update={
            "drafter": spec.drafter.model_copy(update={"family": name, "draft_vocab_size": vocabulary}),
            "sweep": spec.sweep.model_copy(update={"families": (), "axes": (), "random": None})}))
        speeds[name] = planned_speedup(target, target.trained_drafter(candidate), PUBLISHED_STEPS, tau, users, rates)
    return speeds


def _computed(spec: JobSpec, architecture: str, on_gpus: bool) -> Iterator[tuple[Family, float]]:
    variants = {field for field in VARIANT_FIELDS if getattr(spec.drafter, field)}
    for name, row in FAMILIES.items():
        if row.published_tau is None or variants - {*row.variant_fields} or (spec.engine.kind == "sglang" and (
                row.sglang_algorithm is None or (row.drafts_blocks and not on_gpus)
                or not {*spec.drawn_drafts} <= {*VERIFICATIONS[row.sglang_algorithm]})):
            continue
        try:
            if spec.engine.kind == "sglang" and row.target_states == "fused" and architecture:
                (require_block_capture if row.drafts_blocks else require_capture)(architecture)
        except UnsupportedTarget:
            continue
        yield name, row.published_tau
