"""What Eyrie says of SGLang's capture, against the SGLang that is installed."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.planning.sglang_support import (
    CAPTURED_ARCHITECTURES,
    NO_BLOCKS_ARCHITECTURES,
    PLUGIN_ARCHITECTURES,
    QUANTISED_BY_SGLANG,
    RAW_UNLESS_FIRST_IS_ONE,
    SGLANG_VERSION,
)
from tests.sglang.servers import sglang_python

SCAN = Path(__file__).with_name("capture_hooks.py")


@pytest.fixture(scope="module")
def scanned() -> dict[str, Any]:
    done = subprocess.run([str(sglang_python()), str(SCAN)], capture_output=True, text=True, timeout=120,
                          check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_version_is_the_one_our_facts_are_of(scanned: dict[str, Any]) -> None:
    assert scanned["version"] == SGLANG_VERSION


def test_sglang_captures_for_exactly_the_classes_listed(scanned: dict[str, Any]) -> None:
    no_targets = re.compile(r"(NextN|MTP|Eagle3?)$|Assistant|Embedding")  # drafters, and a model for embeddings
    assert {name for name in scanned["raw_unless_first_is_one"] if not no_targets.search(name)} == {
        *CAPTURED_ARCHITECTURES}
    assert not set(scanned["raw_unless_first_is_one"]) & set(PLUGIN_ARCHITECTURES)


def test_every_method_of_quantisation_that_we_name_is_registered(scanned: dict[str, Any]) -> None:
    # `modelopt` is read from the checkpoint's `quant_algo`, and `gptq` is served as `gptq_marlin` on GPUs.
    assert {*QUANTISED_BY_SGLANG} <= {*scanned["quantised"]}
    assert "gptq_marlin" in scanned["quantised"]


def test_drafters_of_blocks_are_captured_for_by_all_but_the_classes_listed(scanned: dict[str, Any]) -> None:
    assert set(CAPTURED_ARCHITECTURES) - set(scanned["blocks"]) == set(NO_BLOCKS_ARCHITECTURES)


def test_layer_ids_are_taken_raw_by_exactly_the_families_listed(scanned: dict[str, Any]) -> None:
    raw = {name for name, taken_raw in scanned["raw_unless_first_is_one"].items() if taken_raw}
    hands_on = {"KimiK25ForConditionalGeneration"}  # to the DeepSeek model inside it
    assert raw & set(CAPTURED_ARCHITECTURES) | hands_on == set(RAW_UNLESS_FIRST_IS_ONE)
