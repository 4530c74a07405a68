"""Error classes shown to users.

Every error has a `reason` (the name of its class; also the condition's reason and the type of the problem document, so
that renaming a class changes the API), a message that names field, value and rule, and a `hint`: what to do instead.
The class defines the HTTP status for the server and the exit code for programs. `Transient` errors may pass on a retry,
`Permanent` ones do not.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

RUN_AGAIN = "run that stage and the later ones again: eyrie retry JOB --from STAGE"
"""Hint where the output of a stage is missing or damaged."""


class EyrieError(Exception):
    """Base of every error a user may see; by itself, an unexpected failure of the server."""

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    reason: ClassVar[str] = "InternalError"

    def __init_subclass__(cls) -> None:
        cls.reason = cls.__dict__.get("reason", cls.__name__)

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}; {hint}")
        self.message = message
        self.hint = hint


class Transient(EyrieError):
    """A retry may succeed; `after_s` is the time to wait before it."""

    http_status = 503
    exit_code = 75  # EX_TEMPFAIL

    def __init__(self, message: str, hint: str = "will retry", after_s: float = 5.0) -> None:
        super().__init__(message, hint)
        self.after_s = after_s


class Permanent(EyrieError):
    """A retry fails in the same way."""

    exit_code = 70  # EX_SOFTWARE


class InvalidInput(Permanent):
    """The user's spec, file or argument is wrong."""

    http_status = 422
    exit_code = 65  # EX_DATAERR


class TargetNotFound(InvalidInput):
    """No model under that path or id."""

    exit_code = 66  # EX_NOINPUT


class UnsupportedTarget(InvalidInput):
    """Files of the target are missing, damaged or contradictory, or its architecture cannot be captured or decoded."""


_OF_DOCUMENTS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


@contextmanager
def reading(document: object) -> Iterator[None]:
    """The boundary for documents of users: what the code within raises on a value whose type or size no check expects
    becomes UnsupportedTarget. The traceback is logged, since it may be a defect of the code.

    document   what is read, for the message
    """
    try:
        yield
    except _OF_DOCUMENTS as error:
        logging.getLogger(__name__).warning("while %s was read", document, exc_info=error)
        raise UnsupportedTarget(f"{document} holds a value that cannot be used: {type(error).__name__}: "
                                f"{str(error)[:300]}", "compare its files with those that were published") from error


class NoChatTemplate(InvalidInput):
    """The tokenizer cannot render a conversation."""


class NoUsableData(InvalidInput):
    """The data files are missing or empty, or no row of them can be trained on."""


class VocabularyTooLarge(InvalidInput):
    """A draft vocabulary larger than the target's."""


class ArtifactMissing(Permanent):
    """A stage's input is not where the spec says."""

    exit_code = 66


class ArtifactCorrupt(Permanent):
    """Bytes that do not match their digest."""

    exit_code = 74  # EX_IOERR


class DiskTooSmall(Permanent):
    """The plan does not fit the disk."""

    http_status = 507
    exit_code = 73  # EX_CANTCREAT


class DiskFull(Transient):
    """A disk has no space left; what needs it waits."""

    exit_code = 71  # EX_OSERR; that of no other error, since a program may be unable to write it down


class GpuTooSmall(Permanent):
    """A training step, or the weights of a target, do not fit the memory of the GPUs of a job."""

    http_status = 422
    exit_code = 78  # EX_CONFIG


class MemoryTooSmall(Permanent):
    """A stage of a job, or the weights of a target, do not fit the memory of the machine."""

    http_status = 422
    exit_code = 78  # EX_CONFIG


class LossDiverged(Permanent):
    """The training loss or the gradient norm is NaN or infinite."""


class NotFound(EyrieError):
    """The job, endpoint or artifact does not exist, or the caller may not see it."""

    http_status = 404
    exit_code = 66


class Unauthorized(EyrieError):
    """The bearer token is missing or invalid."""

    http_status = 401
    exit_code = 77  # EX_NOPERM


class UnsupportedMediaType(EyrieError):
    """A body that is not JSON."""

    http_status = 415


class Forbidden(EyrieError):
    """The caller lacks permission, or the Host header is not accepted."""

    http_status = 403
    exit_code = 77


class Conflict(EyrieError):
    """The current state does not allow the request."""

    http_status = 409


class TablesTooOld(Conflict):
    """The database was made by a version from which upgrades are not supported."""

    exit_code = 78  # EX_CONFIG


class PortInUse(Conflict):
    """Another process listens on the port."""

    exit_code = 69  # EX_UNAVAILABLE


class TooLarge(EyrieError):
    """The request body exceeds the limit."""

    http_status = 413


def report_error(error: EyrieError) -> int:
    """Print an error and its hint on stderr; returns the program's exit code."""
    print(f"error: {error.reason}: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code
