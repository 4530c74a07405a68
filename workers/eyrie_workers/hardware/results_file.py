"""The requests of a load test as a file: one line per variant and level.

A ratio of two profiles has its interval by bootstrap over prompts of both sides' requests. Profiles of a job are
measured in programs of their own, so the one of the baseline leaves its requests for the others.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from eyrie_api.artifacts import write_atomically
from eyrie_api.errors import ArtifactCorrupt
from eyrie_api.v1alpha1.model import Frozen
from eyrie_workers.load.client import RequestResult
from eyrie_workers.load.report_statistics import LevelResults
from eyrie_workers.load.schedule import Level


class StoredResult(Frozen):
    """What the statistics read of a request; times in seconds."""

    category: str
    prompt_id: str
    repeat: int
    index: int
    failure: str | None = None
    tokens: int = 0
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    end_to_end_s: float = 0.0
    histogram: tuple[int, ...] | None = None
    proposed: bool = False
    digest: str = ""
    """Hexadecimal, of the answer's text."""

    ids_digest: str | None = None

    @classmethod
    def of(cls, one: RequestResult) -> "StoredResult":
        """Of a measured request."""
        return cls(category=one.category, prompt_id=one.prompt_id, repeat=one.repeat, index=one.index,
                   failure=one.failure, tokens=one.tokens, ttft_s=one.ttft_s, gaps_s=tuple(one.gaps_s.tolist()),
                   end_to_end_s=one.end_to_end_s, histogram=one.histogram, proposed=one.proposed,
                   digest=one.digest.hex(), ids_digest=None if one.ids_digest is None else one.ids_digest.hex())

    def result(self) -> RequestResult:
        """As it was measured."""
        return RequestResult(
            self.category, self.prompt_id, self.repeat, self.index, failure=self.failure, tokens=self.tokens,
            ttft_s=self.ttft_s, gaps_s=np.array(self.gaps_s), end_to_end_s=self.end_to_end_s, histogram=self.histogram,
            proposed=self.proposed, digest=bytes.fromhex(self.digest),
            ids_digest=None if self.ids_digest is None else bytes.fromhex(self.ids_digest))


class StoredLevel(Frozen):
    """One variant at one level."""

    variant: str
    mode: Literal["closed", "open"]
    value: float
    seconds: float
    cpu_s: float
    results: tuple[StoredResult, ...]


def write_results(path: Path, levels: Iterable[LevelResults]) -> None:
    """Write the file."""
    stored = (StoredLevel(variant=one.variant, mode=one.level.mode, value=one.level.value, seconds=one.seconds,
                          cpu_s=one.cpu_s, results=tuple(map(StoredResult.of, one.results))) for one in levels)
    write_atomically(path, "".join(one.model_dump_json() + "\n" for one in stored))


def read_results(path: Path) -> list[LevelResults]:
    """Read it. Raises ArtifactCorrupt."""
    try:
        stored = [StoredLevel.model_validate_json(line) for line in path.read_text().splitlines()]
        return [LevelResults(one.variant, Level(one.mode, one.value), tuple(each.result() for each in one.results),
                             one.seconds, one.cpu_s) for one in stored]
    except (OSError, ValueError) as error:
        raise ArtifactCorrupt(f"{path} cannot be read: {' '.join(str(error).split())[:200]}",
                              "retry the job") from None
