"""What an installation has no capacity for: it refuses a job, and the plan of one notes it."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from eyrie_api.contract.engine import SGLANG_PROGRAM
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import PlacementRequest
from eyrie_api.errors import DiskTooSmall, EyrieError, InvalidInput
from eyrie_api.full_disk import free_bytes
from eyrie_api.planning.facts import DEVICES, WITHOUT_A_NUMBER, gpu_memory_here, gpus_of, has_sglang, memory_here
from eyrie_api.planning.hardware import memory_of, too_small_gpus
from eyrie_api.planning.main_memory import too_small_memory
from eyrie_api.planning.plan import stage_gpus
from eyrie_api.planning.plan_work import PlannedWork
from eyrie_api.planning.sglang_support import SGLANG_VERSION
from eyrie_api.planning.submission import Submission
from eyrie_api.quantities import size


def missing_here(submission: Submission, devices: Path = DEVICES) -> list[InvalidInput]:
    """What a job asks for and this machine does not have: GPUs, SGLang; on a cluster nothing.

    GPUs are counted by their device files. Where those give no number, nothing is refused: the stage that needs them
    counts them with torch."""
    if submission.job.on_cluster:
        return []
    errors, on_cpu = [], os.environ.get("EYRIE_DEVICE") == "cpu"
    if on_cpu or not any((devices / name).exists() for name in WITHOUT_A_NUMBER):
        num_gpus = len(gpus_of(os.environ, devices))
        has = f"this machine has {num_gpus} GPU{'' if num_gpus == 1 else 's'}"
        what = "EYRIE_DEVICE is cpu, with which this machine uses no GPUs" if on_cpu else has
        lower = f"lower it to at most {num_gpus}" if num_gpus else "omit it"
        wanted = [(f"{field}.num_gpus", request.num_gpus or 0) for field, request in requests_of(submission.job.spec)]
        if num_gpus:  # on CPUs a server may be divided as well
            wanted.append(("engine.tp_size", submission.job.spec.engine.tp_size))
        errors = [InvalidInput(f"{field} is {number} and {what}",
                               f"{lower}, or submit the job where there are as many")
                  for field, number in wanted if number > num_gpus]
    if submission.job.spec.engine.kind == "sglang" and not has_sglang(submission.settings):
        errors.append(InvalidInput(
            f"engine.kind is 'sglang', and this server finds no SGLang: {SGLANG_PROGRAM} is not set, and SGLang is not "
            "installed next to Eyrie",
            f"`pip install sglang=={SGLANG_VERSION}` in an environment of its own, and set {SGLANG_PROGRAM}="
            "'ENVIRONMENT/bin/python -m sglang.launch_server' before `eyrie up`; or set engine to 'embedded'"))
    return errors


def requests_of(spec: JobSpec) -> list[tuple[str, PlacementRequest]]:
    """Every placement that a job requests, by the field that names it."""
    return [("placement.every", spec.placement.every),
            *((f"placement.stages.{stage}", request) for stage, request in spec.placement.stages.items()),
            ("serve.placement", spec.serve.placement),
            *((f"prove.hardware.profiles.{number}.placement", profile.placement)
              for number, profile in enumerate(spec.prove.profiles))]


def gpus_without_room(submission: Submission, *, for_other_machines: bool = False) -> Sequence[EyrieError]:
    """One error for each kind of GPUs, of a stage or the endpoint, that the target does not fit; none where a size is
    not known. On a cluster a GPU's memory is that of its label. On one machine a job runs on the GPUs that are there,
    and a label is for plans alone.

    for_other_machines   where jobs run on one machine: take a GPU of the job's label, as a plan does
    """
    job, facts = submission.job, submission.facts
    weights, computed = (submission.weight_bytes(engine) for engine in (job.spec.engine.kind, "embedded"))
    if facts.sizes is None or weights is None or computed is None:
        return []
    here, profile = gpu_memory_here(), facts.profile
    return too_small_gpus(
        job, facts.sizes, weights, computed=computed, node_gpus=submission.node_gpus,
        serves=profile is None or profile.serving is not None, memory=lambda label: memory_of(label) if (
            profile is not None or (for_other_machines and label is not None)) else here)


def memory_without_room(submission: Submission) -> Sequence[EyrieError]:
    """One error for each stage of a job of one machine that computes on CPUs and exceeds its main memory. A pod has
    what its placement requests, which is not compared."""
    job, facts, available = submission.job, submission.facts, memory_here()
    if job.on_cluster or facts.sizes is None or available is None:
        return []
    on_gpus = facts.computes_on_gpus(job.gpus, job.serving_gpus)
    return too_small_memory(PlannedWork(job, facts.sizes, facts.data),
                            {stage: stage_gpus(job, stage, on_gpus) for stage in job.gpus}, available)


def disk_without_room(submission: Submission) -> Sequence[EyrieError]:
    """An error where the disk under EYRIE_HOME has no room for what the job writes. Only lengths sampled from the data
    refuse a job: without them the plan is an upper bound, which does not prove that the job will not fit."""
    planned, home = submission.job.plan, submission.settings.home
    if planned is None or planned.fits_disk is not False or submission.facts.data.prompt_tokens is None:
        return []
    return [DiskTooSmall(f"the job needs about {size(planned.total_bytes_on_disk)} under {home} and "
                         f"{size(free_bytes(home))} are free",
                         "lower data.max_conversations or capture.max_length, use capture.codec int4 or "
                         "capture.final_state topk, or set EYRIE_HOME to a larger disk")]


CAPACITY_CHECKS: tuple[Callable[[Submission], Sequence[EyrieError]], ...] = (
    missing_here, gpus_without_room, disk_without_room, memory_without_room)
