"""Rounds of the real SGLang for an 8B-shaped target and an EAGLE-3 drafter, both with random weights.

A server of each shape generates the same batches twice, to few and to many tokens; the difference is decoding alone.
SGLang itself simulates acceptance (SGLANG_SIMULATE_ACC_LEN), since a random drafter's tokens are rejected. So what is
measured is the time of a round, and it holds for any tau: at a load the speed-up over no drafter is tau / `pays_from`.

Next to it are two predictions: the plan's (`planning.needed_tau`, from data sheets), and the tuner's, from the shapes
that it times itself (`measure.tuner.anchors`), for those that it does not. SGLang is what EYRIE_SGLANG_PROGRAM starts,
else that of this interpreter. Without a tokenizer: with one, simulated tokens are slow to turn into text.
"""

import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.gpu.bench import Bench, Row
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec, SglangArguments
from eyrie_api.contract.families import FAMILIES, DrafterSizes
from eyrie_api.contract.tuning import OFF, Setting
from eyrie_api.errors import EyrieError
from eyrie_api.planning.facts import facts_of
from eyrie_api.planning.hardware import ASSUMED, Rates, gpu_rates, known_gpu
from eyrie_api.planning.needed_tau import planned_round_s
from eyrie_api.planning.plan_work import TargetFacts
from eyrie_api.planning.sglang_attention import SglangHardware
from eyrie_api.processes import free_port
from eyrie_workers.measure.tuner.anchors import anchors, fit
from eyrie_workers.sglang.checkpoints import read_drafter, read_target
from eyrie_workers.sglang.launch import LaunchPlan, SharedServerArgs, launch_arguments, launch_environment, shared_args
from eyrie_workers.sglang.local_hardware import detect_hardware
from eyrie_workers.sglang.process import start_sglang
from tests.gpu.sizes import Sizes

SHAPES = ((3, 1, 4), (5, 1, 6), (7, 1, 8), (5, 4, 16), (7, 4, 24))
SETTINGS = tuple(Setting(tree=DraftTreeShape(num_steps=steps, top_k=width, num_draft_tokens=nodes))
                 for steps, width, nodes in SHAPES)
_NUM_AUX = 3
_READY_S = 300.0


@dataclass(frozen=True)
class Load:
    """What every server is asked for."""

    users: tuple[int, ...]
    prompt_tokens: int
    few: int
    many: int
    repeats: int


ON_A_GPU = Load((1, 4, 16, 64), prompt_tokens=256, few=32, many=288, repeats=2)
ON_A_CPU = Load((1, 2), prompt_tokens=16, few=8, many=40, repeats=1)


def write_configs(home: Path, sizes: Sizes, dtype: str) -> dict[str, dict[str, Any]]:
    """Write config.json of target and drafter, which are loaded with random weights; return both."""
    target = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate, "num_hidden_layers": sizes.target_layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head,
        "vocab_size": sizes.vocab, "max_position_embeddings": sizes.context, "rope_theta": 10_000.0,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": dtype}
    models = {"target": target, "drafter": target | {
        "architectures": [FAMILIES["eagle3"].architecture], "num_hidden_layers": 1,
        "draft_vocab_size": sizes.draft_vocab}}
    for name, config in models.items():
        (home / name).mkdir(parents=True)
        (home / name / "config.json").write_text(json.dumps(config))
    return models


def measure_rounds(bench: Bench) -> Iterator[Row]:
    """A row of each shape and load, as it is measured."""
    on_gpu = bench.machine.cuda
    load = ON_A_GPU if on_gpu else ON_A_CPU
    # Sizes at which SGLang's kernels for a CPU compute, and that have the three layers which an EAGLE-3 drafter reads.
    sizes = replace(bench.sizes, target_layers=32) if on_gpu else replace(
        bench.sizes, hidden=256, intermediate=512, head=64, vocab=2048, draft_vocab=512, target_layers=8)
    home = bench.work / "sglang"
    models = write_configs(home, sizes, bench.dtype)
    plan = launch_plan(home, models, detect_hardware(), load)
    shared = shared_args(plan, SETTINGS)
    facts, rates = facts_of(models["target"], "config.json"), _rates(on_gpu)
    measured: dict[int, dict[Setting, float]] = {users: {} for users in load.users}
    timed = anchors(SETTINGS)
    for setting in (*timed, *(setting for setting in SETTINGS if setting not in timed)):
        where = home / setting.label().replace("/", "-")
        try:
            for users, tau, round_s in _measure(replace(plan, setting=setting, port=free_port()), shared, load, where):
                measured[users][setting] = round_s
                yield _row(setting, users, tau, measured[users], planned_s(facts, sizes, setting, users, rates))
        except (EyrieError, OSError) as error:  # the other shapes are measured
            yield {"draft": setting.label(), "result": f"{type(error).__name__}: {error}"}


def launch_plan(home: Path, models: Mapping[str, Mapping[str, Any]], machine: SglangHardware, load: Load) -> LaunchPlan:
    """What all servers have in common."""
    on_gpu = machine.platform != "cpu"
    return LaunchPlan(
        target=read_target(str(home / "target"), models["target"]),
        drafter=read_drafter(str(home / "drafter"), models["drafter"]), machine=machine, served_model_name="rounds",
        dtype=models["target"]["torch_dtype"], context_length=512, max_running_requests=max(load.users),
        engine=EngineSpec(kind="sglang", sglang_arguments=SglangArguments(disable_prefill_cuda_graph=on_gpu)))


def server_line(plan: LaunchPlan, shared: SharedServerArgs, load: Load) -> list[str]:
    """The arguments of one server. Of a flag that is repeated SGLang takes the last."""
    line = [*launch_arguments(plan, shared), "--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache",
            "--skip-server-warmup", "--grammar-backend", "none"]
    if plan.machine.platform != "cpu":  # graphs of these batches alone, for a short start
        line += ["--cuda-graph-bs-decode", *map(str, load.users)]
    return line if plan.setting.tree is None else [*line, "--speculative-draft-load-format", "dummy"]


def planned_s(facts: TargetFacts, sizes: Sizes, setting: Setting, users: int, rates: Rates) -> float:
    """A round as the plan predicts it."""
    if setting.tree is None:
        return planned_round_s(facts, 0, users, 1, rates)
    weights = FAMILIES["eagle3"].parameters(DrafterSizes(
        target=facts, output_vocab_size=sizes.draft_vocab, num_aux_layers=_NUM_AUX,
        max_draft_tokens=setting.tree.num_steps, hidden_size=None, intermediate_size=None, num_layers=None))
    return planned_round_s(facts, setting.tree.num_steps * weights, users, setting.tree.num_draft_tokens, rates)


def tuned_s(setting: Setting, measured: Mapping[Setting, float]) -> float | None:
    """A round as the tuner predicts it from its anchors; None for these, and where one was not measured."""
    timed = anchors(SETTINGS)
    if setting in timed or any(anchor not in measured for anchor in timed):
        return None
    return fit(measured[OFF], [(anchor, measured[anchor]) for anchor in timed if anchor != OFF]).round_s(setting)


def _row(setting: Setting, users: int, tau: float, measured: Mapping[Setting, float], planned: float) -> Row:
    round_s, undrafted_s, predicted_s = measured[setting], measured.get(OFF), tuned_s(setting, measured)
    return {
        "draft": setting.label(), "users": users, "round_ms": 1e3 * round_s, "planned_ms": 1e3 * planned,
        "tuner_ms": "-" if predicted_s is None else 1e3 * predicted_s,
        "pays_from": "-" if undrafted_s is None else round_s / undrafted_s,
        "simulated_tau": tau, "tokens_per_s": users * tau / round_s}


def _rates(on_gpu: bool) -> Rates:
    if not on_gpu:
        return Rates()
    return gpu_rates(known_gpu(detect_hardware().name) or ASSUMED, "expected", num_gpus=1, tp_size=1, batch=1,
                     weight_bytes=2.0, active_share=1.0)


def _measure(plan: LaunchPlan, shared: SharedServerArgs, load: Load, where: Path) -> Iterator[tuple[int, float, float]]:
    """Users, tau and seconds of a round, from a server of this plan. Raises EngineFailed when it does not start."""
    tree, variables = plan.setting.tree, launch_environment(plan) | {"HF_HUB_OFFLINE": "1"}
    if tree is not None:
        variables |= {"SGLANG_SIMULATE_ACC_LEN": str(1 + tree.num_steps / 2),
                      "SGLANG_SIMULATE_ACC_METHOD": "match-expected", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed"}
    server = start_sglang(server_line(plan, shared, load), where, environment=variables)
    try:
        url = server.wait_ready(_READY_S)
        for users in load.users:
            random = Random(users)
            prompts = [[random.randrange(3, 2000) for _ in range(load.prompt_tokens)] for _ in range(users)]
            generate(url, prompts, load.few)  # compiles and caches for this size
            seconds, rounds = min(_decoding(url, prompts, load) for _ in range(load.repeats))
            yield users, (load.many - load.few) / rounds, seconds / rounds
    finally:
        server.stop(0.0)


def _decoding(url: str, prompts: Sequence[Sequence[int]], load: Load) -> tuple[float, float]:
    """Seconds, and rounds of each request in the mean, between few tokens and many."""
    (few_s, few), (many_s, many) = (generate(url, prompts, tokens) for tokens in (load.few, load.many))
    return many_s - few_s, many - few


def generate(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
    """Seconds until all of a batch are answered, and rounds of each request in the mean."""
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=_READY_S) as reply:
        answers = json.load(reply)
    seconds = time.perf_counter() - began
    # Without a drafter each token after the prefill's is a round.
    rounds = [answer["meta_info"].get("spec_verify_ct") or tokens - 1 for answer in answers]
    return seconds, sum(rounds) / len(rounds)
