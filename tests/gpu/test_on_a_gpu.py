"""The same answers on a GPU as on the processor: forward pass, training step, lossless decoding, the train stage.

Run by `make test-gpu`, which refuses without a GPU; elsewhere every test here is skipped and says so.
"""

import warnings
from pathlib import Path

import pytest
import torch

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.sampling import SamplingSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.drafters.eagle3.checkpoint import save_drafter
from eyrie_workers.drafters.eagle3.model import Eagle3Config, Eagle3Drafter
from eyrie_workers.drafters.eagle3.objective import TrainingTimeTest
from eyrie_workers.drafters.registry import open_drafter
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.config import TargetConfig
from eyrie_workers.targets.device import CPU, device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.loading import load_target
from eyrie_workers.training.objective import StepContext
from tests.tiny import tiny_target
from tests.workers.drafters.test_eagle3_proposer import HIDDEN, VOCAB, embedding, random_documents, random_drafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine shows none")
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny")


def test_hidden_states_are_those_of_the_processor(target_dir: Path) -> None:
    tokens = [torch.arange(1, 30) % 60, torch.arange(5, 12)]
    here, there = (load_target(target_dir, "float32", device) for device in (CPU, GPU))
    for (aux, last), (aux_gpu, last_gpu) in zip(here.hidden_states(tokens, (1, 2)), there.hidden_states(tokens, (1, 2)),
                                                strict=True):
        # float32 sums in another order, through a few layers
        torch.testing.assert_close(aux_gpu.cpu(), aux, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(last_gpu.cpu(), last, atol=1e-4, rtol=1e-4)


def test_a_training_step_has_the_loss_and_the_gradients_of_the_processor() -> None:
    documents = random_documents((40, 25))
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    found = []
    for device in (CPU, GPU):
        drafter: Eagle3Drafter = random_drafter()
        drafter.to(device)
        with device_scope(device):
            objective = TrainingTimeTest(drafter, embedding().to(device), lm_head.to(device),
                                         TrainSpec(ttt_length=4, unrolled_fraction=0.5), max_positions=64)
        outcome = objective(documents, StepContext(9, 10, 0))
        outcome.loss.backward()
        found.append([outcome.loss.detach().cpu(), *(p.grad.cpu() for p in drafter.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def drafter_of(config: TargetConfig) -> Eagle3Drafter:
    """Of random weights: its guesses are poor, its output must be the target's all the same."""
    torch.manual_seed(0)
    return Eagle3Drafter(Eagle3Config(
        hidden_size=config.hidden_size, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size, aux_layers=(1, 2, 3), rms_eps=config.rms_eps,
        rope=config.rope, max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids), DraftVocabulary(torch.arange(config.vocab_size), config.vocab_size))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4),
                                   DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6)])
def test_drafting_there_changes_no_token(target_dir: Path, tmp_path: Path, temperature: float,
                                         shape: DraftTreeShape) -> None:
    target = load_target(target_dir, "float32", GPU)
    save_drafter(tmp_path / "drafter", drafter_of(target.config))
    engine = Engine(target, open_drafter(tmp_path / "drafter", target), max_concurrency=2, exact=True)
    requests = [Request(id=str(n), prompt_ids=tuple(range(1 + n, 9 + n)), max_new_tokens=24, seed=n,
                        sampling=SamplingSpec(temperature=temperature)) for n in range(4)]
    plain = engine.generate(requests)
    drafted = engine.generate(requests, shape)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


@pytest.mark.parametrize("shape", [DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4),
                                   DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6),
                                   DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6, static=True)])
def test_a_round_waits_for_the_device_once(target_dir: Path, tmp_path: Path, shape: DraftTreeShape) -> None:
    target = load_target(target_dir, "bfloat16", GPU)
    save_drafter(tmp_path / "drafter", drafter_of(target.config))
    engine = Engine(target, open_drafter(tmp_path / "drafter", target), max_concurrency=2, tree=shape)
    for n, temperature in enumerate((0.0, 1.0)):
        engine.submit(Request(id=str(n), prompt_ids=tuple(range(1 + n, 9 + n)), max_new_tokens=24, seed=n,
                              sampling=SamplingSpec(temperature=temperature)))
    engine.step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        engine.step()
        torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in said if "called a synchronizing" in str(one.message)]) == 1
