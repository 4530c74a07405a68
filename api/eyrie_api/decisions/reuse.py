"""Which earlier jobs a job may take answers from (`reuse: auto`). Pure.

The choice is coarse and made from the jobs' documents alone; it decides only which files the stage reads. The stage
then compares the digest of the target and the key of every row (`eyrie_workers.regeneration.earlier_answers`).

The caller passes the jobs of one project: answers of another project are never read.
"""

from collections.abc import Iterable
from itertools import islice

from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.status import Job

MAX_JOBS = 4
"""The stage reads every answer of each, once."""


def jobs_with_answers(job: Job, others: Iterable[Job]) -> tuple[str, ...]:
    """Ids of the jobs that `job` may take answers from, at most `MAX_JOBS`, in the order given.

    others   jobs of the same project, newest first; `job` may be among them
    """
    if job.spec.reuse == "never" or job.spec.data.answered:
        return ()
    fitting = (other.id for other in others if other.id != job.id and _has_regenerated(other)
               and not other.spec.data.answered and _generation(other.spec) == _generation(job.spec)
               and _sources(other.spec) & _sources(job.spec))
    return tuple(islice(fitting, MAX_JOBS))


def _has_regenerated(job: Job) -> bool:
    return any(one.type == "Regenerated" and one.status == "True" for one in job.status.conditions)


def _generation(spec: JobSpec) -> tuple[object, ...]:
    """What all answers of a job have in common. Greedy answers do not depend on the seed, nor on which turns have one
    of their own."""
    section = spec.regenerate
    drawn = None if section.sampling.temperature == 0.0 else (section.seed, section.turns)
    return (spec.resolved_target, section.engine or spec.engine.kind, section.served_model, section.sampling,
            section.max_new_tokens, drawn)


def _sources(spec: JobSpec) -> set[str]:
    return {source.path for source in spec.data.sources}
