"""One engine server per test process, on a tiny target whose context leaves room for long answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_workers.engines.process import EngineCommand, EngineProcess, start_engine
from tests.tiny import tiny_target
from tests.workers.engines.request_fields import CLOSING


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_target(tmp_path_factory.mktemp("target") / "tiny", max_position_embeddings=4096)
    with (path / "chat_template.jinja").open("a") as template:
        template.write(CLOSING)
    return path


@pytest.fixture(scope="session")
def engine(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    started = start_engine(EngineCommand(target=target, model="tiny", max_concurrency=4, threads=1),
                           tmp_path_factory.mktemp("engine"))
    try:
        started.wait_ready(120)
        yield started
    finally:
        started.stop()


@pytest.fixture
def http(engine: EngineProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.url, timeout=120) as client:
        yield client


def chat_body(text: str = "hello there", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0,
            "ignore_eos": True} | fields


@pytest.fixture(scope="session")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of random weights: its guesses are poor, its output must be the target's all the same."""
    import torch

    from eyrie_workers.drafters.eagle3.drafter import Eagle3Config, Eagle3Drafter
    from eyrie_workers.drafters.eagle3.family import save_drafter
    from eyrie_workers.targets.config import read_config
    from eyrie_workers.targets.draft_vocabulary import DraftVocabulary

    config = read_config(target)
    torch.manual_seed(0)
    drafter = Eagle3Drafter(Eagle3Config(
        hidden_size=config.hidden_size, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size, aux_layers=(1, 2, 3), rms_eps=config.rms_eps,
        rope=config.rope, max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids), DraftVocabulary(torch.arange(config.vocab_size), config.vocab_size))
    path = tmp_path_factory.mktemp("drafter") / "random"
    save_drafter(path, drafter)
    return path
