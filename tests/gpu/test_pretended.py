"""Every tensor on its device: target, capture, training and decoding of all families with a GPU that is pretended.

What `make test-gpu` shows on a real one, this shows as far as placement goes where there is none (`pretended`).
"""

import json
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import training_step as training_bench
from benchmarks.calibration.measure import measure as calibrating
from benchmarks.quickstart.entropy import confidence
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import GpuTooSmall
from eyrie_workers.drafters import eagle1
from eyrie_workers.drafters.family import family_named, open_drafter
from eyrie_workers.drafters.initialisation import TargetEmbeddings, read_target_embeddings
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.hidden_states.shard_format import StoreFormat, TokenRow
from eyrie_workers.hidden_states.streaming import compute_pass
from eyrie_workers.measure.benchmark.losslessness import explain
from eyrie_workers.measure.parity_reference import RoundReplay
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, Stage
from eyrie_workers.stages import benchmark
from eyrie_workers.targets.causal_attention import packed_causal
from eyrie_workers.targets.device import CPU, device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.state_source import CHECKED_LOGITS, LOGITS, LayersDisagree, compare, reference_states
from eyrie_workers.training.evaluation import evaluate
from eyrie_workers.training.objective import StepContext
from tests.gpu.pretended import GPU, Apart, PretendedGpu, pretended_flash
from tests.packed_rows import pack_rows
from tests.tiny import tiny_target
from tests.workers.measure.tiny_bench import one_shape, stage_specs
from tests.workers.stages import test_benchmark as benchmarking
from tests.workers.stages import test_capture as capturing
from tests.workers.stages import test_sweep as sweeping
from tests.workers.stages import test_train as training
from tests.workers.stages import test_tune as tuning

pytestmark = pytest.mark.slow

NAMES = list(FAMILIES)
AUX_LAYERS, STEPS = (1, 2, 3), 3
SHAPES = (DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4),
          DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6),
          DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6, static=True))


@pytest.fixture
def stages(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stage programs of this process compute there."""
    for place in ("eyrie_workers.targets.loading.default_device", "eyrie_workers.stages.capture.default_device",
                  "eyrie_workers.stages.train.default_device"):
        monkeypatch.setattr(place, lambda: GPU)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the machine's measuring lock is for real measurements


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny", seed=5, initializer_range=0.15)


def test_tensors_of_two_devices_do_not_meet(gpu: PretendedGpu) -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    assert (here.device, there.device, (there + 1).device, there.cpu().device) == (CPU, GPU, GPU, CPU)
    with pytest.raises(Apart, match=r"add: \(3,\) on cpu, \(3,\) on cuda:0"):
        here + there
    with pytest.raises(Apart, match="an index on cuda:0"):
        here[torch.zeros(1, dtype=torch.int64, device="cuda")]
    with pytest.raises(Apart, match="numpy"):
        there.numpy()
    with pytest.raises(Apart, match="cat"):
        torch.cat([here, there])
    with device_scope(GPU):
        assert torch.zeros(2).is_cuda


def test_calls_that_make_the_host_wait_are_counted(gpu: PretendedGpu) -> None:
    there, here = torch.arange(4, device="cuda"), torch.arange(4)
    free = (lambda: there[torch.zeros(2, dtype=torch.int64, device="cuda")] + there[1:].sum(),
            lambda: here.to(GPU, non_blocking=True), lambda: here[here > 1].tolist(),
            lambda: there.masked_fill_(there > 5, 0), lambda: torch.arange(3, device="cuda").repeat_interleave(2))
    for number, call in enumerate(free):
        call()
        assert gpu.num_syncs == 0, number
    waiting = (lambda: there[0].item(), lambda: int(there[0]), lambda: bool(there[0] > 0), lambda: float(there.sum()),
               lambda: there.tolist(), lambda: there.nonzero(), lambda: there[there > 1], lambda: there[[0, 1]],
               lambda: there.cpu(), lambda: here.to(GPU), lambda: torch.tensor([1, 2], device=GPU),
               lambda: torch.bincount(there), lambda: there.copy_(here), lambda: there.repeat_interleave(there))
    for number, call in enumerate(waiting):
        call()
        assert gpu.num_syncs == number + 1, (number, gpu.syncs)
    assert gpu.syncs[-1].startswith("repeat_interleave at test_pretended.py:")


def test_hidden_states_are_those_of_the_processor(gpu: PretendedGpu, target_dir: Path) -> None:
    tokens = [torch.arange(1, 30) % 60, torch.arange(5, 12)]
    here, there = (load_target(target_dir, "float32", device).hidden_states(tokens, (1, 2)) for device in (CPU, GPU))
    for mine, others in zip(here, there, strict=True):
        assert all(torch.equal(a, b.cpu()) for a, b in zip(mine, others, strict=True))
        assert all(one.is_cuda for one in others)


def test_one_call_attends_to_all_texts_in_the_reduced_types(gpu: PretendedGpu, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    @wraps(pretended_flash)  # with its signature: which arguments there are depends on torch's version
    def watched(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["window_size"])
        return pretended_flash(*args, **kwargs)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", watched)
    path = tiny_target(tmp_path / "target", "olmo3", sliding_window=7)
    tokens = [torch.arange(1, 30) % 60, torch.arange(5, 12)]
    here, there = (load_target(path, "float16", device).hidden_states(tokens, (1, 2)) for device in (CPU, GPU))
    for (aux, last), (aux_there, last_there) in zip(here, there, strict=True):
        torch.testing.assert_close(aux_there.cpu(), aux, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(last_there.cpu(), last, atol=2e-2, rtol=2e-2)
    assert sorted(set(calls)) == [(-1, 0), (6, 0)]  # full layers, and windows of 7 with the token itself
    assert len(calls) == 4, "one call for each layer"


def test_a_drafter_attends_to_all_documents_of_a_batch_in_one_call_with_its_gradients(
        gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    @wraps(pretended_flash)  # with its signature: which arguments there are depends on torch's version
    def watched(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args[5])
        return pretended_flash(*args, **kwargs)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", watched)
    lengths, generator = [13, 5, 1], torch.Generator().manual_seed(0)
    results = []
    for device in (CPU, GPU):
        heads = [torch.randn(sum(lengths), number, 8, generator=generator.manual_seed(1)).bfloat16().to(device)
                 for number in (4, 2, 2)]
        for one in heads:
            one.requires_grad_()
        mixed = packed_causal(*heads, lengths)
        mixed.float().square().sum().backward()
        results.append([mixed.detach().cpu(), *(one.grad.cpu() for one in heads if one.grad is not None)])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, atol=5e-2, rtol=5e-2)
    assert calls == [13], "one call for all documents"


def test_the_reference_of_capture_is_computed_where_the_target_is(gpu: PretendedGpu, target_dir: Path) -> None:
    tokens = [torch.arange(1, 30) % 60]
    there = load_target(target_dir, "float32", GPU).hidden_states(tokens, (1, 3))
    before = gpu.met
    theirs = reference_states(target_dir, "float32", tokens, (1, 3), GPU)
    assert gpu.met > before
    assert sorted(theirs[0]) == [LOGITS, 0, 1, 2, 3, 4]
    assert not any(state.is_cuda for state in theirs[0].values())
    target = load_target(target_dir, "float32", GPU)
    logits = [target.output_head.logits(last[-CHECKED_LOGITS:]).cpu() for _, last in there]
    assert all(one.error < 1e-5 < one.neighbour
               for one in compare([aux.cpu() for aux, _ in there], logits, theirs, (1, 3), "float32"))
    with pytest.raises(LayersDisagree, match="logits differ from those of transformers"):
        compare([aux.cpu() for aux, _ in there], [1.5 * row for row in logits], theirs, (1, 3), "float32")


def test_the_baseline_is_left_out_where_a_gpu_has_no_room_for_a_second_copy(
        gpu: PretendedGpu, target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = (load_target(target_dir, "float32", device) for device in (CPU, GPU))
    assert benchmark.fits(there)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 80 << 30))
    assert not benchmark.fits(there)
    assert benchmark.fits(here)
    there.hidden_states([torch.arange(3)], ())


def documents_for(target_dir: Path, layers: tuple[int, ...]) -> PackedBatch:
    target, parts = load_target(target_dir), []
    for length in (30, 21):
        ids = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(length))
        [(aux, last)] = target.hidden_states([ids], layers or (1,))
        parts.append(pack_rows([(ids, torch.arange(length) >= 6, aux.clone(), last.clone())]))
    return pack_rows([(one.token_ids, one.loss_mask, one.aux, one.last) for one in parts])


def made(name: str, target_dir: Path, ends: TargetEmbeddings) -> tuple[Any, tuple[int, ...]]:
    family, config = family_named(name), load_target(target_dir).config
    layers = family.layers(AUX_LAYERS, config.num_layers)
    ids = torch.arange(320) if family.row.whole_vocabulary else torch.tensor([i for i in range(320) if i % 5 != 4])
    drafter = family.create(DrafterSpec.model_validate({"family": name, "max_draft_tokens": STEPS}), config, ends,
                            layers, DraftVocabulary(ids, 320), 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return drafter, layers


@pytest.mark.parametrize("name", NAMES)
def test_a_family_is_trained_there_as_on_the_processor(name: str, gpu: PretendedGpu, target_dir: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle1, "NOISE", 0.0)  # each device draws its own
    found = []
    for device in (CPU, GPU):
        ends = read_target_embeddings(target_dir, False, device)
        drafter, layers = made(name, target_dir, ends)
        documents = documents_for(target_dir, layers)
        drafter.to(device)
        with device_scope(device):
            objective = family_named(name).objective(
                drafter, ends, TrainSpec(ttt_length=STEPS, unrolled_fraction=0.5, single_step_ratio=0.0),
                64, torch.float32)
        outcome = objective(documents, StepContext(9, 10, 0))
        outcome.loss.backward()
        seen = evaluate(objective, [documents])
        gradients = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
        assert gradients
        found.append(([outcome.loss.detach().cpu(), *(one.cpu() for one in gradients)], seen.accuracy))
    (mine, accuracy), (others, accuracy_there) = found
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)  # the GPU's forms sum in another order
    assert accuracy_there == pytest.approx(accuracy)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_drafts_there_and_changes_no_token(name: str, gpu: PretendedGpu, target_dir: Path,
                                                    tmp_path: Path) -> None:
    drafter, _ = made(name, target_dir, read_target_embeddings(target_dir, False))
    family_named(name).save(tmp_path / name, drafter, "float32", None)
    target = load_target(target_dir, "float32", GPU)
    engine = Engine(target, open_drafter(tmp_path / name, target), max_concurrency=2)
    for temperature in (0.0, 1.0):
        requests = [Request(id=str(n), prompt_ids=tuple(range(1 + n, 9 + n)), max_new_tokens=10, seed=n,
                            sampling=SamplingSpec(temperature=temperature)) for n in range(3)]
        plain = [one.token_ids for one in engine.generate(requests)]
        for shape in SHAPES:
            assert [one.token_ids for one in engine.generate(requests, shape)] == plain, shape.label()


@pytest.mark.parametrize("final_state", ["keep", "topk"])
def test_a_pass_of_capture_is_computed_and_encoded_without_a_wait_of_the_host(
        final_state: str, gpu: PretendedGpu, target_dir: Path) -> None:
    target = load_target(target_dir, "float32", GPU)
    extra = {"top_k": 4, "draft_ids": tuple(range(0, 60, 2))} if final_state == "topk" else {}
    fmt = StoreFormat.model_validate({"aux_layers": (1, 2), "hidden_size": 32, "codec": "int8",
                                      "target_digest": "sha256:" + "0" * 64, "final_state": final_state, **extra})
    rows = [TokenRow(f"row-{n}", torch.arange(n) % 60, torch.arange(n) > 3) for n in (9, 14, 30)]
    before = gpu.num_syncs
    states = compute_pass(target, rows, fmt).encode(fmt)
    assert gpu.syncs[before:] == []
    assert all(x.is_cuda for x in states.values())


@pytest.mark.parametrize("codec", ["float32", "int8", "fp8", "int4"])
def test_the_capture_stage_stores_the_processors_bytes(codec: str, stages: None, target_dir: Path, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    capturing.write_rows(tmp_path / "rows", target_dir, 12)
    for place, device in (("here", CPU), ("there", GPU)):
        monkeypatch.setattr("eyrie_workers.targets.loading.default_device", lambda device=device: device)
        capturing.write_spec(tmp_path / place, target_dir, tmp_path / "rows", codec=codec, check_rows=0,
                             probe_layers=True)
        assert capturing.run(tmp_path / place) == 0
    here, there = (capturing.artifact(tmp_path / place) for place in ("here", "there"))
    assert {name: data for name, data in there.items() if name.startswith("shard")} == {
        name: data for name, data in here.items() if name.startswith("shard")}


# Of the families that read the same kind of target states one: fused layers, the final state, none. From a store all
# families are trained below, by the sweep.
@pytest.mark.parametrize("name", ["eagle3", "eagle1", "standalone"])
def test_the_train_stage_trains_from_a_stream_there(name: str, stages: None, target_dir: Path, tmp_path: Path) -> None:
    capturing.write_rows(tmp_path / "rows", target_dir, 16)
    families = {} if name == "eagle3" else {"families": (name,)}
    spec = capturing.write_spec(tmp_path / "store", target_dir, tmp_path / "rows", mode="stream")
    (tmp_path / "store" / "spec.json").write_text(spec.model_copy(update=families).model_dump_json())
    assert capturing.run(tmp_path / "store") == 0
    training.write_spec(tmp_path / "out", target_dir, tmp_path / "store", drafter={"family": name}, epochs=1)
    assert training.run(tmp_path / "out") == 0
    assert training.report_of(tmp_path / "out").steps > 1


def test_a_gpu_without_the_memory_of_a_step_is_refused_before_the_first(
        stages: None, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing.write_rows(tmp_path / "rows", target_dir, 16)
    capturing.write_spec(tmp_path / "store", target_dir, tmp_path / "rows")
    assert capturing.run(tmp_path / "store") == 0
    training.write_spec(tmp_path / "out", target_dir, tmp_path / "store")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 16, 1 << 16))
    assert training.run(tmp_path / "out") == GpuTooSmall.exit_code
    [failure] = (tmp_path / "out").glob("failure.json")
    assert "a training step of 96 tokens needs" in failure.read_text()
    assert not list((tmp_path / "out" / "checkpoints").glob("*"))


def test_the_target_that_streams_its_states_counts_with_the_memory_of_a_step(
        stages: None, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing.write_rows(tmp_path / "rows", target_dir, 16)
    capturing.write_spec(tmp_path / "stream", target_dir, tmp_path / "rows", mode="stream", stream_buffer_bytes=1 << 30)
    assert capturing.run(tmp_path / "stream") == 0
    training.write_spec(tmp_path / "out", target_dir, tmp_path / "stream")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 40))
    assert training.run(tmp_path / "out") == GpuTooSmall.exit_code
    assert "(streamed target 1" in (tmp_path / "out" / "failure.json").read_text()


def test_a_training_that_was_stopped_goes_on_there_and_ends_in_the_same_drafter(
        stages: None, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing.write_rows(tmp_path / "rows", target_dir, 16)
    capturing.write_spec(tmp_path / "store", target_dir, tmp_path / "rows")
    assert capturing.run(tmp_path / "store") == 0
    for name in ("whole", "stopped"):
        training.write_spec(tmp_path / name, target_dir, tmp_path / "store", epochs=2)
    assert training.run(tmp_path / "whole") == 0
    said, say = count(1), Stage.progress

    def asked_to_stop_at_the_fourth(stage: Stage, *result: Any) -> None:
        say(stage, *result)
        if next(said) == 4:
            stage.stop_requested = True

    monkeypatch.setattr(Stage, "progress", asked_to_stop_at_the_fourth)
    assert training.run(tmp_path / "stopped") == INTERRUPTED_EXIT_CODE
    assert training.run(tmp_path / "stopped") == 0
    assert training.report_of(tmp_path / "stopped").resumed_from_step > 0
    assert training.same(training.weights(tmp_path / "stopped"), training.weights(tmp_path / "whole"))


@pytest.mark.parametrize("stage", ["benchmark", "tune"])
def test_drafters_are_measured_there(stage: str, stages: None, tmp_path: Path) -> None:
    benchmark_spec, tune_spec = stage_specs(tmp_path)[:2]
    room = benchmarking if stage == "benchmark" else tuning
    assert room.run_here(room.prepare(tmp_path, benchmark_spec if stage == "benchmark" else one_shape(tune_spec))) == 0


def test_answers_are_replayed_explained_and_calibrated_there(gpu: PretendedGpu, target_dir: Path,
                                                             tmp_path: Path) -> None:
    drafter, _ = made("eagle3", target_dir, read_target_embeddings(target_dir, False))
    family_named("eagle3").save(tmp_path / "eagle3", drafter, "float32", None)
    target = load_target(target_dir, "float32", GPU)
    server, tree = open_drafter(tmp_path / "eagle3", target), SHAPES[1]
    request = Request(id="a", prompt_ids=tuple(range(3, 12)), max_new_tokens=12, seed=1)
    [answer] = Engine(target, server).generate([request], tree)
    replay = RoundReplay(target, server, tree, "float32", request.prompt_ids, answer.token_ids)
    assert replay.target_gap() is None
    assert len(replay.rounds()) == answer.rounds
    assert replay.admissible(1)
    other = [*answer.token_ids[:5], (answer.token_ids[5] + 1) % 320]
    divergence = explain(target, "a", request.prompt_ids, answer.token_ids, other, temperature=1.0, seed=1)
    assert divergence is not None
    assert divergence.position == 5
    assert confidence(target, [([*request.prompt_ids], [*answer.token_ids])]).tokens == 12
    nodes, _, tokens = calibrating(target, server, [request], tree)
    assert nodes
    assert tokens == 12


def test_a_sweep_of_every_family_is_trained_there(stages: None, target_dir: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_workers.targets.loading.default_device", lambda: CPU)  # where the test makes its states
    sweeping.test_every_family_trains_with_the_others_and_none_is_stopped_for_another(tmp_path, target_dir,
                                                                                      monkeypatch)


def test_the_bench_of_a_training_step_runs_there(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(training_bench, "default_device", lambda: GPU)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 2**20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "pretended")
    training_bench.main(["--hidden", "32", "--intermediate", "48", "--heads", "4", "--kv-heads", "2", "--vocab", "64",
                         "--draft-vocab", "32", "--lengths", "20,9", "--iterations", "1", "--threads", "1"])
    result = json.loads(capsys.readouterr().out)
    assert (result["device"], result["tokens"], result["peak_mb_above_imports"]) == ("pretended", 29, 1.0)
