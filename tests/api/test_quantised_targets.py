"""Quantised targets at submission: which forms are accepted where, and how the others are refused."""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_api.contract.engine import SGLANG_PROGRAM
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.status import Problem
from eyrie_api.errors import GpuTooSmall, UnsupportedTarget
from eyrie_api.http import problems
from eyrie_api.http.routes.jobs import JOBS
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.preflight import check, plan
from eyrie_api.planning.quantised import Quantisation, read_quantisation
from eyrie_api.planning.target_files import expected_tensors
from eyrie_api.settings import Settings
from tests.api.conftest import Running
from tests.api.samples import job_spec, target_directory
from tests.api.test_preflight import H100, on_cluster

Tensors = dict[str, tuple[str, tuple[int, ...]]]
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "F8_E4M3": 1, "I8": 1, "I64": 8, "U8": 1}

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}


def compressed(form: str = "float-quantized", weights: Mapping[str, Any] = WEIGHTS, **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}}} | more


def fp8_parts(rows: int, columns: int) -> Tensors:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": ("F32", (-(-rows // 16), -(-columns // 16)))}


def channel_parts(rows: int, columns: int) -> Tensors:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("BF16", (rows, 1))}


def gptq_parts(rows: int, columns: int) -> Tensors:
    groups = columns // 32
    return {"qweight": ("I32", (columns // 8, rows)), "qzeros": ("I32", (groups, rows // 8)),
            "scales": ("F16", (groups, rows)), "g_idx": ("I32", (columns,))}


def awq_parts(rows: int, columns: int) -> Tensors:
    groups = columns // 16
    return {"qweight": ("I32", (columns, rows // 8)), "qzeros": ("I32", (groups, rows // 8)),
            "scales": ("F16", (groups, rows))}


def packed_parts(rows: int, columns: int) -> Tensors:
    return {"weight_packed": ("I32", (rows, columns // 8)), "weight_scale": ("BF16", (rows, columns // 16)),
            "weight_shape": ("I64", (2,))}


Parts = Callable[[int, int], Tensors]
READ: dict[str, tuple[dict[str, Any], Parts]] = {
    "fp8": (FP8, fp8_parts), "compressed-tensors": (compressed(), channel_parts), "gptq": (GPTQ, gptq_parts),
    "awq": (AWQ, awq_parts), "packed": (compressed("pack-quantized", WEIGHTS | {"num_bits": 4, "type": "int"}),
                                        packed_parts)}


def quantised_directory(path: Path, settings: Any, parts: Parts, changed: Tensors | None = None,
                        **config: Any) -> Path:
    """A target's directory whose matrices are stored in these parts; the values are holes in a sparse file."""
    directory = target_directory(path, quantization_config=settings, **config)
    plain = target_directory(path.with_name(path.name + "-plain"), **config)
    stored: Tensors = {}
    for name, shape in expected_tensors(json.loads((plain / "config.json").read_text()), target_facts(plain)).items():
        if name.endswith("_proj.weight"):
            rows, columns = shape
            stored |= {name.removesuffix("weight") + part: of for part, of in parts(rows, columns).items()}
        else:
            stored[name] = ("BF16", shape)
    header, end = {}, 0
    for name, (dtype, shape) in (stored | (changed or {})).items():
        begin, end = end, end + _BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


def spec_of(target: Path, **changes: Any) -> JobSpec:
    return job_spec(**{"target": {"model": str(target), "dtype": "bfloat16"}} | changes)


@pytest.mark.parametrize("form", READ)
def test_the_weights_of_each_method_are_accepted_for_the_embedded_engine_and_the_plan_says_how_they_are_computed(
        form: str, settings: Settings, tmp_path: Path) -> None:
    directory = quantised_directory(tmp_path / "target", *READ[form])
    planned = check(spec_of(directory), settings).plan
    assert planned is not None
    method = READ[form][0]["quant_method"]
    assert (f"the target is quantised ({method}): Eyrie and transformers compute with its weights in bfloat16"
            in planned.notes)
    assert any("also quantises this target's activations" in note for note in planned.notes) == (method == "fp8")


@pytest.mark.parametrize("form", READ)
def test_sglang_on_gpus_captures_its_own_states_unless_another_source_is_named(form: str, tmp_path: Path) -> None:
    settings = on_cluster(tmp_path, num_gpus=1, gpu_type=H100)
    directory = quantised_directory(tmp_path / "target", *READ[form])
    planned = check(spec_of(directory, engine="sglang"), settings).plan
    assert planned is not None
    assert any("states are captured as SGLang computes them" in note for note in planned.notes)
    named = check(spec_of(directory, engine="sglang", capture={"source": "reference"}), settings).plan
    assert named is not None
    assert any("computed with" in note or "compute with its weights" in note for note in named.notes)


def test_a_method_that_sglang_alone_reads_is_accepted_where_it_alone_computes(tmp_path: Path) -> None:
    settings = on_cluster(tmp_path, num_gpus=1, gpu_type=H100)
    directory = target_directory(tmp_path / "target", quantization_config={"quant_method": "modelopt"})
    job = {"engine": "sglang", "target": {"model": str(directory), "dtype": "bfloat16"}}
    assert check(job_spec(**job), settings).plan is not None
    for change in ({"capture": {"source": "transformers"}}, {"capture": {"source": "reference"}},
                   {"capture": {"mode": "stream"}}, {"regenerate": {"engine": "embedded"}}, {"engine": "embedded"}):
        with pytest.raises(UnsupportedTarget, match="quant_method 'modelopt' is not computed by Eyrie") as caught:
            check(job_spec(**job | change), settings)
        assert caught.value.hint.startswith("give the unquantised model, or set engine to 'sglang'")


def test_a_quantised_target_takes_the_room_of_its_files_on_the_gpus_that_serve_it(tmp_path: Path) -> None:
    large = {"hidden_size": 4096, "intermediate_size": 16384}
    settings = on_cluster(tmp_path, num_gpus=1, gpu_type="Some-1GB")
    train = {"stages": {"train": {"num_gpus": 1, "gpu_type": "Some-80GB"}}}
    quantised = quantised_directory(tmp_path / "fp8", FP8, fp8_parts, **large)
    job = {"engine": "sglang", "placement": train}
    check(spec_of(quantised, **job), settings)
    with pytest.raises(GpuTooSmall, match=r"weights are 1\.9 GiB"):
        check(spec_of(tmp_path / "fp8-plain", **job), settings)
    planned = plan(spec_of(quantised, **job), settings)
    [weights] = [said.value for said in planned.assumptions if said.name == "target weights"]
    assert weights == pytest.approx((quantised / "model.safetensors").stat().st_size / 1e9, rel=0.01)
    with pytest.raises(GpuTooSmall, match=r"capture\.source is 'reference'.* weights are 1\.9 GiB.*\(for capture\)"):
        check(spec_of(quantised, **job, capture={"source": "reference"}), settings)
    held = plan(spec_of(quantised, engine="embedded", placement=train), settings).warnings
    assert any("weights are 1.9 GiB" in warning for warning in held)  # dequantised


def without(part: str) -> Parts:
    return lambda rows, columns: {name: of for name, of in fp8_parts(rows, columns).items() if name != part}


HEAD = "lm_head.weight"
REFUSED: dict[str, tuple[Any, Parts, Tensors, str]] = {
    "no method": ({"bits": 4}, fp8_parts, {}, "quant_method None is not computed"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, fp8_parts, {}, "quant_method 'bitsandbytes' is not computed"),
    "bits that cross words": (GPTQ | {"bits": 3}, gptq_parts, {}, "weights of 3 bits"),
    "GPTQ of a kernel": (GPTQ | {"checkpoint_format": "marlin"}, gptq_parts, {}, "checkpoint_format 'marlin'"),
    "GPTQ of a kernel, as it was written before": (GPTQ | {"is_marlin_format": True}, gptq_parts, {},
                                                   "is_marlin_format True"),
    "AWQ of another kernel": (AWQ | {"version": "gemv"}, awq_parts, {}, "version 'gemv' of 4 bits"),
    "fp8 of another range": (FP8 | {"fmt": "e5m2"}, fp8_parts, {}, "fmt 'e5m2'"),
    "blocks of one size": (FP8 | {"weight_block_size": [16]}, fp8_parts, {}, "blocks of [16]"),
    "4-bit floats": (compressed("nvfp4-pack-quantized"), channel_parts, {}, "format nvfp4-pack-quantized"),
    "two forms": (compressed(config_groups={name: {"weights": WEIGHTS | {"num_bits": bits}} for name, bits in (
        ("a", 8), ("b", 4))}), channel_parts, {}, "config_groups with 2 forms of weights"),
    "quantised cache": (compressed(kv_cache_scheme={"num_bits": 8}), channel_parts, {}, "kv_cache_scheme"),
    "sparse weights": (compressed(sparsity_config={"format": "sparse-24-bitmask"}), channel_parts, {},
                       "sparsity_config"),
    "rotated weights": (compressed(transform_config={"config_groups": {"u": {}}}), channel_parts, {},
                        "transform_config"),
    "no object": ("fp8", fp8_parts, {}, "quantization_config is 'fp8', not an object"),
    "experts without scales": ({"quant_method": "mxfp4"}, lambda rows, columns: {"weight": ("BF16", (rows, columns))},
                               {"x_blocks": ("U8", (2, 64, 2, 16))}, "without scales of each 32 values"),
    "no scales": (FP8, without("weight_scale_inv"), {}, "without scales"),
    "scales of other blocks": (FP8 | {"weight_block_size": [32, 32]}, fp8_parts, {}, "in blocks of [32, 32]"),
    "groups of another size": (AWQ | {"group_size": 32}, awq_parts, {}, "in blocks of [1, 32]"),
    "zero points of another form": (AWQ, lambda rows, columns: awq_parts(rows, columns) | {
        "qzeros": ("I32", (columns // 16, rows))}, {}, "qzeros' of I32 [4, 64] does not belong to a matrix of"),
    "groups of fewer columns": (GPTQ, lambda rows, columns: gptq_parts(rows, columns) | {
        "g_idx": ("I32", (columns // 2,))}, {}, "g_idx' of I32 [32] does not belong to a matrix of [64, 64]"),
    "unexplained integers": (FP8, fp8_parts, {"model.norm.weight_packed": ("I32", (8, 8))}, "does not explain"),
    "quantised head": (FP8, fp8_parts, {HEAD: ("F8_E4M3", (320, 64))}, f"'{HEAD}'"),
    "another model": (GPTQ, lambda rows, columns: gptq_parts(rows, 2 * columns), {}, "config.json implies"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_at_submission_with_the_value_and_what_to_do(
        case: str, server: Running, tmp_path: Path) -> None:
    quantised, parts, changed, says = REFUSED[case]
    directory = quantised_directory(tmp_path / "target", quantised, parts, changed)
    for route in (JOBS, JOBS.replace("jobs", "plans")):
        answer = httpx.post(server.url + route, json=spec_of(directory).model_dump(mode="json"))
        document = Problem.model_validate_json(answer.content)
        assert (document.status, document.type) == (422, problems.TYPE_PREFIX + "UnsupportedTarget")
        assert says in document.detail
        assert document.hint


@pytest.mark.parametrize("form", READ)
def test_sglang_on_a_cpu_is_refused_for_quantised_targets(
        form: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SGLANG_PROGRAM, "python -m sglang.launch_server")
    directory = quantised_directory(tmp_path / "target", *READ[form])
    for capture in ({}, {"source": "sglang"}, {"source": "reference"}):
        with pytest.raises(UnsupportedTarget, match="engine 'sglang' on a CPU"):
            check(spec_of(directory, engine="sglang", capture=capture), settings)


def test_a_method_that_sglang_does_not_load_is_refused_for_it(tmp_path: Path) -> None:
    settings = on_cluster(tmp_path, num_gpus=1, gpu_type=H100)
    directory = target_directory(tmp_path / "target", quantization_config={"quant_method": "aqlm"})
    with pytest.raises(UnsupportedTarget, match="quant_method 'aqlm' and engine 'sglang', which loads") as caught:
        check(spec_of(directory, engine="sglang"), settings)
    assert caught.value.hint == "give the unquantised model"


def test_biases_of_zeros_that_gptq_stores_for_every_layer_are_no_other_model(
        settings: Settings, tmp_path: Path) -> None:
    directory = quantised_directory(tmp_path / "target", GPTQ, lambda rows, columns: gptq_parts(rows, columns) | {
        "bias": ("F16", (rows,))})
    assert check(spec_of(directory), settings).plan is not None
    with (directory / "model.safetensors").open("r+b") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin, _ = header["model.layers.3.mlp.down_proj.bias"]["data_offsets"]
        file.seek(begin + file.tell())
        file.write(b"\x01")
    with pytest.raises(UnsupportedTarget, match=r"1 tensors .* are no part of the model"):
        check(spec_of(directory), settings)


@pytest.mark.parametrize("change", [{"bits": 2}, {"sym": False}, {"group_size": 16}, {"desc_act": None}])
def test_gptq_without_a_kernel_in_sglang_is_refused_for_it(change: dict[str, Any], tmp_path: Path) -> None:
    settings = on_cluster(tmp_path, num_gpus=1, gpu_type=H100)
    directory = target_directory(tmp_path / "target", quantization_config=GPTQ | change)
    [field] = change
    with pytest.raises(UnsupportedTarget, match=f"gptq with .*'{field}': .* and engine 'sglang'") as caught:
        check(spec_of(directory, engine="sglang"), settings)
    assert caught.value.hint == "give the unquantised model, or set engine to 'embedded'"


def test_engines_round_activations_of_fp8_and_of_schemes_that_name_them() -> None:
    def read(settings: dict[str, Any]) -> Quantisation:
        found = read_quantisation({"text_config": {"quantization_config": settings}})
        assert found is not None
        return found

    assert read(FP8) == Quantisation("fp8", 8, (16, 16), rounds_activations=True)
    assert not read(compressed(sparsity_config={"format": "dense"}, transform_config={})).rounds_activations
    scheme = {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}
    assert read(compressed(config_groups={"g": scheme})).rounds_activations
    assert (read(GPTQ).zero_offset, read(GPTQ | {"checkpoint_format": "gptq_v2"}).zero_offset) == (1, 0)
    assert not any(read(each).rounds_activations for each in (GPTQ, AWQ))
    assert read_quantisation({"quantization_config": None}) is None
