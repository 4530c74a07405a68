"""The spec of each stage, as pure values."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from eyrie_api.artifacts import digest_model
from eyrie_api.contract.benchmark import BenchmarkSpec, RivalSpec, SuiteSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import PublishedDrafter
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import JobPlacement
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.prove import ProveSpec
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.reports import CheckpointReport, RegenerateReport, TrainReport, VocabularyReport
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.contract.stages import STAGES
from eyrie_api.contract.sweep import SweepAxis, SweepSpec
from eyrie_api.contract.tuning import DrafterUse, Setting, TuneSpec
from eyrie_api.errors import ArtifactMissing, InvalidInput, NoUsableData
from eyrie_api.planning import sweep
from eyrie_api.planning.resolve import derive
from eyrie_api.planning.sweep import expand
from eyrie_pipelines import stage_specs
from eyrie_pipelines.runner import JobFile
from tests.pipelines.conftest import spec_of, sweeping_spec

ROOT = Path("/jobs/job-1")
JOB = JobFile(id="job-1", resolved=derive(spec_of()))


def trained(candidate: str, *at: int) -> TrainReport:
    checkpoints = tuple(
        CheckpointReport(name=f"{candidate}-step-{step}", candidate=candidate, step=step,
                         path=f"checkpoints/{candidate}-step-{step}", digest="sha256:" + "0" * 64, epoch=1.0, loss=1.0,
                         accuracy=(), conditional_acceptance=(), theoretical_speedup=1.0) for step in at)
    return TrainReport(candidate=candidate, steps=1, tokens=1, supervised_tokens=1, seconds=1.0, tokens_per_s=1.0,
                       padding_share=0.0, data_wait_share=0.0, checkpoints=checkpoints,
                       vocabulary=VocabularyReport(draft_vocab_size=1, vocab_size=1, coverage=1.0, coverage_curve={}))


def regenerated(held_out: int) -> RegenerateReport:
    return RegenerateReport(rows_read=9, rows_answered=9, rows_held_out=held_out, rows_quarantined=0, prompt_tokens=1,
                            answer_tokens=1, finish_reasons={}, sources={}, seconds=1.0, tokens_per_s=1.0)


def test_suite_prompts_are_named_to_regenerate_so_that_none_is_trained_on() -> None:
    suites = (SuiteSpec(name="a", path="quickstart:chat"), SuiteSpec(name="b", path="held-out"))
    job = JobFile(id="j", resolved=derive(spec_of(benchmark=BenchmarkSpec(suites=suites))))
    assert stage_specs.regenerate_spec(job, ROOT).exclude_prompts == ("quickstart:chat",)



def test_earlier_jobs_are_fixed_when_a_job_first_starts_and_the_incumbent_when_an_attempt_does() -> None:
    first = JobFile(id="j", resolved=derive(spec_of()), reuse=("job-a", "job-b"))
    later = JobFile(id="j", resolved=derive(spec_of()), reuse=("job-c",), incumbent=DrafterUse())
    assert first.after(None) == first
    assert later.after(first) == first
    retried = later.model_copy(update={"attempt": 2})
    assert retried.after(first) == retried.model_copy(update={"reuse": first.reuse})
    assert retried.after(first.model_copy(update={"id": "other"})) == retried
    assert stage_specs.regenerate_spec(first, ROOT).reuse == tuple(
        str(ROOT.parent / earlier / "stages" / "regenerate") for earlier in first.reuse)


def test_each_candidate_is_trained_with_its_own_values() -> None:
    job = JobFile(id="j", resolved=derive(sweeping_spec()))
    rates = [stage_specs.train_spec(job, ROOT, candidate.name).train.learning_rate
             for candidate in job.resolved.candidates]
    assert rates == [0.001, 0.002, 0.003]
    with pytest.raises(InvalidInput, match="unknown"):
        stage_specs.train_spec(job, ROOT, "unknown")


def test_capture_stores_what_any_candidate_reads() -> None:
    assert stage_specs.capture_spec(JOB, ROOT).families == ("eagle3",)
    axis = SweepAxis(field="drafter.aux_layers", values=([1, 4], [2, 4, 6]))
    named = JobFile(id="j", resolved=derive(spec_of(sweep=SweepSpec(axes=(axis,)))))
    captured = stage_specs.capture_spec(named, ROOT)
    assert (captured.families, captured.aux_layers) == ((), (1, 2, 4, 6))
    continued = stage_specs.capture_spec(JobFile(id="j", resolved=derive(spec_of(drafter={
        "init_from": "org/head", "init_revision": "v2"}))), ROOT)
    assert (continued.families, continued.init_from) == (
        (), (PublishedDrafter(path="org/head", revision="v2"),))  # the layers are the head's
    both = JobFile(id="j", resolved=derive(spec_of(sweep=SweepSpec(axes=(axis,), families=("eagle3", "eagle1")))))
    result = stage_specs.capture_spec(both, ROOT)
    assert (result.families, result.aux_layers) == (("eagle1",), (1, 2, 4, 6))


def trains_together(spec: JobSpec, num_gpus: int | None = None) -> bool:
    """num_gpus: of a training's pod; None: on one machine."""
    return sweep.trains_together(spec, len(expand(spec)), num_gpus or 1, on_cluster=num_gpus is not None)


def test_candidates_are_trained_together_where_that_is_cheaper_and_not_slower_than_was_asked_for() -> None:
    assert not trains_together(spec_of()), "one candidate alone"
    assert trains_together(sweeping_spec())
    assert not trains_together(sweeping_spec("never"))
    assert trains_together(sweeping_spec(), num_gpus=1)
    assert not trains_together(sweeping_spec(), num_gpus=2)
    assert trains_together(sweeping_spec("always"), num_gpus=2)
    nodes = JobPlacement(train_nodes=4, train_launcher="trainjob")
    assert not trains_together(sweeping_spec(placement=nodes), num_gpus=1)
    assert trains_together(sweeping_spec(placement=nodes)), "on one machine there is no launcher"
    of_three = [sweep.trains_together(sweeping_spec(), 3, num_gpus, on_cluster=False) for num_gpus in (1, 2, 3, 8)]
    assert of_three == [True, True, True, False], "a GPU would have no candidate"


@pytest.mark.parametrize(("placement", "num_gpus"), [
    ({}, None), ({"every": {"num_gpus": 4}}, 4), ({"every": {"num_gpus": 4}, "stages": {"train": {"queue": "a"}}}, 4),
    ({"every": {"num_gpus": 4}, "stages": {"train": {"num_gpus": 2}}}, 2),
    ({"every": {"num_gpus": 4}, "stages": {"train": {"num_gpus": 0}}}, 0)])
def test_the_gpus_of_a_training_are_those_of_its_stage_else_of_every_stage(
        placement: dict[str, object], num_gpus: int | None) -> None:
    job = derive(spec_of(placement=JobPlacement.model_validate(placement)))
    assert (job.gpus["train"].num_gpus, job.num_processes("train")) == (num_gpus, max(1, num_gpus or 0))


def test_checkpoints_are_listed_in_order_of_candidate_and_step() -> None:
    found = stage_specs.benchmarked(JOB.resolved, [trained("b", 20, 3), trained("a", 5)])
    assert [one.name for one in found] == ["b-step-3", "b-step-20", "a-step-5"]
    assert found[0].path == "stages/train/b/checkpoints/b-step-3"
    with pytest.raises(ArtifactMissing):
        stage_specs.benchmarked(JOB.resolved, [trained("a")])


def test_only_the_first_checkpoint_times_transformers_and_held_out_prompts_are_named_when_wanted() -> None:
    (ref,) = stage_specs.benchmarked(JOB.resolved, [trained("a", 5)])
    result = stage_specs.benchmark_spec(JOB, ROOT, ref, first=True)
    assert result.measure_transformers
    assert result.held_out_file is None
    suites = (SuiteSpec(name="b", path="held-out"),)
    wanting = JobFile(id="j", resolved=derive(spec_of(benchmark=BenchmarkSpec(suites=suites))))
    result = stage_specs.benchmark_spec(wanting, ROOT, ref, first=False)
    assert not result.measure_transformers
    assert result.held_out_file == "/jobs/job-1/stages/regenerate/held_out.jsonl"
    assert stage_specs.tune_spec(wanting, ROOT, ref).drafter_dir == "/jobs/job-1/stages/train/a/checkpoints/a-step-5"


def test_rivals_are_benchmarked_after_the_candidates_and_off_is_the_baseline_of_each() -> None:
    spec = spec_of(rivals=(RivalSpec.model_validate("org/EAGLE3-Model"), RivalSpec.model_validate("ngram"),
                           RivalSpec.model_validate("off")))
    refs = stage_specs.benchmarked(derive(spec), [trained("a", 5)])
    assert [ref.name for ref in refs] == ["a-step-5", "rival-eagle3-model", "rival-ngram"]
    result = stage_specs.benchmark_spec(JobFile(id="j", resolved=derive(spec)), ROOT, refs[1], first=False)
    assert (result.rival, result.drafter_dir) == (
        spec.rivals[0], "/jobs/job-1/stages/benchmark/rival-eagle3-model/drafter")
    assert stage_specs.benchmark_spec(JobFile(id="j", resolved=derive(spec)), ROOT, refs[0], first=True).rival is None


def test_drafters_that_were_trained_elsewhere_are_the_candidates_and_rivals_follow_them() -> None:
    spec = JobSpec.model_validate({"target": {"model": "quickstart"}, "drafters": ["/a/Head", "org/b"],
                                   "rivals": ["ngram"]})
    job = JobFile(id="job-1", resolved=derive(spec))
    refs = stage_specs.benchmarked(job.resolved, [])
    assert [ref.name for ref in refs] == ["head", "b", "rival-ngram"]
    first, second, lookup = (stage_specs.benchmark_spec(job, ROOT, ref, first=False) for ref in refs)
    assert (first.brought, first.rival, first.drafter_dir) == (
        spec.drafters[0], None, "/jobs/job-1/stages/benchmark/head/drafter")
    assert (second.source, second.source_field) == (spec.drafters[1], "drafters")
    assert (lookup.source, lookup.source_field, lookup.brought) == (spec.rivals[0], "rivals", None)
    keys = {stage: stage_specs.stage_keys(job.resolved, ROOT, stage) for stage in STAGES}
    assert keys == {"regenerate": [], "capture": [], "train": [], "benchmark": ["head", "b", "rival-ngram"],
                    "tune": [""], "prove": [""], "hardware": []}
    assert "brought" not in lookup.model_dump(mode="json"), "the digests of other specs are as before"


@pytest.mark.parametrize(("rivals", "says"), [
    (("org/a", "other/a"), "rival-a is named twice"), (("nextn",), "engine is 'embedded', which does not compute"),
    (({"method": "ngram", "path": "/d"},), "a drafter needs the path")])
def test_rivals_that_cannot_be_told_apart_or_measured_are_refused(rivals: tuple[object, ...], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        JobSpec.model_validate(spec_of().model_dump() | {"rivals": rivals})


def test_a_job_that_wants_held_out_prompts_but_has_none_is_refused_before_it_is_trained() -> None:
    data = DataSpec(sources=(DataSource(path="quickstart"),), held_out_fraction=0.01)
    suites = (SuiteSpec(name="mine", path="held-out"),)
    job = JobFile(id="j", resolved=derive(spec_of(data=data, benchmark=BenchmarkSpec(suites=suites))))
    stage_specs.check_held_out(job, regenerated(1))
    with pytest.raises(NoUsableData, match=r"'mine'.*0\.01") as result:
        stage_specs.check_held_out(job, regenerated(0))
    assert "data.held_out_fraction" in result.value.hint
    stage_specs.check_held_out(JOB, regenerated(0))


def test_equal_jobs_give_equal_specs_and_a_changed_value_another_digest() -> None:
    again = JobFile(id="job-1", resolved=derive(spec_of()))
    assert digest_model(stage_specs.capture_spec(JOB, ROOT)) == digest_model(stage_specs.capture_spec(again, ROOT))
    elsewhere = stage_specs.capture_spec(JOB, Path("/other"))
    assert digest_model(stage_specs.capture_spec(JOB, ROOT)) != digest_model(elsewhere)


def test_every_stage_follows_the_rules_of_its_job_and_without_any_its_digest_is_as_before() -> None:
    checkpoint = stage_specs.CheckpointRef(name="c", candidate="base", path="stages/train/base/checkpoints/c")
    rules = ReadRules(home="/home", places=("jobs/mine",))
    for reads in (rules, None):
        job = JOB.model_copy(update={"resolved": JOB.resolved.model_copy(update={"reads": reads})})
        specs = (stage_specs.regenerate_spec(job, ROOT), stage_specs.capture_spec(job, ROOT),
                 stage_specs.train_spec(job, ROOT, job.resolved.candidates[0].name),
                 stage_specs.benchmark_spec(job, ROOT, checkpoint, first=True),
                 stage_specs.tune_spec(job, ROOT, checkpoint), stage_specs.prove_spec(job, ROOT, checkpoint, "tune"))
        for spec in specs:
            assert type(spec).model_validate_json(spec.model_dump_json()).reads == reads
            assert ("reads" in spec.model_dump(mode="json")) == (reads is not None)


def test_tuner_and_benchmark_judge_by_the_bound_of_the_jobs_promotion_and_the_default_changes_no_digest() -> None:
    job = JobFile(id="j", resolved=derive(spec_of(promotion=PromotionPolicy(min_speedup=1.3))))
    (ref,) = stage_specs.benchmarked(JOB.resolved, [trained("base", 5)])
    assert stage_specs.tune_spec(job, ROOT, ref).min_speedup == 1.3
    assert stage_specs.benchmark_spec(job, ROOT, ref, first=True).min_speedup == 1.3
    assert "min_speedup" not in stage_specs.benchmark_spec(JOB, ROOT, ref, first=True).model_dump()


def test_sglangs_servers_hold_the_same_load_in_benchmark_and_tuning_as_in_the_proof() -> None:
    ref = stage_specs.CheckpointRef(name="a-step-5", candidate="a", path="stages/train/a/checkpoints/a-step-5")

    def limits(**sections: object) -> tuple[int | None, int | None]:
        job = JobFile(id="j", resolved=derive(spec_of(engine=EngineSpec(kind="sglang"), **sections)))
        return (stage_specs.benchmark_spec(job, ROOT, ref, first=True).max_concurrency,
                stage_specs.tune_spec(job, ROOT, ref).max_concurrency)

    assert limits(prove=ProveSpec(concurrencies=(1, 32))) == (32, 32)
    assert limits(serve=ServeSpec(max_concurrency=64)) == (64, 64)
    assert limits(tune=TuneSpec(concurrencies=(1, 100)), serve=ServeSpec(max_concurrency=64)) == (100, 100)
    assert "max_concurrency" not in stage_specs.benchmark_spec(JOB, ROOT, ref, first=True).model_dump()
    assert "max_concurrency" not in stage_specs.tune_spec(JOB, ROOT, ref).model_dump()


def test_only_the_proof_receives_what_serves_now() -> None:
    (ref,) = stage_specs.benchmarked(JOB.resolved, [trained("a", 5)])
    incumbent = DrafterUse(drafter_dir="/drafter", setting=Setting(tree=DraftTreeShape()))
    later = JOB.model_copy(update={"attempt": 2, "incumbent": incumbent})
    result = stage_specs.prove_spec(later, ROOT, ref, stage_specs.reference("tune"))
    assert result.incumbent == incumbent
    assert result.tune_dir == "/jobs/job-1/stages/tune"
    assert (result.engine, result.max_concurrency) == (later.spec.engine, later.spec.serve.max_concurrency)
    # So a retry that meets another incumbent repeats nothing else.
    assert digest_model(stage_specs.tune_spec(later, ROOT, ref)) == digest_model(stage_specs.tune_spec(JOB, ROOT, ref))
    assert digest_model(result) != digest_model(stage_specs.prove_spec(JOB, ROOT, ref, stage_specs.reference("tune")))


def test_references_name_a_stage_and_its_key() -> None:
    assert stage_specs.reference("train", "base") == "stages/train/base"
    assert stage_specs.reference("tune") == "stages/tune"
