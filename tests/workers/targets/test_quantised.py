"""Quantised targets: the values of their weights, the states and answers computed from them, and drafters on those.

The values are compared with the writers' own (`tests.quantised`; compressed-tensors writes and reads its forms), with
transformers' and with compressed-tensors' reader of AWQ; states and logits with transformers on the dequantised model.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyrie_api.contract.reports import CaptureReport, TrainReport
from eyrie_api.errors import ArtifactCorrupt, UnsupportedTarget
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.measure.benchmark.losslessness import explain
from eyrie_workers.measure.parity_reference import why_not_held
from eyrie_workers.stage_program import Stage
from eyrie_workers.stages.capture import capture
from eyrie_workers.stages.train import train
from eyrie_workers.targets.device import CPU
from eyrie_workers.targets.loading import CheckpointTensors, load_target, weight_bytes
from eyrie_workers.targets.state_source import load_causal_model, open_judge, open_local
from tests.architectures.catalog import ARCHITECTURES, COMMON
from tests.quantised import FORMS, MXFP4, quantised
from tests.tiny import tiny_target
from tests.workers.stages import test_capture as captures
from tests.workers.stages import test_train as train_stage

LAYERS = (1, 2, 3)
TEXT = torch.arange(3, 43)
MATRIX = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("plain"), "qwen3")


def dequantised(source: Path, out: Path, weights: dict[str, Tensor]) -> Path:
    """The target with these weights, not quantised."""
    shutil.copytree(source, out)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_the_values_that_the_writer_meant_under_the_names_of_the_model(
        form: str, plain: Path, tmp_path: Path) -> None:
    meant = quantised(plain, tmp_path / "target", form)
    read = CheckpointTensors(tmp_path / "target", torch.float32, CPU)
    assert set(read) == set(meant)
    for name, values in meant.items():
        torch.testing.assert_close(read[name], values.float(), atol=0.0, rtol=0.0)
    assert not torch.equal(meant[MATRIX], load_file(plain / "model.safetensors")[MATRIX])
    assert read[MATRIX].dtype == torch.float32
    assert CheckpointTensors(tmp_path / "target", None, CPU)[MATRIX].dtype == torch.bfloat16
    stored = CheckpointTensors(tmp_path / "target", None, CPU, stored=True)
    assert set(stored) == set(load_file(tmp_path / "target" / "model.safetensors"))
    assert weight_bytes(tmp_path / "target", "bfloat16") == weight_bytes(plain, "bfloat16")


def test_blocks_of_fp8_are_those_of_transformers_own_reader(plain: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    quantised(plain, tmp_path / "target", "fp8-block")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32, quantization_config=(
        FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))))
    theirs, read = model.state_dict(), CheckpointTensors(tmp_path / "target", torch.float32, CPU)
    for name in read:
        torch.testing.assert_close(read[name], theirs[name], atol=0.0, rtol=0.0)


def test_experts_of_mxfp4_are_those_of_transformers_own_reader_and_their_states_those_of_its_model(
        tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    source = tiny_target(tmp_path / "source", "gpt_oss", **(COMMON | ARCHITECTURES["gpt_oss"]))
    meant = quantised(source, tmp_path / "target", MXFP4)
    # transformers 5.17 reads these in bfloat16 whatever the dtype.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32,
                                                 quantization_config=Mxfp4Config(dequantize=True)).float().eval()
    theirs, read = model.state_dict(), CheckpointTensors(tmp_path / "target", torch.float32, CPU)
    assert set(read) == set(meant)
    for name, values in meant.items():
        torch.testing.assert_close(read[name], values, atol=0.0, rtol=0.0)
        torch.testing.assert_close(read[name], theirs[name], atol=0.0, rtol=0.0)
    captured = open_local(tmp_path / "target", "float32").packed_states([TEXT], (1, 2))[0]
    with torch.no_grad():
        states = model(TEXT[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(captured, torch.stack([states[1][0], states[2][0]], dim=1), atol=1e-4, rtol=1e-4)


def test_values_of_awq_are_those_of_compressed_tensors_reader(plain: Path, tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    quantised(plain, tmp_path / "target", "awq")
    stored = load_file(tmp_path / "target" / "model.safetensors")
    words, zeros, scales = (stored[MATRIX.removesuffix("weight") + part] for part in ("qweight", "qzeros", "scales"))
    values, offsets = AutoAWQConverter.reverse_awq_order(*AutoAWQConverter.unpack_awq(words, zeros, 4), 4)
    groups = scales.shape[0]
    q, z = ((each & 15).float() for each in (values, offsets))
    wanted = ((q.unflatten(0, (groups, -1)) - z[:, None]) * scales.float()[:, None]).flatten(0, 1).T
    torch.testing.assert_close(CheckpointTensors(tmp_path / "target", torch.float32, CPU)[MATRIX], wanted)


@pytest.mark.parametrize(("form", "offset"), [("gptq", 1), ("gptq-v2-act-order", 0)])
def test_values_of_gptq_are_those_of_its_definition(form: str, offset: int, plain: Path, tmp_path: Path) -> None:
    quantised(plain, tmp_path / "target", form)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    words, zeros, scales, groups = (stored[MATRIX.removesuffix("weight") + part].tolist() for part in (
        "qweight", "qzeros", "scales", "g_idx"))
    read = CheckpointTensors(tmp_path / "target", torch.float32, CPU)[MATRIX]
    for row, column in ((0, 0), (5, 13), (31, 63), (17, 8)):
        group = groups[column]
        q = words[column // 8][row] >> 4 * (column % 8) & 15
        z = (zeros[group][row // 8] >> 4 * (row % 8) & 15) + offset
        assert float(read[row, column]) == pytest.approx((q - z) * scales[group][row])


@pytest.mark.parametrize("form", ["fp8-block", "fp8-tensor", "ct-fp8-channel", "ct-int8", "ct-int4", "gptq", "awq"])
def test_states_are_those_of_the_dequantised_model_in_transformers_and_a_drafter_is_trained_on_them(
        form: str, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    dense = dequantised(plain, tmp_path / "dense", quantised(plain, target, form))
    rows = captures.write_rows(tmp_path / "rows", target, 8)
    spec = captures.write_spec(tmp_path / "store", target, tmp_path / "rows", aux_layers=LAYERS, check_rows=2,
                               batch_tokens=96)
    report = capture(spec, Stage(tmp_path / "store", quiet=True)).report
    assert isinstance(report, CaptureReport)
    assert report.source == "reference"
    events = (tmp_path / "store" / "events.jsonl").read_text()
    assert "WeightsDequantised" in events
    assert "LayersAgree" in events

    model, unquantised = (load_causal_model(path, "float32", CPU) for path in (dense, plain))
    store, output = FeatureStore(tmp_path / "store"), open_local(target, "float32").output_head
    for index in range(len(rows)):
        row = store.read([index])
        with torch.no_grad():
            whole, other = (each(row.token_ids[None], output_hidden_states=True) for each in (model, unquantised))
        wanted = torch.stack([whole.hidden_states[layer][0] for layer in LAYERS], dim=1)
        torch.testing.assert_close(row.aux, wanted, atol=1e-3, rtol=1e-3)
        supervised = row.last.abs().sum(-1) > 0
        torch.testing.assert_close(output.logits(row.last[supervised]), whole.logits[0][supervised], atol=1e-3,
                                   rtol=1e-3)
        # The check could have failed: those of the model that was quantised are others.
        assert (whole.logits - other.logits).norm() > 3e-3 * other.logits.norm()

    trained = train(train_stage.write_spec(tmp_path / "train", target, tmp_path / "store", epochs=1, num_checkpoints=1),
                    Stage(tmp_path / "train", quiet=True)).report
    assert isinstance(trained, TrainReport)
    checkpoint = tmp_path / "train" / "checkpoints" / trained.checkpoints[-1].name
    found = {finding.code: finding.severity for finding in check_directory(checkpoint, target_dir=target)}
    assert "error" not in found.values()
    assert found["target-quantised"] == "warning"


@pytest.mark.parametrize("form", ["fp8-block-uneven", "ct-int8", "ct-int4-zeros", "gptq-v2-act-order", "awq"])
def test_experts_are_read_through_transformers(form: str, tmp_path: Path) -> None:
    source = tiny_target(tmp_path / "source", "qwen3_moe", num_experts=4, num_experts_per_tok=2,
                         moe_intermediate_size=32, num_layers=3)
    dense = dequantised(source, tmp_path / "dense", quantised(source, tmp_path / "target", form))
    spec = captures.write_spec(tmp_path / "store", tmp_path / "target", tmp_path / "rows", aux_layers=(1, 2),
                               check_rows=2)
    captures.write_rows(tmp_path / "rows", tmp_path / "target", 4)
    report = capture(spec, Stage(tmp_path / "store", quiet=True)).report
    assert isinstance(report, CaptureReport)
    assert report.source == "transformers"
    wanted = load_causal_model(dense, "float32", CPU)
    row = FeatureStore(tmp_path / "store").read([0])
    with torch.no_grad():
        states = wanted(row.token_ids[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(row.aux, torch.stack([states[1][0], states[2][0]], dim=1), atol=1e-4, rtol=1e-4)


def test_weights_that_transformers_would_draw_at_random_are_refused(tmp_path: Path) -> None:
    source = tiny_target(tmp_path / "source", "qwen3_moe", num_experts=4, num_experts_per_tok=2,
                         moe_intermediate_size=32, num_layers=2)
    quantised(source, tmp_path / "target", "gptq")
    weights = load_file(tmp_path / "target" / "model.safetensors")
    del weights["model.layers.1.mlp.gate.weight"]
    save_file(weights, tmp_path / "target" / "model.safetensors")
    with pytest.raises(UnsupportedTarget, match=r"has no weights of 'model\.layers\.1\.mlp\.gate\.weight'"):
        open_local(tmp_path / "target", "float32")


def test_a_missing_matrix_is_named_as_of_any_target(plain: Path, tmp_path: Path) -> None:
    quantised(plain, tmp_path / "target", "awq")
    weights = load_file(tmp_path / "target" / "model.safetensors")
    for part in ("qweight", "qzeros", "scales"):
        del weights[MATRIX.removesuffix("weight") + part]
    save_file(weights, tmp_path / "target" / "model.safetensors")
    with pytest.raises(ArtifactCorrupt, match=MATRIX):
        load_target(tmp_path / "target")


@pytest.mark.parametrize("name", ["weight", "qweight"])
def test_a_quantised_output_matrix_is_refused_by_what_trains_on_it(name: str, plain: Path, tmp_path: Path) -> None:
    target = shutil.copytree(plain, tmp_path / "target")
    weights = load_file(plain / "model.safetensors")
    head = weights.pop("lm_head.weight")
    weights[f"lm_head.{name}"] = head.to(torch.float8_e4m3fn) if name == "weight" else head.to(torch.int32)
    save_file(weights, target / "model.safetensors")
    with pytest.raises(UnsupportedTarget, match=f"lm_head.{name} is stored as"):
        read_target_embeddings(target, tie_word_embeddings=False)


def test_where_sglang_alone_reads_the_weights_changed_answers_are_not_judged_and_count_as_changed(
        plain: Path, tmp_path: Path) -> None:
    target = shutil.copytree(plain, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "modelopt"}}))
    assert "quant_method 'modelopt'" in str(why_not_held(target, "bfloat16"))
    judge = open_judge(target, "bfloat16")
    assert judge is None
    found = explain(judge, "p", [1, 2], [3, 4, 5], [3, 6, 5])
    assert found is not None
    assert (found.position, found.is_tie("bfloat16")) == (1, False)
    assert "not judged, because SGLang alone reads" in found.line("bfloat16")
    assert explain(judge, "p", [1, 2], [3], [3]) is None
    assert open_judge(plain, "float32") is not None
