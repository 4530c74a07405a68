"""Tests that run vLLM's CPU build, in an environment of its own: `make test-vllm`. No other run collects them."""

import os

collect_ignore_glob = [] if os.environ.get("EYRIE_TEST_VLLM") == "1" else ["*.py"]
