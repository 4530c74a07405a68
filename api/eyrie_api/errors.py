"""Errors a user can act on.

Every error carries a `reason` (CamelCase; it is also the condition's reason), a message that names field, value and
rule, and a `hint`: what to do instead. The class carries the HTTP status and the exit code, so that neither the server
nor a stage program decides twice. `Transient` and `Permanent` say in the type whether trying again can help.
"""

from typing import ClassVar


class EyrieError(Exception):
    """Base of every error a user may see."""

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    reason: ClassVar[str] = "InternalError"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}; {hint}")
        self.message = message
        self.hint = hint


class Transient(EyrieError):
    """May pass when tried again; `after_s` says when."""

    http_status = 503
    exit_code = 75  # EX_TEMPFAIL
    reason = "Transient"

    def __init__(self, message: str, hint: str = "will retry", after_s: float = 5.0) -> None:
        super().__init__(message, hint)
        self.after_s = after_s


class Permanent(EyrieError):
    """Trying again will fail again."""

    exit_code = 70  # EX_SOFTWARE
    reason = "Permanent"


class InvalidInput(Permanent):
    """The user's spec, file or argument is wrong."""

    http_status = 422
    exit_code = 65  # EX_DATAERR
    reason = "InvalidInput"


class TargetNotFound(InvalidInput):
    """No model under that path or id."""

    exit_code = 66  # EX_NOINPUT
    reason = "TargetNotFound"


class UnsupportedTarget(InvalidInput):
    """An architecture we cannot capture or decode."""

    reason = "UnsupportedTarget"


class NoChatTemplate(InvalidInput):
    """The tokenizer cannot render a conversation."""

    reason = "NoChatTemplate"


class NoUsableData(InvalidInput):
    """After quarantine nothing is left to train on."""

    reason = "NoUsableData"


class VocabularyTooLarge(InvalidInput):
    """A draft vocabulary larger than the target's."""

    reason = "VocabularyTooLarge"


class ArtifactMissing(Permanent):
    """A stage's input is not where the spec says."""

    exit_code = 66
    reason = "ArtifactMissing"


class ArtifactCorrupt(Permanent):
    """Bytes that do not match their digest."""

    exit_code = 74  # EX_IOERR
    reason = "ArtifactCorrupt"


class DiskTooSmall(Permanent):
    """The plan does not fit the disk."""

    http_status = 507
    exit_code = 73  # EX_CANTCREAT
    reason = "DiskTooSmall"


class LossDiverged(Permanent):
    """Training produced a loss that is not a number."""

    reason = "LossDiverged"


class NotFound(EyrieError):
    """No such job, endpoint, artifact."""

    http_status = 404
    exit_code = 66
    reason = "NotFound"


class Unauthorized(EyrieError):
    """No token or key, or not the right one."""

    http_status = 401
    exit_code = 77  # EX_NOPERM
    reason = "Unauthorized"


class Forbidden(EyrieError):
    """Known, but not allowed; or a request this server does not answer from there."""

    http_status = 403
    exit_code = 77
    reason = "Forbidden"


class Conflict(EyrieError):
    """The request contradicts the present state."""

    http_status = 409
    reason = "Conflict"


class PortInUse(Conflict):
    """Another process listens there."""

    exit_code = 69  # EX_UNAVAILABLE
    reason = "PortInUse"


class TooLarge(EyrieError):
    """A body over the limit."""

    http_status = 413
    reason = "TooLarge"
