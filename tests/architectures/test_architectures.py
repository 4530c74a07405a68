"""Tiny random targets of many architectures go from hidden states to an exported drafter: `make test-architectures`.

Its results are the table in docs/targets.md, which the last test compares with them
(`python -m tests.architectures.table --write` writes it).
"""

import json
import os
from pathlib import Path

import pytest
import torch

from eyrie_api.contract.reports import CaptureReport, TrainReport
from eyrie_api.planning.sglang_support import SUPPORTED_BY_SGLANG
from eyrie_api.planning.target_config import choose_source
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.stage_program import Stage
from eyrie_workers.stages.capture import capture
from eyrie_workers.stages.train import train
from eyrie_workers.targets.state_source import open_source
from tests.architectures.catalog import ARCHITECTURES, COMMON
from tests.architectures.table import DOCUMENT, rendered
from tests.tiny import tiny_target
from tests.workers.stages import test_capture as captures
from tests.workers.stages import test_train as trainings

pytestmark = pytest.mark.skipif(not os.environ.get("EYRIE_TEST_ARCHITECTURES"),
                                reason="imports the model classes of 33 architectures: make test-architectures")
LAYERS = (0, 1, 2, 3)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_states_are_those_of_transformers_and_a_drafter_is_trained_on_them(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = tiny_target(tmp_path / "target", model_type, **(COMMON | ARCHITECTURES[model_type]))
    rows = captures.write_rows(tmp_path / "rows", target, 12)
    spec = captures.write_spec(tmp_path / "store", target, tmp_path / "rows", aux_layers=LAYERS, check_rows=2,
                               batch_tokens=96)
    result = capture(spec, Stage(tmp_path / "store", quiet=True))
    report = result.report
    assert isinstance(report, CaptureReport)
    assert report.source == choose_source(json.loads((target / "config.json").read_text()), "auto")

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    store, output = FeatureStore(tmp_path / "store"), open_source(report.source, spec.target).output_head
    for index in range(len(rows)):
        row = store.read([index])
        with torch.no_grad():
            whole = model(row.token_ids[None], output_hidden_states=True, use_cache=False)
        wanted = torch.stack([whole.hidden_states[layer][0] for layer in LAYERS], dim=1)
        torch.testing.assert_close(row.aux, wanted, atol=1e-3, rtol=1e-3)
        # Supervised positions alone have a final state.
        kept = row.last.abs().sum(-1) > 0
        torch.testing.assert_close(output.logits(row.last[kept]), whole.logits[0][kept], atol=1e-3, rtol=1e-3)

    trained = train(trainings.write_spec(tmp_path / "train", target, tmp_path / "store", epochs=1,
                                         num_checkpoints=1), Stage(tmp_path / "train", quiet=True)).report
    assert isinstance(trained, TrainReport)
    checkpoint = tmp_path / "train" / "checkpoints" / trained.checkpoints[-1].name
    errors = {one.code for one in check_directory(checkpoint, target_dir=target) if one.severity == "error"}
    served = type(model).__name__ in SUPPORTED_BY_SGLANG
    assert errors == (set() if served else {"target-not-captured"})


def test_the_documented_table_is_that_of_these_architectures() -> None:
    assert rendered() in DOCUMENT.read_text()
