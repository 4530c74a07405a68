"""`eyrie export JOB`: a job's decision for people who serve by themselves.

What is exported is what was proven: the drafter with its setting and operating map where every check passed, whether
or not `promotion.mode` let it be served here; otherwise the target without a drafter, with the checks that failed. The
documents are rendered by `eyrie_operator.manifests.export`; this module reads the job's report through the REST API,
and the two config.json that flags depend on.
"""

import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group
from rich.text import Text

from eyrie_api.client import Client
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.status import Job, JobReport
from eyrie_api.contract.targets import DTYPES, Dtype, is_hub_id
from eyrie_api.decisions.certification import certification
from eyrie_api.decisions.promotion import summarize_decision
from eyrie_api.errors import Conflict, InvalidInput, NotFound
from eyrie_api.planning.facts import read_config, stored_dtype, target_dir
from eyrie_api.planning.sglang_attention import SglangHardware, preferred, profile
from eyrie_api.planning.sglang_support import holds_mtp_layers
from eyrie_api.planning.target_files import read_object
from eyrie_operator.manifests.export import (
    EngineLaunch,
    Objects,
    ServedDecision,
    ServingEngine,
    objects,
    sglang_launch,
    vllm_launch,
)
from eyrie_operator.manifests.pods import ADAPTIVE_FILE
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import DEFAULT_RUNNING_REQUESTS, LaunchPlan

ASSUMED_HARDWARE = "h100"


class Export(Frozen):
    """The result of `eyrie export`."""

    job: str
    drafted: bool
    """Whether the drafter is exported: every check of the job's promotion passed."""

    reason: str
    """The checks that failed, or the speed-ups at the declared loads."""

    sglang: EngineLaunch
    vllm: EngineLaunch
    objects: Objects
    notes: tuple[str, ...] = ()


def export(job: Job, report: JobReport, target: dict[str, Any], drafter: dict[str, Any] | None, *,
           target_model: str, drafter_at: str | None = None, hardware: str | None = None,
           engine: ServingEngine | None = None) -> Export:
    """The documents of a decision. Pure. Raises InvalidInput, and Conflict for a job without a decision.

    target, drafter   their config.json; the drafter's is None where none is exported, or it has no weights
    target_model      in commands: a Hub id or a directory
    drafter_at        where the drafter is served from; default: where the job has it
    """
    drafted, decision, proof, notes = is_drafted(report), report.decision, report.prove, list[str]()
    assert decision is not None
    named = hardware or job.spec.serve.hardware_profile
    if named is None:
        engine_used = None if report.tune is None else report.tune.engine
        named = "cpu" if engine_used is not None and engine_used.device.startswith("cpu") else ASSUMED_HARDWARE
        notes.append(f"the lines are for {named}: --hardware names another")
    measured = job.spec.engine
    machine = replace(profile(named), given_fraction=measured.sglang_arguments.mem_fraction_static)
    dtype = served_dtype(job.spec.target.dtype, stored_dtype(target), machine)
    if proof is not None and drafted and proof.environment.dtype != dtype:
        notes.append(f"measured in {proof.environment.dtype}, and served in {dtype}: certify it there (eyrie certify "
                     "--off URL --drafted URL)")
    checkpoint = read_target(target_model, target, job.spec.target.revision)
    if measured.attention_backend not in (None, *preferred(machine, checkpoint.attention)):
        notes.append(f"measured with attention backend {measured.attention_backend}, which is not used on {named}")
        measured = measured.model_copy(update={"attention_backend": None})
    plan, is_mtp = LaunchPlan(
        target=checkpoint, machine=machine, served_model_name=Path(job.spec.target.model).name, dtype=dtype,
        engine=measured, max_running_requests=job.spec.serve.max_concurrency or DEFAULT_RUNNING_REQUESTS), False
    if drafted:
        assert proof is not None
        use = proof.use
        plan = replace(plan, setting=use.setting, map=use.map, context_length=use.context_length)
        if drafter is not None:
            plan = replace(plan, drafter=read_drafter(drafter_at or use.drafter_dir or "", drafter))
            is_mtp = holds_mtp_layers(drafter)
    served = ServedDecision(job.spec.name or job.id, plan, is_mtp)
    sglang, vllm = sglang_launch(served), vllm_launch(served)
    chosen: ServingEngine = engine or ("vllm" if sglang.refused and not vllm.refused else "sglang")
    return Export(job=job.id, drafted=drafted, reason=summarize_decision(decision), sglang=sglang, vllm=vllm,
                  objects=objects(served, chosen), notes=tuple(notes))


def served_dtype(dtype: str, stored: str | None, machine: SglangHardware) -> Dtype:
    """A job on a CPU is measured in float32, which engines on a GPU do not serve: there it is 16 bits."""
    if machine.platform == "cpu":
        return next((name for name in DTYPES if name == dtype), "float32")
    return next((name for wanted in (dtype, stored) for name in DTYPES if name == wanted != "float32"), "bfloat16")


def is_drafted(report: JobReport) -> bool:
    """Whether every check of the decision passed. Raises Conflict for a job without one."""
    if report.decision is None:
        raise Conflict(f"job {report.job_id} has no decision yet (it is {report.phase})",
                       "wait for its end: eyrie watch JOB; a failed job continues by eyrie retry JOB")
    return report.decision.promote or certification(report.decision) == "faster"


def read_configs(client: Client, job: Job, report: JobReport) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """The target as commands name it, its config.json, and the drafter's. Raises InvalidInput and NotFound."""
    model = job.spec.target.model
    directory = target_dir(job.spec.target)
    if directory is None:
        raise InvalidInput(f"target {model!r} is not on this machine, and the flags depend on its config.json",
                           f"download it (hf download {model} config.json), or run eyrie export where it is")
    named = model if is_hub_id(model) else str(directory)
    use = None if report.prove is None or not is_drafted(report) else report.prove.use
    if use is None or use.drafter_dir is None:
        return named, read_config(directory), None
    return named, read_config(directory), drafter_config(client, job.id, Path(use.drafter_dir))


def drafter_config(client: Client, job_id: str, directory: Path) -> dict[str, Any]:
    """A drafter's config.json, from this machine or through the REST API. Raises NotFound."""
    wanted = directory / "config.json"
    if wanted.is_file():
        return read_object(wanted)
    found = [file for file in client.artifacts(job_id) if wanted.as_posix().endswith(f"/{file.path}")]
    if len(found) != 1:
        raise NotFound(f"the files of {directory.name} are neither here nor among the artifacts of job {job_id}",
                       "run eyrie export where they are; `eyrie storage` may have removed them")
    with tempfile.TemporaryDirectory() as scratch:
        return read_object(client.download(found[0], Path(scratch)))


def files(result: Export) -> dict[str, str]:
    """Contents by file name. Pure."""
    written = {}
    for launch in (result.sglang, result.vllm):
        if not launch.refused:
            written[f"{launch.engine}.sh"] = shell(launch) + "\n"
    if result.sglang.adaptive is not None:
        written[ADAPTIVE_FILE] = result.sglang.adaptive
    for name, documents in (("kubernetes.yaml", result.objects.kubernetes), ("kserve.yaml", result.objects.kserve),
                            ("llm_d_values.yaml", (result.objects.llm_d,) if result.objects.llm_d else ())):
        if documents:
            written[name] = "".join(f"# {note}\n" for note in result.objects.notes) + yaml.safe_dump_all(
                documents, sort_keys=False, width=116)
    return written


def shell(launch: EngineLaunch) -> str:
    """The command for a shell."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in sorted(launch.environment.items())),
                     shlex.join(launch.command)])


def write(result: Export, directory: Path) -> None:
    """Raises Conflict for a directory that exists."""
    if directory.exists():
        raise Conflict(f"{directory} exists", "name a directory that does not exist yet, or remove it")
    directory.mkdir(parents=True)
    for name, content in files(result).items():
        (directory / name).write_text(content)


def words(result: Export, directory: Path | None) -> Group:
    """For a terminal. Pure."""
    title = "With the drafter: " if result.drafted else "Without a drafter: "
    parts = [Text.assemble((title, "bold"), result.reason)]
    for title, launch in (("SGLang", result.sglang), ("vLLM", result.vllm)):
        parts += [Text(), Text(f"{title} ({launch.image})", "bold"),
                  Text(f"not served: {launch.refused}", "yellow") if launch.refused else Text(shell(launch)),
                  *(Text(f"note: {note}", "yellow") for note in launch.notes)]
    if directory is None and result.sglang.adaptive is not None:
        parts += [Text(), Text(f"{ADAPTIVE_FILE}, which SGLang's command reads:", "bold"), Text(result.sglang.adaptive)]
    parts += [Text(f"note: {note}", "yellow") for note in (*result.notes, *result.objects.notes)]
    parts.append(Text(f"written to {directory}: {', '.join(files(result))}" if directory is not None else
                      "--to DIR writes these, a Deployment, KServe's InferenceService and llm-d values"))
    return Group(*parts)
