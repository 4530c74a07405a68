"""Marks tests of equality to the bit that need a row of a product not to depend on the other rows."""

import pytest
import torch

INDEPENDENT_ROWS = pytest.mark.skipif(
    torch.__version__ < "2.13",  # a TorchVersion, compared as one
    reason="a float32 product of torch 2.11.0+cu130 on a CPU rounds a row by the number of rows (2026-11-29)")
