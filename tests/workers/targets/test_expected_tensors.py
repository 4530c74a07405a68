"""Submission checks the headers of a target's weights: exactly the tensors that the forward pass reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyrie_api.planning.facts import read_config as read_object
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.target_files import check_tokenizer, check_weights, expected_tensors
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import CheckpointTensors
from eyrie_workers.targets.model import TargetModel
from tests.tiny import tiny_target


class Recorder(CheckpointTensors):
    """Tensors of a directory, and which of them were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, torch.float32, torch.device("cpu"))
        self.read: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        self.read[name] = tuple(tensor.shape)
        return tensor


@pytest.mark.parametrize(("family", "settings"), [
    ("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}), ("qwen2", {}),
    ("qwen3", {"attention_bias": True}), ("olmo2", {}), ("olmo3", {"sliding_window": 16}),
    ("mistral", {"attention_bias": True}), ("phi3", {}), ("smollm3", {"tie_word_embeddings": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True})])
def test_submission_accepts_what_transformers_saves_and_expects_what_the_forward_pass_reads(
        family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_target(tmp_path, family, **settings)
    config, facts = read_object(path), target_facts(path)
    check_weights(path, config, facts, known=True)
    check_tokenizer(path, config, facts.vocab_size)
    recorder = Recorder(path)
    TargetModel(read_config(path), recorder)
    assert recorder.read == expected_tensors(config, facts)
