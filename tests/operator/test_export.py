"""`eyrie export`: what a decision becomes for people who serve by themselves, against published schemas."""

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from rich.console import Console

from eyrie_api.client import Client
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.reports import PromotionCheck, PromotionDecision
from eyrie_api.contract.status import Job, JobReport, JobStatus
from eyrie_api.contract.tuning import OFF, DrafterUse, OperatingMap, Setting
from eyrie_api.errors import Conflict, InvalidInput
from eyrie_api.planning.sglang_attention import profile
from eyrie_operator.cli.export import Export, drafter_config, export, files, read_configs, served_dtype, words, write
from eyrie_operator.manifests.export import ServedDecision, objects, sglang_launch, vllm_launch
from eyrie_workers.sglang.checkpoints import DrafterCheckpoint
from eyrie_workers.sglang.launch import LaunchPlan, launch_arguments
from tests.api.samples import NOW, benchmark_report
from tests.operator.manifests.samples import ADAPTIVE, CHAIN, TARGET

SCHEMAS = Path(__file__).parent / "manifests" / "schemas"
ENVIRONMENT = benchmark_report("c", {"chat": (2.0,)}).environment
DRAFTER = DrafterCheckpoint("org/head", 4096)
USE = DrafterUse(drafter_dir="org/head", setting=CHAIN)
FOUR_GPUS = EngineSpec(kind="sglang", tp_size=4)
SERVED = ServedDecision("chat", LaunchPlan(target=TARGET, machine=profile("h100"), served_model_name="model",
                                           setting=CHAIN, drafter=DRAFTER))
LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "max_position_embeddings": 8192}
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 4096}


def served_as(**changes: Any) -> ServedDecision:
    return replace(SERVED, plan=replace(SERVED.plan, **changes))


def tree(steps: int, top_k: int, tokens: int) -> Setting:
    return Setting(tree=DraftTreeShape(num_steps=steps, top_k=top_k, num_draft_tokens=tokens))


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_sglangs_line_is_the_one_that_endpoints_are_started_with() -> None:
    launch = sglang_launch(SERVED)
    plan = LaunchPlan(target=TARGET, machine=profile("h100"), served_model_name="model", drafter=DRAFTER, setting=CHAIN)
    assert launch.command == ("python3", "-m", "sglang.launch_server", *launch_arguments(plan))
    assert (launch.refused, launch.adaptive, launch.notes) == ("", None, ())


def test_sglangs_line_has_the_jobs_backend_and_arguments() -> None:
    engine = {"kind": "sglang", "attention_backend": "triton", "sglang_arguments": {"chunked_prefill_size": 4096}}
    job, report = decided(use=USE)
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"engine": EngineSpec.model_validate(engine)})})
    result = export(job, report, LLAMA, HEAD, target_model="org/model", hardware="h100")
    [container] = result.objects.kubernetes[0]["spec"]["template"]["spec"]["containers"]
    assert option(tuple(container["command"]), "--attention-backend") == "triton"
    launch = result.sglang
    assert option(launch.command, "--attention-backend") == "triton"
    assert option(launch.command, "--chunked-prefill-size") == "4096"
    on_cpu = export(job, report, LLAMA, HEAD, target_model="org/model", hardware="cpu")
    assert option(on_cpu.sglang.command, "--attention-backend") == "intel_amx"
    assert "measured with attention backend triton, which is not used on cpu" in on_cpu.notes


def test_the_adaptive_file_comes_with_the_line_that_reads_it() -> None:
    launch = sglang_launch(served_as(map=ADAPTIVE))
    assert option(launch.command, "--speculative-adaptive-config") == "adaptive.json"
    assert json.loads(launch.adaptive or "") == ADAPTIVE.adaptive
    on_cpu = sglang_launch(served_as(machine=profile("cpu"), dtype="float32", map=ADAPTIVE))
    assert on_cpu.adaptive is None
    assert "no adaptive speculation on CPUs" in on_cpu.notes[0]
    assert len(on_cpu.notes) == 2, "and that the image is for CUDA"
    unfollowed = OperatingMap(points=ADAPTIVE.points)
    assert "has no form that SGLang follows" in sglang_launch(served_as(map=unfollowed)).notes[0]


def test_vllms_line_has_the_same_target_limits_and_depth() -> None:
    launch = vllm_launch(SERVED)
    assert launch.image.endswith(":v0.32.0")
    assert launch.command[:3] == ("vllm", "serve", "org/model")
    assert json.loads(option(launch.command, "--speculative-config")) == {
        "method": "eagle3", "model": "org/head", "num_speculative_tokens": 5}
    assert option(launch.command, "--max-model-len") == "4096", "the drafter's context is the shorter one"
    assert any("eyrie certify --off URL --drafted URL" in note for note in launch.notes)


@pytest.mark.parametrize(("changes", "says"), [
    ({"setting": tree(4, 4, 16)}, "4/4/16 is served as a chain of 4"),
    ({"map": ADAPTIVE}, "operating map is not exported to vLLM"),
    ({"drafter": replace(DRAFTER, algorithm="STANDALONE")}, "draft models of Eyrie were not run in vLLM"),
    ({"setting": Setting(method="ngram", tree=CHAIN.tree), "drafter": None}, "n-grams up in a request's own text"),
])
def test_what_vllm_serves_otherwise_than_it_was_measured_is_said(changes: dict[str, Any], says: str) -> None:
    launch = vllm_launch(served_as(**changes))
    assert launch.refused == ""
    assert any(says in note for note in launch.notes)
    assert "--speculative-config" in launch.command


@pytest.mark.parametrize(("algorithm", "is_mtp", "says"), [
    ("EAGLE", False, "no drafter of this form .EAGLE."), (None, False, "a family that Eyrie alone serves"),
    ("EAGLE", True, "from the target itself .method mtp.")])
def test_what_vllm_cannot_serve_is_refused_with_the_reason(algorithm: Any, is_mtp: bool, says: str) -> None:
    launch = vllm_launch(replace(served_as(drafter=replace(DRAFTER, algorithm=algorithm)), is_mtp=is_mtp))
    assert launch.command == ()
    assert re.search(says, launch.refused)


def test_what_sglang_cannot_serve_is_refused_and_vllms_objects_are_exported() -> None:
    job, report = decided(use=USE)
    static = USE.model_copy(update={"setting": Setting(tree=DraftTreeShape(
        num_steps=3, top_k=2, num_draft_tokens=6, static=True))})
    result = export(job, report.model_copy(update={"prove": proof(static)}), LLAMA, HEAD, target_model="org/model")
    assert "static" in result.sglang.refused
    [deployment, _] = result.objects.kubernetes
    assert deployment["spec"]["template"]["spec"]["containers"][0]["command"][:2] == ["vllm", "serve"]
    neither = objects(served_as(drafter=replace(DRAFTER, algorithm=None)), "sglang")
    assert neither.kubernetes == ()
    assert "family that SGLang cannot serve" in neither.notes[0]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("served", [
    SERVED, served_as(setting=OFF, drafter=None), served_as(map=ADAPTIVE, engine=FOUR_GPUS),
    served_as(target=replace(TARGET, model="/models/own"), drafter=replace(DRAFTER, directory="/home/jobs/c")),
    served_as(machine=profile("mi300x")),
    served_as(machine=profile("cpu"), dtype="float32")], ids=["chain", "off", "adaptive", "files", "rocm", "cpu"])
def test_the_objects_fit_the_published_schemas(served: ServedDecision, engine: Any) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="holds the schemas (extra dev)")
    made = objects(served, engine)
    for each in made.kubernetes:
        for version in ("1.27", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(each, version, strict=True)
    *configuration, service = made.kserve
    assert [each["kind"] for each in configuration] == (["ConfigMap"] if served.plan.map and engine == "sglang" else [])
    jsonschema.validate(service, json.loads((SCHEMAS / "kserve_inferenceservice.json").read_text()))
    jsonschema.validate(made.llm_d, json.loads((SCHEMAS / "llm_d_values.json").read_text()))
    # The chart's schema leaves containers open: without the chart's own fields they are those of a pod.
    [container] = made.llm_d["decode"]["containers"]
    own = {name: value for name, value in container.items() if name not in ("modelCommand", "mountModelVolume")}
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {
        "containers": [own], "volumes": made.llm_d["decode"]["volumes"]}}, "1.27", strict=True)


def test_the_schema_checks_would_notice_a_misspelt_field() -> None:
    made = objects(SERVED, "sglang")
    service = json.loads(json.dumps(made.kserve[-1]))
    service["spec"]["predictor"]["containers"][0]["comand"] = []
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        jsonschema.validate(service, json.loads((SCHEMAS / "kserve_inferenceservice.json").read_text()))
    with pytest.raises(jsonschema.ValidationError, match="tensors"):
        jsonschema.validate(made.llm_d | {"decode": {"parallelism": {"tensors": 1}}},
                            json.loads((SCHEMAS / "llm_d_values.json").read_text()))


def test_directories_become_claims_and_gpus_are_asked_for() -> None:
    served = served_as(target=replace(TARGET, model="/models/own"), drafter=replace(DRAFTER, directory="/j/c"),
                       engine=FOUR_GPUS, machine=profile("mi300x"))
    made = objects(served, "sglang")
    pod = made.kubernetes[0]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert option(tuple(container["command"]), "--model-path") == "/models/target"
    assert option(tuple(container["command"]), "--speculative-draft-model-path") == "/models/drafter"
    assert [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in
            volume] == ["eyrie-chat-target", "eyrie-chat-drafter"]
    assert container["resources"] == {"limits": {"amd.com/gpu": "4"}}
    assert made.notes == ("the claim eyrie-chat-target holds the files of /models/own",
                          "the claim eyrie-chat-drafter holds the files of /j/c")
    assert made.llm_d["modelArtifacts"]["uri"] == "pvc://eyrie-chat-target/"
    assert made.llm_d["decode"]["parallelism"] == {"tensor": 4}


# The decision of a job.


def proof(use: DrafterUse = USE) -> ProveReport:
    return ProveReport(checkpoint="c", path="/d", engine="sglang", use=use, environment=ENVIRONMENT, seconds=1.0)


def decided(*, passed: bool = True, use: DrafterUse = USE, mode: str = "auto") -> tuple[Job, JobReport]:
    check = PromotionCheck(name="load:1", passed=passed, figure=1.2, bound=1.05, words="1 user at once: 1.20x")
    decision = PromotionDecision.model_validate({
        "promote": passed and mode == "auto", "verdict": "promote" if passed and mode == "auto" else "no-drafter",
        "reasons": [check.words], "checks": [check]})
    spec = JobSpec.model_validate({"target": {"model": "org/model"}, "drafters": ["org/head"], "name": "chat",
                                   "promotion": {"mode": mode}})
    job = Job(id="job-1", created_at=NOW, updated_at=NOW, spec=spec, status=JobStatus(phase="Succeeded"))
    return job, JobReport(job_id="job-1", name="chat", target="org/model", phase="Succeeded", seconds={},
                          prove=proof(use), decision=decision)


def shown(result: Export) -> str:
    stream = io.StringIO()
    Console(file=stream, width=400).print(words(result, None))
    return stream.getvalue()


@pytest.mark.parametrize("mode", ["auto", "manual", "never"])
def test_a_drafter_that_passed_every_check_is_exported_whatever_the_policy_served(mode: str) -> None:
    result = export(*decided(mode=mode), LLAMA, HEAD, target_model="org/model")
    assert result.drafted
    assert option(result.sglang.command, "--speculative-draft-model-path") == "org/head"
    assert "With the drafter: all 1 checks passed" in shown(result)
    assert "the lines are for h100: --hardware names another" in shown(result)
    assert "measured in float32, and served in bfloat16" in shown(result)


@pytest.mark.parametrize(("dtype", "stored", "machine", "expected"), [
    ("float32", "bfloat16", "cpu", "float32"), ("auto", None, "cpu", "float32"), ("bfloat16", None, "cpu", "bfloat16"),
    ("float32", "float16", "h100", "float16"), ("float32", "float32", "h100", "bfloat16"),
    ("float16", "bfloat16", "h100", "float16")])
def test_float32_is_served_on_cpus_alone(dtype: str, stored: str | None, machine: str, expected: str) -> None:
    assert served_dtype(dtype, stored, profile(machine)) == expected


def test_a_job_that_was_not_promoted_exports_the_target_alone_and_says_why() -> None:
    result = export(*decided(passed=False), LLAMA, HEAD, target_model="org/model", hardware="h200")
    assert not result.drafted
    assert not any("speculative" in word for word in (*result.sglang.command, *result.vllm.command))
    assert "Without a drafter: 1 user at once: 1.20x" in shown(result)
    assert result.notes == ()


def test_the_drafter_is_served_from_where_it_was_published() -> None:
    job, report = decided(use=USE.model_copy(update={"drafter_dir": "/home/jobs/j/c"}))
    result = export(job, report, LLAMA, HEAD, target_model="org/model", drafter_at="me/published")
    assert option(result.sglang.command, "--speculative-draft-model-path") == "me/published"
    assert json.loads(option(result.vllm.command, "--speculative-config"))["model"] == "me/published"
    assert result.objects.notes == ()


def test_the_files_are_those_of_the_document(tmp_path: Path) -> None:
    result = export(*decided(use=USE.model_copy(update={"map": ADAPTIVE})), LLAMA, HEAD, target_model="org/model")
    write(result, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "sglang.sh", "vllm.sh", "adaptive.json", "kubernetes.yaml", "kserve.yaml", "llm_d_values.yaml"}
    assert shlex.split((tmp_path / "out" / "vllm.sh").read_text()) == list(result.vllm.command)
    read = tuple(yaml.safe_load_all((tmp_path / "out" / "kubernetes.yaml").read_text()))
    assert read == result.objects.kubernetes
    assert yaml.safe_load((tmp_path / "out" / "llm_d_values.yaml").read_text()) == result.objects.llm_d
    with pytest.raises(Conflict, match="exists"):
        write(result, tmp_path / "out")
    assert Export.model_validate_json(result.model_dump_json()) == result
    assert list(files(export(*decided(), LLAMA, HEAD, target_model="org/model"))) == [
        "sglang.sh", "vllm.sh", "kubernetes.yaml", "kserve.yaml", "llm_d_values.yaml"]


def test_what_cannot_be_exported_is_refused_with_the_reason(tmp_path: Path) -> None:
    job, report = decided()
    with Client("http://127.0.0.1:1") as client, pytest.raises(InvalidInput, match="is not on this machine"):
        read_configs(client, job, report)
    with pytest.raises(Conflict, match="has no decision yet"):
        export(job, report.model_copy(update={"decision": None}), LLAMA, HEAD, target_model="org/model")
    with pytest.raises(InvalidInput, match="hardware profile 'abacus' is not known"):
        export(job, report, LLAMA, HEAD, target_model="org/model", hardware="abacus")
    head = tmp_path / "c"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(HEAD))
    with Client("http://127.0.0.1:1") as client:
        assert drafter_config(client, job.id, head) == HEAD
