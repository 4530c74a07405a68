"""Which earlier jobs a job may take answers and states from (`reuse: auto`). Pure.

The choice is coarse and made from the jobs' documents alone; it decides only which files the stage reads. The stage
then compares the digest of the target and the key of every row (`eyrie_workers.regeneration.earlier_answers`).

The caller passes the jobs of one project: answers of another project are never read.
"""

from collections.abc import Iterable
from itertools import islice

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.status import Job

MAX_JOBS = 4
"""The stage reads every answer of each, once."""


def jobs_with_answers(spec: JobSpec, others: Iterable[Job]) -> tuple[Job, ...]:
    """The jobs that a job may take answers from, at most `MAX_JOBS`, in the order given.

    others   other jobs of the same project, newest first
    """
    if spec.reuse == "never" or spec.data.answered:
        return ()
    sources = {source.path for source in spec.data.sources}
    fitting = (other for other in others
               if any(condition.type == "Regenerated" and condition.status == "True"
                      for condition in other.status.conditions)
               and not other.spec.data.answered and _generation(other.spec) == _generation(spec)
               and sources & {source.path for source in other.spec.data.sources})
    return tuple(islice(fitting, MAX_JOBS))


def asks_the_same(spec: JobSpec, earlier: JobSpec) -> bool:
    """Whether every prompt of `earlier` is one of `spec`, as long as the sources have not changed: the data is equal,
    or more of the same draw."""
    return (_prompts(spec) == _prompts(earlier) and spec.data.max_conversations >= earlier.data.max_conversations
            and (spec.regenerate.turns == "last" or spec.data.max_conversations == earlier.data.max_conversations))


def stores_the_same(job: ResolvedJob, earlier: ResolvedJob) -> bool:
    """Whether states of the same row are equal in both jobs, as far as the documents say. The codec that
    `capture.max_bytes` chose is in the report of the earlier job."""
    def state_format(job: ResolvedJob) -> tuple[object, ...]:
        capture, captured = job.spec.capture, job.captured
        # The draft vocabulary of top-k logits is counted over all answers.
        counted = job.spec.data.max_conversations if capture.final_state == "topk" else None
        return (capture.aux_layers, set(captured.families), set(captured.init_from), captured.aux_layers,
                capture.final_state, capture.final_top_k, capture.draft_vocab_size, capture.max_length, counted)

    modes = (job.spec.capture.mode, earlier.spec.capture.mode)
    return "stream" not in modes and state_format(job) == state_format(earlier)


def _generation(spec: JobSpec) -> tuple[object, ...]:
    """What all answers of a job have in common. Greedy answers do not depend on the seed, nor on which turns have one
    of their own."""
    section = spec.regenerate
    drawn = None if section.sampling.temperature == 0.0 else (section.seed, section.turns)
    return (spec.target, section.engine or spec.engine.kind, section.served_model, section.sampling,
            section.max_new_tokens, drawn)


def _prompts(spec: JobSpec) -> tuple[object, ...]:
    data = spec.data.model_copy(update={"mix": None, "max_conversations": 1})
    return data, spec.regenerate.turns, {suite.path for suite in spec.benchmark.suites}
