"""Drafters from elsewhere (`rivals`, `drafter.init_from`) at submission: each fault of one is refused over HTTP, before
the answers of the target are regenerated; what the stages read is accepted."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from eyrie_api.contract.engine import SGLANG_PROGRAM
from eyrie_api.database.engine import Database
from eyrie_api.http.routes.jobs import JOBS
from eyrie_api.settings import Settings
from tests.api.conftest import Running, serving
from tests.api.samples import job_body
from tests.tiny import tiny_target
from tests.workers.drafters import published_forms

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("control")
    shutil.copy(migrated, home / "eyrie.db")
    settings = Settings(home=home)
    database = Database(settings.resolved_database_url)
    with serving(settings, database) as running:
        yield running
    database.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), **published_forms.TARGET)


def submitted(server: Running, target: Path, **changes: Any) -> httpx.Response:
    return httpx.post(server.url + JOBS, json=job_body(target={"model": str(target)}, **changes))


def as_rival(server: Running, target: Path, drafter: Path, **changes: Any) -> httpx.Response:
    return submitted(server, target, rivals=[str(drafter)], **changes)


def as_candidate(server: Running, target: Path, drafter: Path, suites: Path) -> httpx.Response:
    return httpx.post(server.url + JOBS, json={
        "target": {"model": str(target)}, "drafters": [str(drafter)],
        "benchmark": {"suites": [{"name": "mine", "path": str(suites)}]}})


def as_head(server: Running, target: Path, drafter: Path, family: str) -> httpx.Response:
    return submitted(server, target, drafter={"family": family, "init_from": str(drafter)})


def refusal(response: httpx.Response, drafter: Path) -> tuple[str, str]:
    """Message and hint of a refusal that names the drafter."""
    assert response.status_code == 422, response.text
    document = response.json()
    assert str(drafter) in document["detail"]
    assert document["hint"]
    return document["detail"], document["hint"]


@pytest.mark.parametrize("form", list(published_forms.READ))
def test_a_published_form_that_the_stages_read_is_accepted(form: str, server: Running, target: Path,
                                                           tmp_path: Path) -> None:
    program, family = published_forms.READ[form]
    drafter = program().write(tmp_path / "drafter")
    response = as_rival(server, target, drafter)
    assert response.status_code == 202, response.text
    response = as_head(server, target, drafter, family)
    assert response.status_code == 202, response.text


@pytest.mark.parametrize("form", list(published_forms.REFUSED))
def test_a_published_form_that_no_family_reads_is_refused_with_what_it_is_and_where_it_is_served(
        form: str, server: Running, target: Path, tmp_path: Path) -> None:
    program, says, hint_has = published_forms.REFUSED[form]
    drafter = program().write(tmp_path / "drafter")
    for response in (as_rival(server, target, drafter), as_head(server, target, drafter, "eagle3")):
        message, hint = refusal(response, drafter)
        assert re.search(says, message), message
        assert hint_has in hint


CONFIG_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("EAGLE-3", {"hidden_size": 48}, "states of 48, the target's are 32"),
    ("EAGLE-3", {"vocab_size": 322}, "vocab_size is 322, the target's 320"),
    ("EAGLE-3", {"hidden_size": None}, "hidden_size is missing"),
    ("EAGLE-3", {"num_attention_heads": "4"}, "num_attention_heads is '4', not a positive integer"),
    ("EAGLE-3", {"num_hidden_layers": 65}, "no drafter has more than 64"),
    ("EAGLE-3", {"draft_vocab_size": 400}, "draft_vocab_size 400 is not between 1 and vocab_size 320"),
    ("EAGLE-3", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small', not a number"),
    ("EAGLE-3", {"eagle_config": []}, r"eagle_config is \[\], not an object"),
    ("EAGLE-3", {"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    ("EAGLE-3", {"attention_bias": True}, "attention_bias is true"),
    ("EAGLE-3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("EAGLE-3", {"norm_before_residual": True}, "norm_before_residual is true"),
    ("EAGLE-3", {"quantization_config": {"bits": 4}}, "quantization_config is set"),
    ("EAGLE-3", {"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both set"),
    ("EAGLE-3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    ("EAGLE-3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 77]}}, r"states \[78\] of a target"),
    ("EAGLE-3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 1, 8]}}, "not ascending"),
    ("EAGLE-3", {"sliding_window": 1}, "sliding_window is 1"),
    ("EAGLE-3", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, "rope_theta is given as"),
    ("EAGLE-3", {"torch_dtype": "int8"}, "dtype and torch_dtype are"),
    ("EAGLE-3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' of a drafter"),
    ("EAGLE-3", {"architectures": ["Qwen3ForCausalLM"]}, r"architecture \['Qwen3ForCausalLM'\], which no family"),
    ("speculators", {"eagle_aux_hidden_state_layer_ids": "all"}, "are not written"),
    ("speculators", {"draft_vocab_size": 64}, "lm_head.weight has shape"),
    ("EAGLE-1", {"hidden_size": 48}, "hidden size 48 and vocabulary 320, this target has 32 and 320"),
    ("EAGLE-1", {"vocab_size": 322}, "vocab_size is 322, the target's 320"),
    ("EAGLE-1", {"num_hidden_layers": 2}, "num_hidden_layers is 2, not 1"),
    ("EAGLE-1", {"mlp_bias": True}, "mlp_bias is True, not False"),
    ("EAGLE-1", {"intermediate_size": None}, "intermediate_size is None, not a positive integer"),
    ("EAGLE-1", {"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
    ("EAGLE-1", {"rope_theta": "base"}, "rope_theta is 'base', not a number"),
    ("EAGLE-1", {"hot_vocab_size": 64}, "hot_vocab_size is 64"),
    ("DFlash", {"num_target_layers": 36}, r"layers \(32, 320, 36\)"),
    ("DFlash", {"block_size": 32}, "block_size is 32, not between 2 and 17"),
    ("DFlash", {"block_size": None}, "block_size is None"),
    ("DFlash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, "full attention"),
    ("DFlash", {"attention_bias": True}, "without bias"),
    ("DFlash", {"dflash_config": {"mask_token_id": 320}}, "mask_token_id is 320, outside a vocabulary of 320"),
    ("DFlash", {"dflash_config": {"mask_token": "<|MASK|>"}}, "names its mask '<|MASK|>' and not its id"),
    ("DFlash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 11]}}, "not ascending outputs of layers"),
    ("DFlash", {"dflash_config": 5}, "dflash_config is 5, not an object"),
    ("DSpark of DeepSpec", {"markov_rank": 0}, "markov_rank 0: not one of vanilla, gated, rnn"),
    ("DSpark of DeepSpec", {"block_size": 17}, "block_size is 17, not between 1 and 16"),
]


@pytest.mark.parametrize(("form", "change", "says"), CONFIG_FAULTS, ids=[
    f"{form}: {', '.join(change)}" for form, change, _ in CONFIG_FAULTS])
def test_a_fault_of_the_config_is_refused(form: str, change: dict[str, Any], says: str, server: Running, target: Path,
                                          tmp_path: Path) -> None:
    program, family = published_forms.READ[form]
    drafter = program().write(tmp_path / "drafter")
    file = drafter / "config.json"
    written = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in written.items() if value is not None}))
    for response in (as_rival(server, target, drafter), as_head(server, target, drafter, family)):
        message, _ = refusal(response, drafter)
        assert re.search(says, message), message


@pytest.mark.parametrize(("form", "says"), [
    ("EAGLE-3", "the drafter reads states of 32, the target's are 48"),
    ("EAGLE-1", "is for a target of hidden size 32 and vocabulary 320, this target has 48 and 320"),
    ("DFlash", "is for a target of width, vocabulary and layers (32, 320, 12); this target has (48, 320, 12)"),
])
def test_a_drafter_of_another_target_is_refused_with_both_values(form: str, says: str, server: Running,
                                                                 tmp_path: Path) -> None:
    wide = tiny_target(tmp_path / "wide", **published_forms.TARGET | {"hidden_size": 48})
    program, family = published_forms.READ[form]
    drafter = program().write(tmp_path / "drafter")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Name towns."}\n')
    for response in (as_rival(server, wide, drafter), as_head(server, wide, drafter, family),
                     as_candidate(server, wide, drafter, prompts)):
        assert says in refusal(response, drafter)[0]


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


TENSOR_FAULTS: list[tuple[str, Callable[[Tensors], Tensors], str]] = [
    ("EAGLE-3", without("norm.weight"), "tensors are missing: norm.weight"),
    ("EAGLE-3", lambda tensors: tensors | {"lm_head.bias": torch.ones(4)}, "unknown tensors: lm_head.bias"),
    ("SpecForge", without("norm.weight"), "tensors are missing: norm.weight"),
    ("SpecForge", lambda tensors: tensors | {"fc.weight": torch.ones(32, 64)}, "fc.weight has shape"),
    ("SpecForge", lambda tensors: tensors | {"d2t": torch.zeros(128)}, "d2t is float32, not int64"),
    ("SpecForge", lambda tensors: tensors | {"norm.weight": torch.ones(32)}, "parameters are stored as"),
    ("EAGLE-1", without("layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight is missing"),
    ("EAGLE-1", lambda tensors: tensors | {"layers.0.self_attn.q_proj.bias": torch.ones(32)},
     "layers.0.self_attn.q_proj.bias is not known"),
    ("speculators EAGLE-1", without("transformer.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight is missing"),
    ("DFlash", without("layers.1.self_attn.q_norm.weight"), "layers.1.self_attn.q_norm.weight is missing"),
    ("DFlash", lambda tensors: tensors | {"fc.weight": torch.ones(32, 64)},
     "fc.weight has shape [32, 64], not [32, 96]"),
]


@pytest.mark.parametrize(("form", "change", "says"), TENSOR_FAULTS, ids=[
    f"{form}: {says}" for form, _, says in TENSOR_FAULTS])
def test_a_fault_that_the_headers_of_the_weights_show_is_refused(
        form: str, change: Callable[[Tensors], Tensors], says: str, server: Running, target: Path,
        tmp_path: Path) -> None:
    program, family = published_forms.READ[form]
    published = program()
    drafter = published_forms.Published(published.config, change(published.tensors), published.pickled).write(
        tmp_path / "drafter")
    for response in (as_rival(server, target, drafter), as_head(server, target, drafter, family)):
        assert says in refusal(response, drafter)[0]


def test_files_that_cannot_be_read_are_refused(server: Running, target: Path, tmp_path: Path) -> None:
    drafter = published_forms.specforge().write(tmp_path / "drafter")
    weights, config = drafter / "model.safetensors", drafter / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    for file, data, says in ((weights, whole[:-8], "truncated"), (weights, b"version https://git-lfs", "git-LFS"),
                             (config, b"{", "is not JSON"), (config, b"[]", "not a JSON object"),
                             (config, b"version https://git-lfs", "git-LFS")):
        weights.write_bytes(whole)
        config.write_text(text)
        file.write_bytes(data)
        assert says in refusal(as_rival(server, target, drafter), drafter)[0]
    config.write_text(text)
    weights.unlink()
    assert "no weights in" in refusal(as_rival(server, target, drafter), drafter)[0]


def test_a_drafter_that_is_not_there_is_refused(server: Running, target: Path, tmp_path: Path) -> None:
    for response in (as_rival(server, target, tmp_path / "none"), as_head(server, target, tmp_path / "none", "eagle3")):
        assert "is not a directory with config.json" in refusal(response, tmp_path / "none")[0]


def test_a_drafter_of_another_family_than_is_trained_is_no_beginning(server: Running, target: Path,
                                                                     tmp_path: Path) -> None:
    drafter = published_forms.dflash().write(tmp_path / "drafter")
    message, hint = refusal(as_head(server, target, drafter, "eagle3"), drafter)
    assert "is of family 'dflash', and drafter.family is 'eagle3'" in message
    assert hint == "set drafter.family to 'dflash'"


@pytest.mark.parametrize(("form", "spec", "says"), [
    ("EAGLE-3", {"draft_vocab_size": 64}, "drafter.draft_vocab_size is 64, and that of drafter.init_from .* is 128"),
    ("EAGLE-3", {"aux_layers": [1, 2, 3]}, r"aux_layers is \(1, 2, 3\), and that of drafter.init_from .* is \(2, 6, 9"),
    ("EAGLE-3", {"fc_norm": True}, "fc_norm is True, and that of drafter.init_from .* is False"),
    ("DFlash", {"num_layers": 5}, "num_layers is 5, and that of drafter.init_from .* is 2"),
    ("EAGLE-1", {"intermediate_size": 96}, "intermediate_size is 96, and that of drafter.init_from .* is 64"),
])
def test_a_drafter_of_other_values_than_are_trained_is_no_beginning(
        form: str, spec: dict[str, Any], says: str, server: Running, target: Path, tmp_path: Path) -> None:
    program, family = published_forms.READ[form]
    drafter = program().write(tmp_path / "drafter")
    response = submitted(server, target, drafter={"family": family, "init_from": str(drafter)} | spec)
    message, hint = refusal(response, drafter)
    assert re.search(says, message), message
    assert hint == f"leave drafter.{next(iter(spec))} out, or train without drafter.init_from"


def test_authors_weights_tell_an_eagle_1_from_a_draft_model(server: Running, target: Path, tmp_path: Path) -> None:
    """Both are LlamaForCausalLM with one layer: the names of the tensors decide, pickled or not."""
    published = published_forms.eagle_1()
    small = tiny_target(tmp_path / "small", seed=3, num_layers=1, hidden_size=16, vocab_size=published_forms.VOCAB)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(small / "config.json", pickled)
    torch.save(load_file(small / "model.safetensors"), pickled / "pytorch_model.bin")
    for drafter in (small, pickled):
        assert as_head(server, target, drafter, "standalone").status_code == 202, "a draft model has a width of its own"
        assert "is of family 'standalone'" in refusal(as_head(server, target, drafter, "eagle1"), drafter)[0]
    for number, is_pickled in enumerate((True, False)):
        drafter = published_forms.Published(published.config, published.tensors, is_pickled).write(
            tmp_path / str(number))
        assert "is of family 'eagle1'" in refusal(as_head(server, target, drafter, "standalone"), drafter)[0]


def test_what_the_stage_alone_can_tell_is_left_to_it(server: Running, target: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub id of which the cache has the config alone: its weights are fetched by the stage."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    snapshot = tmp_path / "models--org--drafter" / "snapshots" / commit
    published_forms.eagle_1().write(snapshot)
    (snapshot / "pytorch_model.bin").unlink()
    rival = {"path": "org/drafter", "revision": commit}
    assert submitted(server, target, rivals=["org/other", rival]).status_code == 202
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"vocab_size": 322}))
    response = submitted(server, target, rivals=[rival])
    assert response.status_code == 422
    assert "rivals: 'org/drafter': vocab_size is 322" in response.json()["detail"]
    # An unknown width is not compared: a draft model has one of its own.
    (snapshot / "config.json").write_text(json.dumps(config | {"hidden_size": 48}))
    assert submitted(server, target, rivals=[rival]).status_code == 202


def test_a_rival_that_sglang_computes_and_eyrie_does_not_is_refused_where_eyrie_measures_it(
        server: Running, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = published_forms.specforge()
    scaled = published_forms.Published(published.config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
                                       published.tensors).write(tmp_path / "drafter")
    assert "rope type 'yarn'" in refusal(as_rival(server, target, scaled), scaled)[0]
    monkeypatch.setenv(SGLANG_PROGRAM, "python -m sglang.launch_server")
    response = submitted(server, target, rivals=[str(scaled)], engine={"kind": "sglang"}, drafter={"family": "eagle3"})
    assert response.status_code == 202, response.text
