"""Every SGLang command line of Eyrie, resolved by SGLang's own parser and rules: accepted, with the given values.

One process of the SGLang environment resolves the whole matrix (importing SGLang takes longer than resolving a line).
Machines are emulated, models are configurations without weights. Refusals that SGLang makes only while loading weights
cannot be reached this way: they are in the fast tier, tests/workers/engines/sglang.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import sglang_rounds
from eyrie_api.contract.engine import DraftServing, DraftTreeShape, EngineSpec, StepRate, Verification
from eyrie_api.contract.families import BLOCK_ALGORITHMS, VERIFICATIONS
from eyrie_api.contract.tuning import OFF, OperatingMap, OperatingPoint, Setting
from eyrie_api.planning.sglang_attention import PROFILES, SglangHardware, profile
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import (
    LaunchPlan,
    adaptive_config,
    launch_arguments,
    launch_environment,
    shared_args,
)
from tests.gpu.sizes import REAL
from tests.sglang.servers import ROOT, STAND_IN, environment, sglang_python
from tests.sglang.target_configs import TARGETS, VOCAB_SIZE, write_drafter, write_target
from tests.workers.engines.sglang.variants import comparison_commands

RESOLVER = Path(__file__).with_name("resolve_commands.py")
CHAIN = Setting(tree=DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6))
TREE = Setting(tree=DraftTreeShape(num_steps=4, top_k=4, num_draft_tokens=12))
NGRAM = Setting(method="ngram", tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))
NGRAM_TREE = Setting(method="ngram", tree=DraftTreeShape(num_steps=3, top_k=4, num_draft_tokens=12))
ADAPTIVE = OperatingMap(
    points=(OperatingPoint(concurrency=1, setting=CHAIN, speedup=2.0, tokens_per_s=100.0, measured=True),
            OperatingPoint(concurrency=16, setting=OFF, speedup=1.0, tokens_per_s=900.0, measured=True)),
    crossover=16, adaptive={"1": {"candidate_steps": [5]}, "8": {"candidate_steps": [1, 3]},
                            "16": {"candidate_steps": [0]}})
MACHINES = ("a10", "a100-80gb", "l40s", "h100", "b200", "rtx-pro-6000-blackwell", "mi300x", "cpu")
"""One per kind of rule; the other profiles differ from these in memory alone."""

FAMILIES = [(machine, target) for machine in MACHINES for target in TARGETS
            if (machine, target) != ("cpu", "deepseek-v3")]  # no CPU backend of ours serves MLA
ALGORITHMS: dict[str, dict[str, Any]] = {  # what tells a drafter of each from the EAGLE-3 one; SGLang's own names
    "EAGLE": {"architectures": ["LlamaForCausalLMEagle"]},
    "STANDALONE": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2},
    "DFLASH": {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
               "dflash_config": {"block_size": 6, "target_layer_ids": [1, 3]}},
    "DSPARK": {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
               "markov_head_type": "gated", "markov_rank": 4, "enable_confidence_head": True, "dflash_config": {
                   "block_size": 5, "mask_token_id": 1, "target_layer_ids": [1, 3]}}}
DRAFT_BACKENDS = {"a10": "flashinfer", "h100": "fa3", "b200": "fa4", "mi300x": "triton"}
"""What a DFlash drafter is computed with, by machine."""

DRAFTS = {"attention_backend": "triton", "kv_dtype": "fp8_e4m3", "quantization": "fp8"}

FURTHER = EngineSpec.model_validate({"kind": "sglang", "sglang_arguments": {
    "chunked_prefill_size": 2048, "mem_fraction_static": 0.5, "disable_prefill_cuda_graph": True,
    "disable_decode_cuda_graph": True, "disable_overlap_schedule": True}})



def chain(verification: Verification) -> Setting:
    return Setting(tree=DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6, verification=verification))


KINDS = {"chain": (), "tree": (TREE, NGRAM), "ngram-tree": (NGRAM_TREE,)}
PINNED = {"--attention-backend": "attention_backend", "--page-size": "page_size",
          "--mem-fraction-static": "mem_fraction_static", "--max-running-requests": "max_running_requests",
          "--context-length": "context_length", "--random-seed": "random_seed"}


def facts(machine: SglangHardware) -> dict[str, Any]:
    """What SGLang asks a machine, answered as this one would."""
    cuda, sm = machine.platform == "cuda", machine.compute
    blackwell = sm in (100, 103)
    return {
        "device": "cpu" if machine.platform == "cpu" else "cuda", "memory_mib": machine.memory_gib * 1024,
        "facts": {"is_cuda": cuda, "is_hip": machine.platform == "rocm", "is_sm90": sm == 90, "is_sm100": blackwell,
                  "is_sm100_or_sm110": blackwell, "is_sm120": sm == 120, "is_blackwell": blackwell or sm == 120,
                  "is_hopper_with_cuda_12_3": sm == 90, "has_flashinfer": cuda, "has_amx": machine.platform == "cpu",
                  "device_sm": sm, "device_capability": [sm // 10, sm % 10]}}


class Matrix:
    """The lines to resolve, by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.targets = {name: write_target(root, name) for name in TARGETS}
        self.drafter = write_drafter(root)
        self.others = {algorithm: write_drafter(root, f"drafter-{algorithm}", draft_vocab_size=VOCAB_SIZE, **changes)
                       for algorithm, changes in ALGORITHMS.items()}
        self.cases: list[dict[str, Any]] = []

    def plan(self, machine: str, target: str, setting: Setting = CHAIN, **more: Any) -> LaunchPlan:
        drafter = read_drafter(str(self.drafter), json.loads((self.drafter / "config.json").read_text()))
        directory = self.targets[target]
        known = read_target(str(directory), json.loads((directory / "config.json").read_text()))
        return LaunchPlan(target=known, machine=profile(machine), served_model_name=target, setting=setting,
                          **({"drafter": drafter} | more))

    def other(self, algorithm: str, machine: str, setting: Setting = CHAIN, **more: Any) -> LaunchPlan:
        """A plan with a drafter of another family."""
        directory = self.others[algorithm]
        drafter = read_drafter(str(directory), json.loads((directory / "config.json").read_text()))
        return self.plan(machine, "llama", setting, drafter=drafter, **more)

    def add(self, name: str, plan: LaunchPlan, line: tuple[str, ...] | None = None) -> None:
        self.cases.append({"name": name, "machine": plan.machine.name, "environment": launch_environment(plan),
                           "arguments": line if line is not None else launch_arguments(plan)})

    def add_variants(self, name: str, plan: LaunchPlan, settings: tuple[Setting, ...] = ()) -> None:
        for label, line in comparison_commands(plan, settings).items():
            self.add(f"{name} {label}", plan, line)


def altered(line: tuple[str, ...], **flags: str) -> tuple[str, ...]:
    """A permitted line with some values replaced: what we refuse to render."""
    words = list(line)
    for flag, value in flags.items():
        name = "--" + flag.replace("_", "-")
        if name in words:
            words[words.index(name) + 1] = value
        else:
            words += [name, value]
    return tuple(words)


def without(line: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """A line without one flag and its value."""
    return line[:line.index(flag)] + line[line.index(flag) + 2:]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    root = tmp_path_factory.mktemp("lines")
    found = Matrix(root)
    for machine, target in FAMILIES:
        for kind, settings in KINDS.items():
            found.add_variants(f"{machine} {target} {kind}", found.plan(machine, target), settings)
    for machine in MACHINES:
        for algorithm in ALGORITHMS:
            if algorithm in BLOCK_ALGORITHMS and machine == "cpu":
                continue
            for setting in (CHAIN,) if algorithm in BLOCK_ALGORITHMS else (CHAIN, TREE):
                found.add_variants(f"family {machine} {algorithm} {setting.label()}",
                               found.other(algorithm, machine, setting))
            for verification in VERIFICATIONS[algorithm][1:] if machine != "cpu" else ():
                found.add(f"verified {machine} {algorithm} {verification}",
                          found.other(algorithm, machine, chain(verification)))
            if machine in ("h100", "b200"):
                tree = DraftTreeShape(num_steps=5, num_draft_tokens=6, draft=DraftServing.model_validate(DRAFTS))
                found.add(f"computed {machine} {algorithm}", found.other(algorithm, machine, Setting(tree=tree)))
            if algorithm == "DSPARK" and machine in ("h100", "b200"):
                partly = DraftTreeShape(num_steps=5, num_draft_tokens=6, draft=DraftServing(
                    step_rates=tuple(StepRate(batch_tokens=tokens, steps_per_s=40.0 / tokens) for tokens in (1, 2))))
                found.add(f"confident {machine}", found.other(algorithm, machine, Setting(tree=partly),
                                                              adaptive_path=str(root / "steps.json")))
        further = replace(profile(machine), given_fraction=0.5)
        found.add_variants(f"further {machine}", replace(found.plan(machine, "llama"), engine=FURTHER, machine=further))
    add_features(found, root)
    for name, (plan, line) in rejected_commands(found, root).items():
        found.add(name, plan, line)
    return found


def add_features(found: Matrix, root: Path) -> None:
    """One of each of what a plan can ask for besides."""
    adaptive, key = root / "adaptive.json", root / "key.yaml"
    followed = found.plan("h100", "llama", map=ADAPTIVE, adaptive_path=str(adaptive))
    adaptive.write_text(adaptive_config(followed) or "")
    key.write_text("api-key: hidden\n")
    found.add_variants("adaptive", followed)
    found.add("key", found.plan("h100", "llama", key_file=str(key)))
    quantised = found.plan("h100", "qwen3-moe")
    quantised = replace(quantised, target=replace(quantised.target, quantised="fp8"))
    line = (*launch_arguments(quantised), "--quantization", "fp8")  # as the checkpoint of a quantised target says
    found.add("fp8", quantised, line)
    found.add("fp8 untold", quantised, without(line, "--speculative-draft-model-quantization"))
    windowed = replace(found.plan("h100", "llama").drafter or pytest.fail("no drafter"), sliding_window=512)
    found.add("window", found.plan("h100", "llama", drafter=windowed))
    found.add("tp", found.plan("h200", "qwen3", engine=EngineSpec(kind="sglang", tp_size=2)))
    found.add("short context", found.plan("gb200", "llama", context_length=1024))
    for machine in ("h100", "cpu"):
        models = sglang_rounds.write_configs(root / f"rounds-{machine}", replace(REAL, target_layers=32), "bfloat16")
        plan = sglang_rounds.launch_plan(root / f"rounds-{machine}", models, profile(machine), sglang_rounds.ON_A_GPU)
        shared = shared_args(plan, sglang_rounds.SETTINGS)
        for setting in (OFF, *sglang_rounds.SETTINGS):
            timed = replace(plan, setting=setting)
            found.add(f"rounds {machine} {setting.label()}", timed, tuple(
                sglang_rounds.server_line(timed, shared, sglang_rounds.ON_A_GPU)))
    short = write_drafter(root, "short-drafter", max_position_embeddings=2048)
    found.add("short drafter", found.plan("h100", "llama", drafter=read_drafter(
        str(short), json.loads((short / "config.json").read_text()))))


def rejected_commands(found: Matrix, root: Path) -> dict[str, tuple[LaunchPlan, tuple[str, ...]]]:
    """By name: a permitted plan and the line made of it by what we refuse."""
    chain, tree = found.plan("h100", "llama"), found.plan("h100", "llama", TREE)
    b200_tree, cpu_tree, hybrid = (found.plan(machine, target, setting) for machine, target, setting in (
        ("b200", "llama", TREE), ("cpu", "llama", TREE), ("cpu", "qwen3-next", CHAIN)))
    adaptive = found.plan("h100", "llama", map=ADAPTIVE, adaptive_path=str(root / "adaptive.json"))
    short = str(root / "short-drafter")
    standalone, blocks = (found.other(algorithm, "h100") for algorithm in ("STANDALONE", "DFLASH"))

    def line(plan: LaunchPlan, **flags: str) -> tuple[LaunchPlan, tuple[str, ...]]:
        return plan, altered(launch_arguments(plan), **flags)

    return {
        "trtllm_mha tree": line(b200_tree, attention_backend="trtllm_mha", page_size="64"),
        "intel_amx tree paged": line(cpu_tree, page_size="16"),
        "cpu recurrent paged": line(hybrid, page_size="16"),
        "aiter tree paged": line(found.plan("mi300x", "llama", TREE), attention_backend="aiter", page_size="16"),
        "adaptive tree": line(adaptive, speculative_eagle_topk="4"),
        "short drafter, long context": line(chain, speculative_draft_model_path=short),
        "long context": line(tree, context_length="8192"),
        "standalone adaptive": (standalone, (*launch_arguments(standalone), "--speculative-adaptive",
                                             "--speculative-adaptive-config", str(root / "adaptive.json"))),
        "blocks on cpu": line(found.plan("cpu", "llama"), speculative_algorithm="DFLASH",
                              speculative_draft_model_path=blocks.drafter.directory if blocks.drafter else ""),
        "blocks tree": line(blocks, speculative_eagle_topk="4", speculative_num_steps="5",
                            speculative_num_draft_tokens="6"),
        "standalone rejection": (standalone, (*launch_arguments(standalone), "--speculative-use-rejection-sampling")),
        "rejection tree": (tree, (*launch_arguments(tree), "--speculative-use-rejection-sampling")),
        "block on cpu": (found.plan("cpu", "llama"), (*launch_arguments(found.plan("cpu", "llama")),
                                                      "--speculative-use-block-verification")),
    }


REJECTED_BY_SGLANG = {
    "trtllm_mha tree": "topk = 1", "intel_amx tree paged": "page_size > 1", "cpu recurrent paged": "extra_buffer",
    "aiter tree paged": "page_size > 1", "short drafter, long context": "context_length",
    "long context": "context_length", "blocks on cpu": "not supported",
    "standalone rejection": "only supported for EAGLE", "rejection tree": "requires --speculative-eagle-topk=1",
    "block on cpu": "only supports CUDA",
}
CHANGED_BY_SGLANG = {  # accepted, and something else is served
    "adaptive tree": ("speculative_adaptive", False), "standalone adaptive": ("speculative_adaptive", False),
    "blocks tree": ("speculative_eagle_topk", 1),
}


@pytest.fixture(scope="module")
def answers(matrix: Matrix) -> dict[str, Any]:
    variables = os.environ | environment() | {"PYTHONPATH": f"{STAND_IN}{os.pathsep}{ROOT / 'workers'}"}
    variables.pop("SGLANG_USE_CPU_ENGINE")  # the cases say where it belongs
    asked = {"machines": {name: facts(machine) for name, machine in PROFILES.items()}, "cases": matrix.cases}
    done = subprocess.run([str(sglang_python()), str(RESOLVER)], input=json.dumps(asked), text=True,
                          capture_output=True, env=variables, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {answer["name"]: answer for answer in json.loads(done.stdout)}


def resolved(answers: Mapping[str, Any], name: str) -> dict[str, Any]:
    answer = answers[name]
    assert answer["refused"] is None, f"{name}: {answer['refused'][-600:]}"
    found: dict[str, Any] = answer["resolved"]
    return found


def test_no_command_has_a_flag_that_sglang_does_not_have(answers: dict[str, Any]) -> None:
    assert {name: answer["unknown"] for name, answer in answers.items() if answer["unknown"]} == {}


@pytest.mark.parametrize(("machine", "target"), FAMILIES)
def test_commands_are_accepted_and_every_shared_argument_is_kept_in_every_variant(
        machine: str, target: str, matrix: Matrix, answers: dict[str, Any]) -> None:
    mine = [case for case in matrix.cases if case["name"].startswith(f"{machine} {target} ")]
    assert len(mine) >= 7
    for case in mine:
        found, line = resolved(answers, case["name"]), case["arguments"]
        for flag, setting in PINNED.items():
            given = line[line.index(flag) + 1]
            assert str(found[setting]) == given, (case["name"], flag)
        assert {found["prefill_attention_backend"], found["decode_attention_backend"]} <= {
            None, found["attention_backend"]}


@pytest.mark.parametrize(("machine", "target"), FAMILIES)
def test_variants_differ_in_speculation_and_in_no_other_resolved_argument(
    machine: str, target: str, matrix: Matrix, answers: dict[str, Any]
) -> None:
    for kind in KINDS:
        name = f"{machine} {target} {kind}"
        variants = {case["name"].removeprefix(f"{name} "): resolved(answers, case["name"])
                    for case in matrix.cases if case["name"].startswith(f"{name} ")}
        off = variants.pop("off")
        assert off["speculative_algorithm"] is None
        assert variants
        for label, variant in variants.items():
            differing = {one for one, value in variant["everything"].items() if value != off["everything"][one]}
            assert differing == set(), (name, label)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("machine", MACHINES)
def test_every_family_uses_its_algorithm_and_tree_and_equals_the_variant_without_speculation(
        algorithm: str, machine: str, matrix: Matrix, answers: dict[str, Any]) -> None:
    prefix = f"family {machine} {algorithm} "
    mine = [case["name"] for case in matrix.cases if case["name"].startswith(prefix)]
    if algorithm in BLOCK_ALGORITHMS and machine == "cpu":
        assert mine == []
        return
    for setting in (CHAIN,) if algorithm in BLOCK_ALGORITHMS else (CHAIN, TREE):
        assert setting.tree is not None
        label = f"{prefix}{setting.label()}"
        on, off = (resolved(answers, f"{label} {variant}") for variant in (setting.label(), "off"))
        assert off["speculative_algorithm"] is None
        assert on["speculative_algorithm"] == algorithm
        assert on["everything"] == off["everything"]
        assert on["speculative_num_draft_tokens"] == setting.tree.num_draft_tokens
        if algorithm == "DFLASH":
            assert on["speculative_draft_attention_backend"] == DRAFT_BACKENDS.get(
                machine, on["attention_backend"])
        elif algorithm == "DSPARK":  # without a flag SGLang keeps the target's
            assert on["speculative_draft_attention_backend"] == {"b200": "flashinfer", "mi300x": "triton"}.get(machine)
        else:
            assert (on["speculative_num_steps"], on["speculative_eagle_topk"]) == (
                setting.tree.num_steps, setting.tree.top_k)


@pytest.mark.parametrize("machine", [machine for machine in MACHINES if machine != "cpu"])
def test_drafts_that_are_drawn_are_verified_as_asked_and_sglang_refuses_what_we_refuse(
        machine: str, answers: dict[str, Any]) -> None:
    for algorithm, verifications in VERIFICATIONS.items():
        for verification in verifications[1:] if algorithm in ALGORITHMS else ():
            found = resolved(answers, f"verified {machine} {algorithm} {verification}")
            assert found["speculative_use_block_verification"] is (verification == "block")
            assert found["speculative_use_rejection_sampling"] is (algorithm == "EAGLE")


@pytest.mark.parametrize("machine", ["h100", "b200"])
def test_a_drafter_is_computed_as_asked(machine: str, answers: dict[str, Any]) -> None:
    for algorithm in ALGORITHMS:
        found = resolved(answers, f"computed {machine} {algorithm}")
        assert {name: found[f"speculative_draft_{key}"] for name, key in (
            ("attention_backend", "attention_backend"), ("kv_dtype", "kv_cache_dtype"),
            ("quantization", "model_quantization"))} == DRAFTS


@pytest.mark.parametrize("machine", ["h100", "b200"])
def test_blocks_are_verified_by_confidence_with_the_table_given(machine: str, answers: dict[str, Any]) -> None:
    found = resolved(answers, f"confident {machine}")
    assert found["speculative_algorithm"] == "DSPARK"
    assert found["speculative_dspark_sps_table_path"].endswith("steps.json")


@pytest.mark.parametrize("machine", MACHINES)
def test_further_arguments_are_resolved_as_given_and_leave_the_variants_equal(
        machine: str, answers: dict[str, Any]) -> None:
    on, off = (resolved(answers, f"further {machine} {variant}")["everything"] for variant in (CHAIN.label(), "off"))
    assert on == off
    assert (off["chunked_prefill_size"], off["mem_fraction_static"], off["disable_overlap_schedule"]) == (
        "2048", "0.5", "True")
    assert off["cuda_graph_config"].count("disabled") == 2


def test_the_setting_is_resolved_as_given(answers: dict[str, Any]) -> None:
    def shape(name: str) -> tuple[Any, ...]:
        found = resolved(answers, name)
        return tuple(found[f"speculative_{key}"] for key in ("algorithm", "num_steps", "eagle_topk",
                                                             "num_draft_tokens"))

    assert shape("h100 llama tree 5/1/6") == ("EAGLE3", 5, 1, 6)
    assert shape("h100 llama tree 4/4/12") == ("EAGLE3", 4, 4, 12)
    assert shape("h100 llama tree ngram 3/1/4") == ("NGRAM", 3, 1, 4)
    assert shape("h100 llama ngram-tree ngram 3/4/12") == ("NGRAM", 3, 4, 12)
    assert shape("adaptive adaptive") == ("EAGLE3", 5, 1, 6)
    assert resolved(answers, "adaptive adaptive")["speculative_adaptive"] is True


def test_optional_features_of_a_plan_are_accepted(answers: dict[str, Any]) -> None:
    assert resolved(answers, "key")["api_key"] == "hidden"
    assert resolved(answers, "window")["speculative_draft_window_size"] == 511
    assert resolved(answers, "tp")["attention_backend"] == "fa3"
    assert resolved(answers, "short context")["context_length"] == 1024
    assert resolved(answers, "short drafter")["context_length"] == 2048


@pytest.mark.parametrize("machine", ["h100", "cpu"])
def test_servers_whose_rounds_are_measured_differ_in_drafting_alone(machine: str, answers: dict[str, Any]) -> None:
    off = resolved(answers, f"rounds {machine} off")
    for setting in sglang_rounds.SETTINGS:
        on = resolved(answers, f"rounds {machine} {setting.label()}")
        assert on["everything"] == off["everything"]
        assert setting.tree is not None
        assert (on["speculative_algorithm"], on["speculative_num_draft_tokens"]) == (
            "EAGLE3", setting.tree.num_draft_tokens)


def test_an_unquantised_drafter_would_be_quantised_without_our_flag(answers: dict[str, Any]) -> None:
    assert resolved(answers, "fp8 untold")["speculative_draft_model_quantization"] == "fp8"
    assert resolved(answers, "fp8")["speculative_draft_model_quantization"] is None


def test_olmo3_is_the_class_our_model_package_replaces(answers: dict[str, Any]) -> None:
    assert resolved(answers, "h100 olmo3 chain 5/1/6")["architecture"] == "Olmo2ForCausalLM"
    assert resolved(answers, "h100 deepseek-v3 chain 5/1/6")["mla"] is True


@pytest.mark.parametrize("name", list(REJECTED_BY_SGLANG))
def test_sglang_rejects_what_launch_checks_rejects(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]["resolved"] is None
    assert REJECTED_BY_SGLANG[name] in answers[name]["refused"]


@pytest.mark.parametrize("name", list(CHANGED_BY_SGLANG))
def test_sglang_changes_what_launch_checks_rejects(name: str, answers: dict[str, Any]) -> None:
    setting, value = CHANGED_BY_SGLANG[name]
    assert resolved(answers, name)[setting] == value


def test_every_rejected_command_is_expected(matrix: Matrix) -> None:
    assert set(rejected_commands(matrix, matrix.root)) == {*REJECTED_BY_SGLANG, *CHANGED_BY_SGLANG}
