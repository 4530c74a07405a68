"""Rehearsed runs, as in tests/pipelines, driven by the embedded world."""

from tests.pipelines.conftest import rehearsal

__all__ = ["rehearsal"]
