"""Rehearsed runs and small disks, as in tests/pipelines, driven by the embedded world."""

from tests.pipelines.conftest import disk, rehearsal

__all__ = ["disk", "rehearsal"]
