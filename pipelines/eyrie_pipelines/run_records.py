"""Read the small JSON files of a run, of which each can be written again.

A damaged one therefore counts as absent, and is logged: an error instead would end the driver's step of the job, every
time, and for a record that other jobs look at, theirs too.
"""

import logging
from pathlib import Path
from typing import TypeVar

from eyrie_api.v1alpha1.model import Frozen

log = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=Frozen)


def read_record(path: Path, kind: type[ModelT]) -> ModelT | None:
    """The record in a file; None where there is none or it is damaged."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s is damaged and counts as absent: %s", path, " ".join(str(error).split())[:200])
        return None
