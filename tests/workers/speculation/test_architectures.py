"""The reference engine on targets that differ from Llama: drafting must change nothing.

Olmo 3 has windows over most layers, norms behind, two ropes; the others are those of `OTHERS`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.config import choose_aux_layers
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.tiny import tiny_target
from tests.workers.speculation.drafters import OracleDrafter, RandomDrafter

CHAIN = DraftTreeShape(num_steps=4, top_k=1, num_draft_tokens=5)
TREE = DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=14)
WINDOW = 9


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    return load_target(tiny_target(
        tmp_path_factory.mktemp("olmo") / "olmo3", "olmo3", seed=5, num_layers=4, initializer_range=0.15,
        sliding_window=WINDOW, rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                                                "full_attention": yarn}))


def requests(temperature: float) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    return [Request(f"r{i}", torch.randint(3, 320, (length,), generator=generator).tolist(), 14,
                    SamplingSpec(temperature=temperature), seed=100 + i) for i, length in enumerate((5, 23, 1, 60))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_drafter_shape_or_batch_changes_a_token_beyond_the_window(temperature: float, target: TargetModel) -> None:
    asked = requests(temperature)
    plain = [one.token_ids for one in Engine(target).generate(asked)]
    assert all(len(text) > WINDOW for text in plain)
    paths = 0
    random, oracle = RandomDrafter(320), OracleDrafter(320, target=target)
    for drafter, shape, concurrency in ((random, TREE, 3), (oracle, CHAIN, 3), (oracle, TREE, 1), (oracle, TREE, 2)):
        drafted = Engine(target, drafter, max_concurrency=concurrency).generate(asked, shape)
        assert [one.token_ids for one in drafted] == plain, (type(drafter).__name__, shape.label(), concurrency)
        paths += sum(len(one.accepted_histogram) > 2 for one in drafted)
    assert paths > 0


def test_greedy_output_equals_hugging_face_generate(target: TargetModel) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    asked = requests(0.0)
    ours = Engine(target, OracleDrafter(320, target=target), max_concurrency=2).generate(asked, TREE)
    for request, generation in zip(asked, ours, strict=True):
        prompt = torch.tensor([list(request.prompt_ids)])
        with torch.no_grad():
            theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=14,
                                    min_new_tokens=14, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert generation.token_ids == theirs[0, prompt.shape[1]:].tolist()


OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "smollm3": {},
    "granite": {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 8.0},
    "qwen2": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                  "original_max_position_embeddings": 128}},
}


@pytest.mark.parametrize("family", OTHERS)
def test_a_tree_changes_no_token_of_other_architectures(family: str, tmp_path: Path) -> None:
    target = load_target(tiny_target(tmp_path, family, seed=5, num_layers=2, initializer_range=0.15,
                                     **OTHERS[family]))
    oracle = OracleDrafter(320, target=target)
    for temperature in (0.0, 1.0):
        asked = requests(temperature)[:2]
        plain = [one.token_ids for one in Engine(target).generate(asked)]
        drafted = Engine(target, oracle, max_concurrency=2).generate(asked, TREE)
        assert [one.token_ids for one in drafted] == plain
        assert sum(len(one.accepted_histogram) > 2 for one in drafted) > 0


def test_the_drafter_reads_full_attention_layers_where_there_are_enough(target: TargetModel) -> None:
    assert choose_aux_layers(4, target.config.layer_types).aux_layers == (1, 2, 3)
    assert choose_aux_layers(32, target.config.layer_types * 8).aux_layers == (4, 16, 28)
