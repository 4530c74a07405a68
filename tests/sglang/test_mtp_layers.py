"""A target's own MTP layers as a rival in the real SGLang: benchmarked, tuned and proven from a directory of theirs.

The target is the shipped Llama as a GLM-4.5-MoE with one random MTP layer (`mtp_target`).
"""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from eyrie_api.artifacts import read_manifest, write_model
from eyrie_api.contract.benchmark import BenchmarkSpec, RivalSpec, SuiteSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec, SamplingSpec
from eyrie_api.contract.prove import ProveReport, ProveSpec
from eyrie_api.contract.reports import BenchmarkReport, TuneReport
from eyrie_api.contract.stages import BenchmarkStage, ProveStage, TuneStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.contract.tuning import TuneSpec
from eyrie_api.planning.sglang_support import MTP_ARCHITECTURES
from eyrie_workers.data.suites import load_suite
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.drafters.mtp import FAMILY
from eyrie_workers.drafters.published import copy_mtp_layers
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.benchmark import benchmark
from eyrie_workers.stages.prove import prove
from eyrie_workers.stages.tune import tune
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.templates import ChatTokenizer
from eyrie_workers.training.objective import StepContext
from tests.packed_rows import pack_rows
from tests.sglang.mtp_target import write_mimo_target, write_mtp_target
from tests.sglang.servers import TARGET, environment, flags, let_stages_start_it, serving, sglang_python
from tests.sglang.test_prove_stage import stage_directory

STEPS = 80
CHAIN = DraftTreeShape(num_steps=2, top_k=1, num_draft_tokens=3)
_REWRITE = """
import json, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
from sglang.srt.configs.model_config import ModelConfig
found = {}
for name in json.loads(sys.argv[1]):
    config = MagicMock(); config.architectures = [name]
    asked = SimpleNamespace(is_draft_model=True, hf_config=config, hf_text_config=config, speculative_algorithm="EAGLE",
                            sliding_window_size=None, is_draft_quantization_explicit=False, quantization=None)
    ModelConfig._config_draft_model(asked)
    found[name] = asked.hf_config.architectures[0]
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def _sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the machine's measuring lock is not ours
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    let_stages_start_it(monkeypatch)


def test_sglang_takes_each_listed_target_given_as_draft_model_for_its_mtp_layers() -> None:
    done = subprocess.run([str(sglang_python()), "-c", _REWRITE, json.dumps(MTP_ARCHITECTURES)], capture_output=True,
                          text=True, timeout=120, check=True, env=environment())
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in MTP_ARCHITECTURES if not found[name].endswith(("MTP", "NextN"))] == []


def run(home: Path, kind: Any, program_of: Any, spec: Any) -> Any:
    home.mkdir()
    (home / "spec.json").write_text(spec.model_dump_json())
    assert run_program(kind, program_of, ["--spec", str(home / "spec.json"), "--out", str(home / "manifest.json")]) == 0
    return read_manifest(home / "manifest.json").report


@pytest.mark.slow
def test_mtp_layers_are_benchmarked_tuned_and_proven_without_changing_an_answer(tmp_path: Path) -> None:
    suites = tuple(SuiteSpec(name=name, path=f"quickstart:{name}", max_prompts=2) for name in ("chat", "code"))
    drafter = tmp_path / "benchmark" / "drafter"
    fields: dict[str, Any] = {
        "job_id": "j", "checkpoint": "rival-nextn", "candidate": "rival-nextn", "drafter_dir": str(drafter),
        "target": TargetSpec(model=str(write_mtp_target(tmp_path / "target")), dtype="float32"),
        "engine": EngineSpec(kind="sglang"),
        "benchmark": BenchmarkSpec(suites=suites, max_new_tokens=24, tree=CHAIN, temperatures=(0.0,))}

    report = run(tmp_path / "benchmark", BenchmarkStage, benchmark, BenchmarkStage.model_validate(
        fields | {"rival": RivalSpec(method="nextn")}))
    assert isinstance(report, BenchmarkReport)
    assert (report.rival, report.family, report.dropped, report.lossless) == (True, "nextn", None, True)
    assert sum(sum(cell.accepted_histogram[1:]) for cell in report.cells) > 0, "no draft of the MTP layer was accepted"
    config = json.loads((drafter / "config.json").read_text())
    assert (config["architectures"], config["eyrie"]) == (["Glm4MoeForCausalLM"], {"drafter": "mtp"})

    # Three settings at one load: all are measured, and acceptance is theirs.
    tuned = run(tmp_path / "tune", TuneStage, tune, TuneStage.model_validate(fields | {"tune": TuneSpec(
        num_steps=(1, 2), top_k=(1,), concurrencies=(1,), max_prompts=4, temperatures=(0.0,), ngram=False)}))
    assert isinstance(tuned, TuneReport)
    assert tuned.final.lossless
    events = (tmp_path / "tune" / "events.jsonl").read_text()
    assert "Eyrie cannot replay this drafting" in events

    # A random layer may pay at no load, and off would be proven: the map is left out, so its best shape is.
    manifest = read_manifest(tmp_path / "tune" / "manifest.json")
    write_model(tmp_path / "tune" / "manifest.json", manifest.model_copy(update={
        "report": tuned.model_copy(update={"map": None})}))
    proven = run(tmp_path / "prove", ProveStage, prove, ProveStage.model_validate(fields | {
        "tune_dir": str(tmp_path / "tune"), "max_concurrency": 4,
        "prove": ProveSpec(concurrencies=(1,), requests=4, most_pairs=3, max_new_tokens=24, parity_prompts=4)}))
    assert isinstance(proven, ProveReport)
    assert proven.parity is not None
    assert proven.parity.passed, proven.parity.reasons
    assert "rounds not replayed: Eyrie does not compute the target's MTP layers" in " ".join(proven.parity.reasons)


def plain_layer(w: dict[str, torch.Tensor], config: dict[str, Any], embed: torch.Tensor, tokens: list[int],
                states: torch.Tensor) -> torch.Tensor:
    """[N, H] of GLM-4.5's MTP layer over the pairs (token behind a position, state at it), behind its last norm."""
    heads, kv, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def heads_of(x: torch.Tensor, name: str, count: int, rotated: bool) -> torch.Tensor:
        y = (x @ w[f"self_attn.{name}.weight"].T).view(len(x), count, -1)
        half = y.shape[-1] // 2
        angles = torch.arange(len(x))[:, None, None] * config["rope_theta"] ** (-torch.arange(half) / half)
        first, second = y[..., :half], y[..., half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()],
                         -1) if rotated else y

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = (x @ w[f"mlp.{name}.{part}_proj.weight"].T for part in ("gate", "up"))
        return (torch.nn.functional.silu(gate) * up) @ w[f"mlp.{name}.down_proj.weight"].T

    x = torch.cat([rms(embed[tokens], "enorm"), rms(states, "hnorm")], 1) @ w["eh_proj.weight"].T
    normed = rms(x, "input_layernorm")
    q = heads_of(normed, "q_proj", heads, True)
    k, v = (heads_of(normed, name, kv, name == "k_proj").repeat_interleave(heads // kv, 1)
            for name in ("k_proj", "v_proj"))
    scores = torch.einsum("qhe,khe->hqk", q, k) * q.shape[-1] ** -0.5
    hidden_future = torch.ones(len(x), len(x)).triu(1).bool()
    attended = torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden_future, -torch.inf).softmax(-1), v)
    x = x + attended.flatten(1) @ w["self_attn.o_proj.weight"].T
    normed, places = rms(x, "post_attention_layernorm"), []
    for row in normed:
        affinity = (w["mlp.gate.weight"] @ row).sigmoid()
        chosen = (affinity + w["mlp.gate.e_score_correction_bias"]).topk(config["num_experts_per_tok"]).indices
        share = affinity[chosen] / affinity[chosen].sum()
        experts = torch.stack([mlp(row, f"experts.{expert}") for expert in chosen.tolist()])
        places.append(mlp(row, "shared_experts") + share @ experts)
    return rms(x + torch.stack(places), "shared_head.norm")


@pytest.mark.slow
def test_the_layer_of_a_mixture_drafts_in_sglang_what_plain_code_drafts_from_its_weights(tmp_path: Path) -> None:
    """Accepted lengths of a hundred rounds, so another order of inputs, another router or another norm would show."""
    target_dir, tokens = write_mtp_target(tmp_path / "target", spread=0.05), 64
    config, weights = json.loads((target_dir / "config.json").read_text()), load_file(target_dir / "model.safetensors")
    prefix = f"model.layers.{config['num_hidden_layers']}."
    layer = {name.removeprefix(prefix): weight.float() for name, weight in weights.items() if name.startswith(prefix)}
    copy_mtp_layers(target_dir, tmp_path / "drafter")
    target = load_target(TARGET)
    head, embed = target.lm_head_weight.float(), target.embed_weight.float()
    prompts = [ChatTokenizer(TARGET).render(prompt.messages) for prompt in load_suite(SuiteSpec(
        name="chat", path="quickstart:chat", max_prompts=6))]
    line = list(flags("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(tmp_path / "drafter"),
                      "--speculative-num-steps", "2", "--speculative-eagle-topk", "1",
                      "--speculative-num-draft-tokens", "3"))
    line[line.index("--model-path") + 1] = str(target_dir)
    found, expected = Counter[int](), Counter[int]()
    with serving(line, tmp_path) as server:
        for prompt in prompts:
            answer = httpx.post(f"{server.url}/generate", timeout=300, trust_env=False, json={
                "input_ids": prompt, "sampling_params": {
                    "temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}).json()
            text = [*prompt, *answer["output_ids"]]
            found.update(dict(enumerate(answer["meta_info"]["spec_correct_drafts_histogram"])))
            [(_, states)] = target.hidden_states([torch.tensor(text)], ())
            settled = len(prompt) + 1  # the prefill's token
            while settled < len(text):
                pairs, seen, accepted = text[1:settled], states[:settled - 1].float(), 0
                for _ in range(2):
                    after = plain_layer(layer, config, embed, pairs, seen)[-1:]
                    pairs, seen = [*pairs, int((after @ head.T).argmax())], torch.cat([seen, after])
                while accepted < 2 and text[settled + accepted:settled + accepted + 1] == pairs[settled - 1 + accepted:
                                                                                               settled + accepted]:
                    accepted += 1
                expected[accepted] += 1
                settled += accepted + 1
    assert sum(found.values()) >= 100
    assert min(found[length] for length in range(3)) > 0
    # The round that ends an answer may accept more than the answer has room for.
    assert sum(abs(found[length] - expected[length]) for length in range(3)) <= 2 * len(prompts)


@pytest.mark.slow
def test_a_layer_trained_here_drafts_in_sglang_as_it_was_trained(tmp_path: Path) -> None:
    """Proof replays every round in the reference engine and compares: an embedding read at position 0, another order of
    the two inputs, or the state before the norm would show there, not in the answers."""
    target_dir = write_mimo_target(tmp_path / "target")
    target, drafter = load_target(target_dir), tmp_path / "drafter"
    tokenizer = ChatTokenizer(target_dir)
    prompts = [tokenizer.render(prompt.messages) for prompt in load_suite(SuiteSpec(
        name="chat", path="quickstart:chat", max_prompts=24))]
    answers = Engine(target, max_concurrency=12).generate(
        [Request(str(number), ids, 40, SamplingSpec(temperature=0.0)) for number, ids in enumerate(prompts)])
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *answer.token_ids])
        [(aux, last)] = target.hidden_states([ids], (target.config.num_layers,))
        rows.append((ids, torch.arange(len(ids)) >= len(prompt), aux.clone(), last.clone()))
    ends = read_target_embeddings(target_dir, tie_word_embeddings=False)
    made = FAMILY.create(DrafterSpec(family="mtp"), target.config, ends, (target.config.num_layers,),
                         DraftVocabulary(torch.arange(target.config.vocab_size), target.config.vocab_size), 0)
    objective = FAMILY.objective(made, ends, TrainSpec(ttt_length=3, unrolled_fraction=1.0, single_step_ratio=0.0), 256,
                                 torch.float32)
    optimizer = torch.optim.AdamW(made.parameters(), lr=2e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        objective(pack_rows(rows), StepContext(step, STEPS, 0)).loss.backward()
        optimizer.step()
    FAMILY.save(drafter, made, "float32", None)

    spec = ProveStage.model_validate_json(stage_directory(tmp_path, drafter).with_name("spec.json").read_text())
    proven = run(tmp_path / "proven", ProveStage, prove, spec.model_copy(update={
        "target": TargetSpec(model=str(target_dir), dtype="float32")}))
    assert isinstance(proven, ProveReport)
    parity = proven.parity
    assert parity is not None
    assert (parity.passed, parity.rounds_unexplained) == (True, 0), parity.reasons
    assert parity.reference_histogram == parity.histogram
    assert parity.tau > 1.2


def test_a_checkpoint_without_its_mtp_layers_is_a_dropped_rival(tmp_path: Path) -> None:
    target = write_mtp_target(tmp_path / "target", with_mtp=False)
    suite = SuiteSpec(name="chat", path="quickstart:chat", max_prompts=1)
    home = tmp_path / "benchmark"
    report = run(home, BenchmarkStage, benchmark, BenchmarkStage(
        job_id="j", checkpoint="rival-nextn", candidate="rival-nextn", drafter_dir=str(home / "drafter"),
        target=TargetSpec(model=str(target), dtype="float32"), engine=EngineSpec(kind="sglang"),
        rival=RivalSpec(method="nextn"),
        benchmark=BenchmarkSpec(suites=(suite,), max_new_tokens=8, tree=CHAIN, temperatures=(0.0,))))
    assert report.dropped == "nextn: the target's checkpoint has no MTP layers"
