import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from eyrie_api.contract.engine import (
    AttentionBackend,
    DraftServing,
    DraftTreeShape,
    EngineSpec,
    StepRate,
    Verification,
)
from eyrie_api.contract.families import FAMILIES, VERIFICATIONS, SGLangAlgorithm
from eyrie_api.contract.tuning import OFF, OperatingMap, OperatingPoint, Setting
from eyrie_api.errors import UnsupportedTarget
from eyrie_api.planning.hardware import static_fraction
from eyrie_api.planning.sglang_attention import (
    PROFILES,
    AttentionNeeds,
    SglangHardware,
    attention_problem,
    profile,
)
from eyrie_api.planning.sglang_support import MARK, Unlaunchable
from eyrie_workers.sglang.checkpoints import (
    DrafterCheckpoint,
    TargetCheckpoint,
    checkpoint_algorithm,
    read_drafter,
    read_target,
)
from eyrie_workers.sglang.launch import (
    CapturedStates,
    LaunchPlan,
    adaptive_config,
    launch_arguments,
    launch_environment,
    shared_args,
)
from eyrie_workers.sglang.managed_engine import verified_greedily
from eyrie_workers.sglang.profiles import captured_batches
from tests.workers.engines.sglang.variants import comparison_commands, without_speculation

CHAIN = Setting(tree=DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6))
TREE = Setting(tree=DraftTreeShape(num_steps=4, top_k=4, num_draft_tokens=12))
NGRAM = Setting(method="ngram", tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))
ADAPTIVE = OperatingMap(
    points=(OperatingPoint(concurrency=1, setting=CHAIN, speedup=2.0, tokens_per_s=100.0, measured=True),
            OperatingPoint(concurrency=16, setting=OFF, speedup=1.0, tokens_per_s=900.0, measured=True)),
    crossover=16, adaptive={"1": {"candidate_steps": [5]}, "16": {"candidate_steps": [0]}, "ema_alpha": 0.2})


def plan(machine: str = "h100", setting: Setting = CHAIN, **more: Any) -> LaunchPlan:
    target = more.pop("target", TargetCheckpoint(model="/models/llama", architecture="LlamaForCausalLM", num_layers=32,
                                             context_length=8192))
    drafter = more.pop("drafter", DrafterCheckpoint(directory="/drafters/d", context_length=8192))
    return LaunchPlan(target=target, machine=profile(machine), served_model_name="llama", drafter=drafter,
                      setting=setting, **more)


def value(line: tuple[str, ...], flag: str) -> str | None:
    return line[line.index(flag) + 1] if flag in line else None


PINNED = ("--attention-backend", "--page-size", "--mem-fraction-static", "--max-running-requests", "--context-length",
          "--random-seed")
NGRAM_TREE = Setting(method="ngram", tree=DraftTreeShape(num_steps=3, top_k=4, num_draft_tokens=12))


@pytest.mark.parametrize("machine", list(PROFILES))
@pytest.mark.parametrize("setting", [CHAIN, TREE, NGRAM], ids=lambda one: one.label())
def test_both_variants_of_a_comparison_differ_in_nothing_but_speculation(machine: str, setting: Setting) -> None:
    lines = comparison_commands(plan(machine, setting))
    off, on = lines["off"], lines[setting.label()]
    assert all(value(off, flag) is not None for flag in PINNED)
    assert on[:len(off)] == off
    assert all(flag.startswith("--speculative-") for flag in on[len(off):] if flag.startswith("-"))


@pytest.mark.parametrize("machine", list(PROFILES))
def test_settings_raced_against_each_other_share_a_backend_that_serves_them_all(machine: str) -> None:
    lines = comparison_commands(plan(machine, CHAIN), [TREE, NGRAM])
    assert set(lines) == {"off", CHAIN.label(), TREE.label(), NGRAM.label()}
    assert len({tuple(value(line, flag) for flag in PINNED) for line in lines.values()}) == 1


@pytest.mark.parametrize("machine", list(PROFILES))
def test_further_arguments_are_equal_in_both_variants_and_only_those_of_the_job(machine: str) -> None:
    engine = EngineSpec.model_validate({"kind": "sglang", "sglang_arguments": {
        "chunked_prefill_size": 2048, "disable_prefill_cuda_graph": True, "disable_decode_cuda_graph": True,
        "disable_overlap_schedule": True}})
    lines = comparison_commands(plan(machine, engine=engine))
    off, on = lines["off"], lines[CHAIN.label()]
    assert on[:len(off)] == off
    plain = launch_arguments(plan(machine, OFF))
    for flag in ("--chunked-prefill-size", "--disable-prefill-cuda-graph", "--disable-decode-cuda-graph",
                 "--disable-overlap-schedule"):
        assert off.count(flag) == 1
        assert (flag in plain) == (machine == "cpu" and flag == "--disable-overlap-schedule")
    assert value(off, "--chunked-prefill-size") == "2048"


def test_a_named_backend_is_kept_for_every_setting_or_refused_with_those_that_serve() -> None:
    def named(backend: str, machine: str, setting: Setting = CHAIN) -> LaunchPlan:
        return plan(machine, setting, engine=EngineSpec.model_validate(
            {"kind": "sglang", "attention_backend": backend}))

    for setting in (OFF, CHAIN, TREE):
        assert shared_args(named("triton", "h100", setting)).attention_backend == "triton"
    with pytest.raises(Unlaunchable, match=r"engine\.attention_backend is 'fa3'.* on b200") as refused:
        shared_args(named("fa3", "b200"))
    assert refused.value.hint == "use trtllm_mha or flashinfer or triton, or omit it"
    with pytest.raises(Unlaunchable, match=r"engine\.attention_backend: .*chains only, and top_k is 4"):
        shared_args(named("trtllm_mha", "b200", CHAIN), [TREE])


def test_a_blackwell_chain_runs_on_trtllm_and_gives_it_up_when_compared_with_a_tree() -> None:
    assert shared_args(plan("b200", CHAIN)).attention_backend == "trtllm_mha"
    assert value(launch_arguments(plan("b200", CHAIN)), "--page-size") == "64"
    assert shared_args(plan("b200", CHAIN), [TREE]).attention_backend == "flashinfer"
    assert {shared_args(plan("h100", setting)).attention_backend for setting in (CHAIN, TREE)} == {"fa3"}


@pytest.mark.parametrize("machine", list(PROFILES))
def test_idle_variants_sleep_on_a_processor_they_share_with_the_one_measured(machine: str) -> None:
    commands = comparison_commands(plan(machine)).values()
    assert all(("--sleep-on-idle" in command) == (machine == "cpu") for command in commands)


def test_an_engine_on_a_cpu_takes_no_more_memory_than_its_requests_can_fill() -> None:
    line = launch_arguments(plan("cpu", max_running_requests=4, context_length=512))
    assert value(line, "--max-total-tokens") == "2048"
    assert value(launch_arguments(plan("h100")), "--max-total-tokens") is None


def test_a_server_that_writes_states_drafts_nothing_keeps_no_prefix_and_replays_no_graph() -> None:
    capturing = plan(setting=OFF, drafter=None, captured=CapturedStates((1, 15, 28), "/dev/shm/states"))
    line = launch_arguments(capturing)
    at = line.index("--return-aux-hidden-state-layer-ids")
    assert line[at + 1:at + 4] == ("1", "15", "28")
    assert {"--enable-return-aux-hidden-states", "--disable-radix-cache", "--disable-prefill-cuda-graph"} < set(line)
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" in launch_environment(capturing)
    assert "--disable-prefill-cuda-graph" not in launch_arguments(plan(setting=OFF))


def test_the_setting_is_written_in_sglangs_words() -> None:
    line = launch_arguments(plan(setting=TREE))
    assert value(line, "--speculative-algorithm") == "EAGLE3"
    assert value(line, "--speculative-draft-model-path") == "/drafters/d"
    assert value(line, "--speculative-num-steps") == "4"
    assert value(line, "--speculative-eagle-topk") == "4"
    assert value(line, "--speculative-num-draft-tokens") == "12"
    assert not any("speculative" in word for word in launch_arguments(plan(setting=OFF)))
    ngram = launch_arguments(plan(setting=NGRAM, drafter=None))
    assert value(ngram, "--speculative-algorithm") == "NGRAM"
    assert value(ngram, "--speculative-ngram-max-bfs-breadth") == "1"


def test_an_operating_map_with_an_adaptive_form_follows_the_load() -> None:
    adaptive = plan(map=ADAPTIVE, adaptive_path="/etc/eyrie/adaptive.json")
    line = launch_arguments(adaptive)
    assert "--speculative-adaptive" in line
    assert value(line, "--speculative-adaptive-config") == "/etc/eyrie/adaptive.json"
    assert (value(line, "--speculative-num-steps"), value(line, "--speculative-eagle-topk")) == ("5", "1")
    document = adaptive_config(adaptive)
    assert document is not None
    assert json.loads(document) == ADAPTIVE.adaptive
    assert set(comparison_commands(adaptive)) == {"off", "adaptive", CHAIN.label()}
    assert adaptive_config(without_speculation(adaptive)) is None
    assert launch_environment(adaptive) == {"SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": "1"}
    always = ADAPTIVE.model_copy(update={"adaptive": {"1": {"candidate_steps": [5]}, "16": {"candidate_steps": [1]}}})
    assert launch_environment(plan(map=always, adaptive_path="/etc/eyrie/adaptive.json")) == {}


def test_a_map_that_never_drafts_is_served_without_speculation() -> None:
    never = ADAPTIVE.model_copy(update={"adaptive": {"1": {"candidate_steps": [0]}}})
    assert "--speculative-algorithm" not in launch_arguments(plan(setting=OFF, map=never))


def test_an_unquantised_drafter_is_declared_next_to_a_quantised_target() -> None:
    flag = "--speculative-draft-model-quantization"
    by_itself = TargetCheckpoint(model="/m", architecture="LlamaForCausalLM", num_layers=32, context_length=8192,
                             quantised="gptq")
    assert value(launch_arguments(plan(target=by_itself)), flag) == "unquant"
    assert value(launch_arguments(plan()), flag) is None
    both = DrafterCheckpoint(directory="/d", context_length=8192, quantised="fp8")
    assert value(launch_arguments(plan(target=by_itself, drafter=both)), flag) is None


def test_a_window_of_positions_becomes_sglangs_count_of_those_behind() -> None:
    windowed = DrafterCheckpoint(directory="/d", context_length=8192, sliding_window=1024)
    assert value(launch_arguments(plan(drafter=windowed)), "--speculative-draft-window-size") == "1023"


WINDOWED = DrafterCheckpoint(directory="/d", context_length=8192, sliding_window=1024)


@pytest.mark.parametrize(("machine", "backend"), [("h100", "fa3"), ("a100-80gb", "fa3"), ("l40s", "fa3"),
                                                  ("cpu", "intel_amx")])
def test_a_chain_of_a_windowed_drafter_runs_where_the_window_is_kept(machine: str, backend: str) -> None:
    lines = comparison_commands(plan(machine, drafter=WINDOWED), [NGRAM])
    assert {value(line, "--attention-backend") for line in lines.values()} == {backend}


@pytest.mark.parametrize(("refused", "says"), [
    (plan("rtx-pro-6000-blackwell", drafter=WINDOWED), "one key too few"),
    (plan(drafter=WINDOWED, setting=TREE), "exceed in attention backend"),
    (plan("cpu", drafter=WINDOWED, setting=TREE), "exceed in attention backend"),
    (plan("b200", drafter=WINDOWED), "have not been examined"),
    (plan("mi300x", drafter=WINDOWED), "one key too few"),
    (plan("b200", drafter=WINDOWED, map=ADAPTIVE, adaptive_path="/a", setting=OFF), "have not been examined"),
])
def test_a_windowed_drafter_is_refused_where_it_would_be_served_otherwise_than_trained(refused: LaunchPlan,
                                                                                       says: str) -> None:
    with pytest.raises(Unlaunchable, match=says) as raised:
        launch_arguments(refused)
    assert "as a chain (top_k 1)" in raised.value.hint
    assert "without drafter.sliding_window" in raised.value.hint


def test_flashinfer_forgets_the_window_of_a_drafter() -> None:
    problem = attention_problem(profile("h100"), AttentionNeeds(windowed_draft=1), "flashinfer", 1)
    assert problem is not None
    assert "forgets it" in problem[0]


def test_a_windowed_drafter_restricts_no_setting_that_does_not_ask_it() -> None:
    for setting in (OFF, NGRAM, NGRAM_TREE):
        assert launch_arguments(plan("b200", setting, drafter=WINDOWED))
    with pytest.raises(Unlaunchable, match="exceed in attention backend"):
        comparison_commands(plan(drafter=WINDOWED), [TREE])


def test_the_context_served_is_one_that_target_and_drafter_reach() -> None:
    short = DrafterCheckpoint(directory="/d", context_length=2048)
    assert value(launch_arguments(plan(drafter=short)), "--context-length") == "2048"
    assert {value(line, "--context-length") for line in comparison_commands(plan(drafter=short)).values()} == {"2048"}
    with pytest.raises(Unlaunchable, match="2048 positions") as refused:
        launch_arguments(plan(drafter=short, context_length=4096))
    assert "context_length 2048" in refused.value.hint
    with pytest.raises(Unlaunchable, match="more than the target's"):
        launch_arguments(plan(setting=OFF, context_length=9000))


OLMO = TargetCheckpoint(model="/m", architecture="Olmo3ForCausalLM", num_layers=32, context_length=8192,
                    attention=AttentionNeeds(sliding=True))
MLA = TargetCheckpoint(model="/m", architecture="DeepseekV3ForCausalLM", num_layers=61, context_length=8192,
                   attention=AttentionNeeds(mla=True))
HYBRID = TargetCheckpoint(model="/m", architecture="Qwen3NextForCausalLM", num_layers=48, context_length=8192,
                      attention=AttentionNeeds(linear=True))
MIXTRAL = TargetCheckpoint(model="/m", architecture="MixtralForCausalLM", num_layers=32, context_length=8192)


def test_olmo_is_served_through_our_model_package_in_both_variants() -> None:
    named = plan(target=OLMO, plugin_root="/opt/eyrie")
    for variant in (named, without_speculation(named)):
        assert launch_environment(variant) == {
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "eyrie_workers.sglang.plugin", "PYTHONPATH": "/opt/eyrie"}
    assert launch_environment(plan()) == {}
    assert "SGLANG_USE_CPU_ENGINE" in launch_environment(plan("cpu"))
    assert "SGLANG_AITER_HONOR_EXPLICIT_MEM_FRACTION" in launch_environment(plan("mi300x"))


@pytest.mark.parametrize(("machine", "backend", "says"), [
    ("b200", "trtllm_mha", "chains only"), ("b200", "flashinfer", "chains only for MLA targets"),
    ("mi300x", "aiter", "chains only")])
def test_a_backend_chosen_for_another_variant_is_refused_for_trees_that_it_does_not_verify(
        machine: str, backend: str, says: str) -> None:
    refused = plan(machine, TREE, target=MLA if backend == "flashinfer" else plan().target)
    with pytest.raises(Unlaunchable, match=says) as raised:
        launch_arguments(refused, replace(shared_args(replace(refused, setting=OFF)), attention_backend=backend))
    assert "top_k 1" in raised.value.hint


@pytest.mark.parametrize(("refused", "says", "hint"), [
    (plan(drafter=None), "there is none", "off"),
    (plan(dtype="float32"), "float32", "bfloat16"),
    (replace(plan(), machine=SglangHardware("small", "cuda", 89, 6)), "small has 6 GiB", "more memory"),
])
def test_what_cannot_be_served_is_refused_with_a_hint(refused: LaunchPlan, says: str, hint: str) -> None:
    with pytest.raises(Unlaunchable) as raised:
        launch_arguments(refused)
    assert says in str(raised.value)
    assert hint in raised.value.hint


def test_a_target_whose_states_cannot_be_captured_is_refused_with_the_list_but_served_plainly() -> None:
    with pytest.raises(UnsupportedTarget, match="MixtralForCausalLM") as refused:
        launch_arguments(plan(target=MIXTRAL))
    assert "LlamaForCausalLM" in refused.value.hint
    assert "Olmo3ForCausalLM" in refused.value.hint
    assert launch_arguments(plan(target=MIXTRAL, setting=NGRAM, drafter=None))
    assert launch_arguments(plan(target=MIXTRAL, setting=OFF))


@pytest.mark.parametrize("machine", list(PROFILES))
@pytest.mark.parametrize("needs", [AttentionNeeds(), AttentionNeeds(mla=True), AttentionNeeds(sliding=True),
                                   AttentionNeeds(sliding=True, sinks=True), AttentionNeeds(linear=True)])
def test_every_machine_has_a_backend_for_plain_decoding_chains_and_trees(machine: str, needs: AttentionNeeds) -> None:
    target = replace(MLA, attention=needs)
    for setting in (OFF, CHAIN, TREE):
        line = launch_arguments(plan(machine, setting, target=target))
        assert value(line, "--attention-backend") is not None


@given(st.floats(16, 400))
def test_the_memory_fraction_leaves_room_on_every_card(memory_gib: float) -> None:
    assert 0.5 < static_fraction(memory_gib) < 0.95


def test_a_key_comes_from_a_file_and_never_stands_in_the_line() -> None:
    line = launch_arguments(plan(key_file="/run/secrets/sglang.yaml"))
    assert value(line, "--config") == "/run/secrets/sglang.yaml"
    assert "--api-key" not in line


def test_facts_are_read_from_config_json_of_any_family() -> None:
    deepseek = read_target("/m", {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61,
                                  "max_position_embeddings": 4096, "kv_lora_rank": 512, "n_routed_experts": 256,
                                  "rope_scaling": {"type": "yarn", "factor": 40},
                                  "quantization_config": {"quant_method": "fp8"}})
    assert deepseek.attention.mla
    assert (deepseek.quantised, deepseek.context_length) == ("fp8", 163840)
    gemma = read_target("/m", {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
        "num_hidden_layers": 26, "max_position_embeddings": 32768, "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"]}})
    assert gemma.attention == AttentionNeeds(sliding=True)
    hybrid = read_target("/m", {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 48,
                                "max_position_embeddings": 262144, "linear_num_key_heads": 16})
    assert hybrid.attention == AttentionNeeds(linear=True)
    plain = read_target("/m", {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 28, "sliding_window": 4096,
                               "use_sliding_window": False, "max_position_embeddings": 32768})
    assert plain.attention == AttentionNeeds()
    with pytest.raises(Unlaunchable, match="num_hidden_layers"):
        read_target("/m", {"architectures": ["X"], "max_position_embeddings": 10})


def test_an_olmo3_whose_rope_sglang_would_misread_is_refused() -> None:
    saved_by_transformers_5 = {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 4,
        "max_position_embeddings": 512, "rope_parameters": {"sliding_attention": {"rope_theta": 5e5},
                                                            "full_attention": {"rope_theta": 5e5}}}
    with pytest.raises(Unlaunchable, match="rope_parameters") as refused:
        read_target("/m", saved_by_transformers_5)
    assert "rope_scaling" in refused.value.hint
    published = {key: value for key, value in saved_by_transformers_5.items() if key != "rope_parameters"}
    assert read_target("/m", published | {"rope_theta": 5e5}).architecture == "Olmo3ForCausalLM"


def test_a_drafters_window_and_context_are_read_from_its_config() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    read = read_drafter("/d", {"max_position_embeddings": 131072, "rope_scaling": llama3, "sliding_window": 512})
    assert (read.context_length, read.sliding_window) == (131072, 512)
    assert read_drafter("/d", {"max_position_embeddings": 64, "eyrie": {"sliding_window": 9}}).sliding_window == 9
    linear = {"rope_type": "linear", "factor": 4.0}
    assert read_drafter("/d", {"max_position_embeddings": 64, "rope_scaling": linear}).context_length == 256


@given(st.integers(1, 700))
def test_both_variants_capture_the_same_batches_up_to_the_last(most: int) -> None:
    sizes = captured_batches(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert set(range(1, min(most, 8) + 1)) <= set(sizes)


def drafted(algorithm: Any, setting: Setting = CHAIN, machine: str = "h100", **more: Any) -> LaunchPlan:
    facts = {name: more.pop(name) for name in ("block_size", "sliding_window", "bfloat16_only") if name in more}
    return plan(machine, setting, drafter=DrafterCheckpoint("/drafters/d", 8192, algorithm=algorithm, **facts), **more)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("setting", [CHAIN, TREE], ids=lambda one: one.label())
def test_a_drafter_is_launched_with_its_own_algorithm_and_the_shape_asked_for(algorithm: str, setting: Setting) -> None:
    line = launch_arguments(drafted(algorithm, setting))
    assert value(line, "--speculative-algorithm") == algorithm
    assert value(line, "--speculative-eagle-topk") == str(setting.tree.top_k if setting.tree else 0)


def chain(verification: Verification) -> Setting:
    return Setting(tree=DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6, verification=verification))


@pytest.mark.parametrize("algorithm", list(VERIFICATIONS))
def test_drafts_are_verified_as_asked_where_sglang_can_and_refused_elsewhere(algorithm: SGLangAlgorithm) -> None:
    flags = {"rejection": "--speculative-use-rejection-sampling", "block": "--speculative-use-block-verification"}
    usual = launch_arguments(drafted(algorithm))
    assert not set(flags.values()) & set(usual)
    for verification, flag in flags.items():
        asked = drafted(algorithm, chain(verification))
        if verification in VERIFICATIONS[algorithm]:
            assert [one for one in launch_arguments(asked) if one not in usual] == [flag]
            with pytest.raises(Unlaunchable, match="cpu"):
                launch_arguments(replace(asked, machine=profile("cpu")))
            reduced = replace(asked.drafter or pytest.fail("no drafter"), whole_vocabulary=False)
            with pytest.raises(Unlaunchable, match="vocabulary"):
                launch_arguments(replace(asked, drafter=reduced))
        else:
            with pytest.raises(Unlaunchable, match=f"does not verify drafts of {algorithm} by '{verification}'"):
                launch_arguments(asked)


SERVED = [({"attention_backend": "triton"}, ("--speculative-draft-attention-backend", "triton")),
          ({"kv_dtype": "fp8_e4m3"}, ("--speculative-draft-kv-cache-dtype", "fp8_e4m3")),
          ({"quantization": "fp8"}, ("--speculative-draft-model-quantization", "fp8"))]


def computed(draft: dict[str, str], tree: DraftTreeShape | None = CHAIN.tree) -> Setting:
    assert tree is not None
    return Setting(tree=tree.model_copy(update={"draft": DraftServing.model_validate(draft)}))


@pytest.mark.parametrize("algorithm", list(VERIFICATIONS))
@pytest.mark.parametrize(("draft", "flags"), SERVED)
def test_a_drafter_is_computed_as_asked(algorithm: SGLangAlgorithm, draft: dict[str, str],
                                        flags: tuple[str, str]) -> None:
    asked, usual = drafted(algorithm, computed(draft)), launch_arguments(drafted(algorithm))
    assert launch_arguments(asked) == (*usual, *flags)
    with pytest.raises(Unlaunchable, match="for GPUs"):
        launch_arguments(replace(asked, machine=profile("cpu")))


@pytest.mark.parametrize(("machine", "algorithm", "draft", "tree", "says"), [
    ("b200", "EAGLE3", {"attention_backend": "fa3"}, CHAIN.tree, "does not draft EAGLE3 on b200"),
    ("h100", "EAGLE3", {"attention_backend": "fa4"}, CHAIN.tree, "does not draft EAGLE3 on h100"),
    ("b200", "DFLASH", {"attention_backend": "trtllm_mha"}, CHAIN.tree, "does not draft DFLASH on b200"),
    ("b200", "EAGLE3", {"attention_backend": "fa4"}, TREE.tree, "chains only"),
    ("b200", "DFLASH", {"attention_backend": "fa4", "kv_dtype": "fp8_e4m3"}, CHAIN.tree, "no FP8 cache"),
    ("b200", "DFLASH", {"kv_dtype": "fp8_e4m3"}, CHAIN.tree, "no FP8 cache"),
    ("a100-80gb", "EAGLE3", {"quantization": "fp8"}, CHAIN.tree, "has no FP8"),
    ("mi300x", "EAGLE3", {"attention_backend": "flashinfer"}, CHAIN.tree, "does not draft EAGLE3 on mi300x")])
def test_what_sglang_does_not_compute_of_a_drafter_is_refused(
        machine: str, algorithm: str, draft: dict[str, str], tree: DraftTreeShape, says: str) -> None:
    with pytest.raises(Unlaunchable, match=says) as refused:
        launch_arguments(drafted(algorithm, computed(draft, tree), machine))
    assert refused.value.hint


def test_a_dspark_drafter_is_verified_by_its_confidences_at_the_rates_given() -> None:
    rates = (StepRate(batch_tokens=1, steps_per_s=40.0), StepRate(batch_tokens=6, steps_per_s=20.0))
    usual = launch_arguments(drafted("DSPARK"))
    for known, more in ((rates, ("--speculative-dspark-sps-table-path", "/a.json",
                                "--speculative-dspark-align-verify-tokens-to-graph-tier")), ((), ())):
        asked = drafted("DSPARK", Setting(tree=DraftTreeShape(num_steps=5, num_draft_tokens=6, draft=DraftServing(
            step_rates=known))), adaptive_path="/a.json")
        assert launch_arguments(asked) == (*usual, *more)
        assert launch_environment(asked)["SGLANG_RAGGED_VERIFY_MODE"] == "compact"
        document = adaptive_config(asked)
        assert (document is None) == (not known)
        if document is not None:
            assert json.loads(document) == {"sample_batch_tokens": [1, 6], "sample_steps_per_sec": [40.0, 20.0],
                                            "max_batch_tokens": 6}
    calibrated = replace(asked, setting=Setting(tree=DraftTreeShape(num_steps=2, num_draft_tokens=3, draft=DraftServing(
        step_rates=rates))), drafter=replace(asked.drafter or pytest.fail("none"),
                                             confidence_temperatures=(2.0, 0.5, 1.0)))
    assert value(launch_arguments(calibrated), "--speculative-dspark-confidence-sts-path") == "/a.json"
    assert json.loads(adaptive_config(calibrated) or "")["temperatures"] == [2.0, 0.5]
    longer = replace(calibrated, setting=asked.setting.model_copy(update={"tree": calibrated.setting.tree and
        calibrated.setting.tree.model_copy(update={"num_steps": 5, "num_draft_tokens": 6})}))
    assert "--speculative-dspark-confidence-sts-path" not in launch_arguments(longer), "SGLang takes one for each step"
    assert "temperatures" not in json.loads(adaptive_config(longer) or "")
    with pytest.raises(Unlaunchable, match="is of DSpark's confidences"):
        launch_arguments(drafted("DFLASH", asked.setting))
    with pytest.raises(Unlaunchable, match="no confidence head"):
        launch_arguments(replace(asked, drafter=replace(asked.drafter or pytest.fail("none"), confident=False)))
    with pytest.raises(ValidationError, match="ascending"):
        DraftServing(step_rates=rates[::-1])
    with pytest.raises(ValidationError, match=r"\[1\]: give at least two"):
        DraftServing(step_rates=rates[:1])


@pytest.mark.parametrize(("machine", "backend", "needs", "hint"), [
    ("h100", None, {}, None), ("b200", None, {}, None), ("b200", None, {"mla": True}, None),
    ("h100", "triton", {}, "use fa3"), ("b200", "flashinfer", {}, "use trtllm_mha"),
    ("h100", None, {"linear": True}, "a GPU with another"), ("a100-80gb", None, {}, "fa3 on Hopper"),
    ("rtx-pro-6000-blackwell", None, {}, "trtllm_mha on B200"), ("mi300x", None, {}, "a GPU with another")])
def test_parts_of_blocks_are_verified_by_backends_that_sglang_has_it_in(
        machine: str, backend: AttentionBackend | None, needs: dict[str, bool], hint: str | None) -> None:
    asked = drafted("DSPARK", Setting(tree=DraftTreeShape(num_steps=5, num_draft_tokens=6, draft=DraftServing(
        step_rates=()))), machine, engine=EngineSpec(kind="sglang", attention_backend=backend))
    asked = replace(asked, target=replace(asked.target, attention=AttentionNeeds(**needs)))
    if hint is None:
        assert launch_arguments(asked)
        return
    with pytest.raises(Unlaunchable, match="verifies parts of blocks, and attention backend") as refused:
        launch_arguments(asked)
    assert hint in refused.value.hint


def test_a_drafter_that_is_stored_quantised_is_not_quantised_again() -> None:
    asked = drafted("EAGLE3", computed({"quantization": "fp8"}))
    stored = replace(asked.drafter or pytest.fail("no drafter"), quantised="fp8")
    with pytest.raises(Unlaunchable, match="is stored quantised"):
        launch_arguments(replace(asked, drafter=stored))
    quantised = replace(asked, target=replace(asked.target, quantised="fp8"))
    assert value(launch_arguments(quantised), "--speculative-draft-model-quantization") == "fp8"


def test_a_dspark_drafter_under_a_backend_without_blocks_has_its_own() -> None:
    flag = "--speculative-draft-attention-backend"
    for machine, own in (("b200", "flashinfer"), ("mi300x", "triton"), ("h100", None)):
        assert value(launch_arguments(drafted("DSPARK", machine=machine)), flag) == own
        assert value(launch_arguments(drafted("DFLASH", machine=machine)), flag) is None, "SGLang chooses it"


@pytest.mark.parametrize(("config", "whole"), [({}, True), ({"draft_vocab_size": 512}, True),
                                               ({"draft_vocab_size": 128}, False)])
def test_whether_a_drafter_can_propose_every_token_is_read_from_its_config(config: dict[str, int], whole: bool) -> None:
    assert read_drafter("/drafters/d", {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 512,
                                        "max_position_embeddings": 64} | config).whole_vocabulary is whole


def test_a_domino_head_is_known_by_its_projector() -> None:
    blocks = {"architectures": ["DFlashDraftModel"], "max_position_embeddings": 64}
    for projector, known in (("domino", True), ("dflash", False)):
        config = blocks | {"dflash_config": {"block_size": 6, "projector_type": projector}}
        assert read_drafter("/drafters/d", config).bfloat16_only is known


def test_answers_that_sglang_gives_greedily_whatever_the_temperature_are_known_by_platform() -> None:
    for setting in (CHAIN, TREE, NGRAM):
        assert verified_greedily("cuda", setting) is None
        assert "AMD GPUs" in str(verified_greedily("rocm", setting))
        assert "CPU" in str(verified_greedily("cpu", setting))
    assert verified_greedily("rocm", chain("rejection")) is None
    assert verified_greedily("rocm", OFF) is None
    assert verified_greedily("cpu", OFF) is None


def test_a_block_of_dspark_is_named_without_the_accepted_token() -> None:
    line = launch_arguments(drafted("DSPARK", block_size=6))
    assert value(line, "--speculative-algorithm") == "DSPARK"
    assert value(line, "--speculative-dspark-block-size") == "5"
    assert value(line, "--speculative-num-draft-tokens") is None
    with pytest.raises(Unlaunchable, match="DSPARK does not run on cpu"):
        launch_arguments(drafted("DSPARK", block_size=6, machine="cpu"))


def test_a_drafter_of_blocks_is_given_its_block() -> None:
    line = launch_arguments(drafted("DFLASH", block_size=6))
    assert value(line, "--speculative-dflash-block-size") == "6"
    assert value(line, "--speculative-num-steps") is None
    assert value(line, "--speculative-draft-attention-backend") is None


OLMO = TargetCheckpoint(model="/models/olmo", architecture="Olmo3ForCausalLM", num_layers=32, context_length=8192)
MIXTRAL = replace(OLMO, architecture="MixtralForCausalLM")
QWEN2 = replace(OLMO, architecture="Qwen2ForCausalLM")
STATIC = Setting(tree=DraftTreeShape(num_steps=4, top_k=4, num_draft_tokens=12, static=True))


@pytest.mark.parametrize(("refused", "word"), [
    (drafted(None), "family that SGLang cannot serve"),
    (drafted("EAGLE", STATIC), "static"),
    (drafted("EAGLE", sliding_window=512), "window"),
    (drafted("STANDALONE", map=ADAPTIVE, adaptive_path="/a"), "adaptive"),
    (drafted("DFLASH", map=ADAPTIVE, adaptive_path="/a"), "adaptive"),
    (drafted("DFLASH", machine="cpu"), "cpu"),
    (drafted("DFLASH", TREE), "top_k is 4"),
    (drafted("DFLASH", block_size=4), "drafter's block, 4"),
    (drafted("DFLASH", bfloat16_only=True, dtype="float16"), "Domino head in bfloat16 alone, and dtype is float16"),
])
def test_what_a_family_cannot_do_in_sglang_is_refused_with_a_hint(refused: LaunchPlan, word: str) -> None:
    with pytest.raises(Unlaunchable, match=word) as error:
        launch_arguments(refused)
    assert error.value.hint


def test_a_family_that_reads_no_inner_layers_is_served_next_to_targets_sglang_cannot_capture() -> None:
    for algorithm in ("EAGLE", "STANDALONE"):
        assert value(launch_arguments(drafted(algorithm, target=MIXTRAL)), "--speculative-algorithm") == algorithm
    for algorithm, target in (("EAGLE3", MIXTRAL), ("DFLASH", MIXTRAL), ("DFLASH", QWEN2), ("DFLASH", OLMO)):
        with pytest.raises(UnsupportedTarget, match="cannot capture hidden states of"):
            launch_arguments(drafted(algorithm, target=target))


def test_the_algorithm_is_read_from_the_architecture_of_every_family_sglang_serves() -> None:
    expected = {"eagle3": "EAGLE3", "eagle1": "EAGLE", "standalone": "STANDALONE", "dflash": "DFLASH",
                "dspark": "DSPARK", "mtp": "EAGLE"}
    for name, row in FAMILIES.items():
        config = {"architectures": [row.architecture]} | ({"eyrie": {"drafter": MARK}} if row.of_target else {})
        assert checkpoint_algorithm(config) == expected.get(name), name
        assert row.sglang_algorithm == expected.get(name), name
    assert checkpoint_algorithm({"architectures": ["LlamaForCausalLM"]}) == "STANDALONE"
    assert checkpoint_algorithm({"architectures": ["Eagle3LlamaForCausalLM"]}) is None
    assert checkpoint_algorithm({}) is None
