"""A target and captured states that the tests of trainings share."""

from pathlib import Path

import pytest

from tests.tiny import tiny_target
from tests.workers.stages.test_train import write_store


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def store_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    return write_store(tmp_path_factory.mktemp("store"), target_dir, 24)
