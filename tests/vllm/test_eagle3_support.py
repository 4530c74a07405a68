"""What the table of targets says of vLLM, against the vLLM that is installed."""

import json
import os
import subprocess
from pathlib import Path

from tests.architectures.catalog import ARCHITECTURES
from tests.architectures.vllm_classes import DRAFTED, SERVED, VLLM_VERSION
from tests.sglang.trained_drafter import ROOT


def test_vllm_drafts_for_exactly_the_classes_listed() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    python = Path(os.environ.get("EYRIE_VLLM_VENV", str(ROOT / ".eyrie" / "vllm-venv"))) / "bin" / "python"
    done = subprocess.run([python, Path(__file__).with_name("eagle3_support.py")], capture_output=True, text=True,
                          timeout=120, check=True)
    found = json.loads(done.stdout)
    ours = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] for model_type in ARCHITECTURES}
    assert found["version"] == VLLM_VERSION
    assert set(DRAFTED) == ours & set(found["drafted"])
    assert set(SERVED) == ours & set(found["served"]) - set(DRAFTED)
