"""Location of the artifact store and access to it: one frozen value, read from EYRIE_ARTIFACTS_* variables.

The control plane and stage programs read the same variables, so that a chart sets them once. Credentials are not among
them: they come from a mounted Secret (`credentials_dir`, one file per value) or from boto3's default chain
(AWS_ACCESS_KEY_ID ..., a profile, a pod's web identity), and are never part of a spec, a status or a log line.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.model import FromVariables
from eyrie_api.v1alpha1.rules import rule_of

VariablesT = TypeVar("VariablesT", bound=FromVariables)

PREFIX = "EYRIE_ARTIFACTS_"
MIN_PART_BYTES = 5 * 2**20
"""S3's smallest part, the last one excepted."""


def from_variables(kind: type[VariablesT], prefix: str, environ: Mapping[str, str] | None = None) -> VariablesT:
    """Settings from the variables named after their fields. Raises InvalidInput naming the variable that is wrong."""
    environ = os.environ if environ is None else environ
    names = {name: prefix + name.upper() for name in kind.model_fields}
    values = {name: environ[variable] for name, variable in names.items() if environ.get(variable)}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise InvalidInput(f"{names[name]} = {values.get(name)!r}: {rule_of(first)}",
                           "correct or unset the variable") from error


class StoreOptions(FromVariables):
    """One artifact store."""

    url: str | None = None
    """`s3://bucket/prefix`, `file:///directory` or a path. Default: artifacts stay in the job's directory."""

    endpoint_url: str | None = Field(None, pattern=r"^https?://")
    """Of an S3-compatible store; default: AWS."""

    region: str = Field("us-east-1", min_length=1)
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """How a request names the bucket. `auto`: in the path where endpoint_url is set, in the host name at AWS."""

    credentials_dir: Path | None = None
    """Directory with the files `access_key`, `secret_key` and, if need be, `session_token`: a mounted Secret."""

    part_size_bytes: int = Field(16 * 2**20, ge=MIN_PART_BYTES, le=5 * 2**30)
    """Larger files are transferred in parts of this size. Each part in flight takes this much memory."""

    parallel: int = Field(4, ge=1, le=64)
    """Parts, or small files, in flight."""

    timeout_s: float = Field(60.0, gt=0.0)
    """Of a connection attempt, and between two reads of a response."""

    max_attempts: int = Field(6, ge=1, le=20)
    """Attempts of one request before StoreUnavailable is raised; the waits between them double."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "StoreOptions":
        """Read EYRIE_ARTIFACTS_URL, ... Raises InvalidInput naming the variable that is wrong."""
        return from_variables(cls, PREFIX, environ)

    def credentials(self) -> dict[str, str]:
        """`access_key`, `secret_key` and, if there is one, `session_token` of `credentials_dir`; empty without one.
        Raises InvalidInput where one is missing."""
        directory = self.credentials_dir
        if directory is None:
            return {}
        found = {name: (directory / name).read_text().strip() for name in ("access_key", "secret_key", "session_token")
                 if (directory / name).is_file()}
        missing = [name for name in ("access_key", "secret_key") if not found.get(name)]
        if missing:
            raise InvalidInput(f"EYRIE_ARTIFACTS_CREDENTIALS_DIR: {directory} lacks {' and '.join(missing)}",
                               "mount a Secret with the keys access_key and secret_key there")
        return found
