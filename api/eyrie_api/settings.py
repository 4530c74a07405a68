"""Settings of the control plane: one frozen value, read once from EYRIE_* variables.

Every setting has a default for one machine, so `Settings()` is a complete configuration under `.eyrie`. A cluster sets
EYRIE_DATABASE_URL, EYRIE_BROKER_URL and EYRIE_ARTIFACTS_URL (with the access options of `artifacts.store`).

`Settings.stage_dir` repeats the directory layout of `eyrie_workers.catalog` (`jobs/<id>/stages/<stage>[/<key>]`),
because the control plane reads logs and artifacts without importing the workers.

The attribute docstrings of settings that the Helm chart does not set itself are the descriptions in
helm/eyrie/values.schema.json, and a test compares them (`tests.helm.values_table`).
"""

import base64
import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, field_validator

from eyrie_api.artifacts.store import StoreOptions, from_variables
from eyrie_api.artifacts.store_prices import store_prices
from eyrie_api.contract.model import FromVariables
from eyrie_api.errors import InvalidInput
from eyrie_api.request_origin import is_loopback_host

PREFIX = "EYRIE_"
DEFAULT_PORT = 8642
_SECRETS = ("token", "secret_key", "oidc_client_secret", "database_url", "broker_url")
_FERNET_KEYS = re.compile(r"\s*[\w-]{43}=(\s*,\s*[\w-]{43}=)*\s*", re.ASCII)
_NOT_KEYS = "must be one or more Fernet keys (32 bytes each, in URL-safe base64), separated by commas"


class Settings(FromVariables):
    """Settings of one machine or one deployment."""

    home: Path = Path(".eyrie")
    """Directory of the jobs, the SQLite file and the generated token."""

    database_url: str | None = None
    """SQLAlchemy URL; default: a SQLite file under home."""

    broker_url: str = "memory://"
    """URL of the Celery broker, for example `redis://host:6379/0`."""

    artifacts: StoreOptions = StoreOptions()
    """The artifact store for finished stages. Read from EYRIE_ARTIFACTS_*, as stage programs do."""

    cluster_profile: Path | None = None
    """File with a `contract.cluster.ClusterProfile`: jobs run as Kubeflow pipelines, endpoints as Deployments. Unset:
    both run on this machine."""

    host: str = "127.0.0.1"
    port: int = Field(DEFAULT_PORT, ge=0, le=65535)
    token: str | None = Field(None, min_length=16)
    """Bearer token. Required unless the bind address is loopback; if unset, one is generated under home."""

    secret_key: str | None = Field(None, repr=False)
    """Fernet keys that encrypt stored secrets, separated by commas: the first encrypts, all decrypt. If unset with
    SQLite, one is generated under home."""

    oidc_issuer: str | None = None
    """URL of an OIDC issuer whose bearer tokens are taken; every request must then prove itself, on loopback too."""

    oidc_audience: str | None = None
    """What `aud` must name."""

    oidc_groups_claim: str = "groups"
    oidc_admin_group: str | None = None
    """Members of it are administrators of everything."""

    oidc_leeway_s: float = Field(30.0, ge=0.0, le=300.0)
    """How far the issuer's clock may be off."""

    oidc_client_id: str | None = Field(None, min_length=1)
    """The console's registration at the issuer: people then sign in there. Its redirect URI is
    `https://<this server>/console/oidc/callback`."""

    oidc_client_secret: str | None = Field(None, min_length=1, repr=False)
    """For a registration that has one. PKCE is used with and without."""

    oidc_scopes: str = Field("openid", pattern=r"^openid( [!#-\[\]-~]+)*$")
    """What the console asks for; some issuers name groups only with `openid groups`."""

    rate_limit_per_minute: int = Field(60_000, ge=1)
    """Requests of one caller. The default is high: it stops programs in endless loops. Not applied on loopback without
    a token."""

    webhooks_allow_private: bool = False
    """Let webhooks and the URLs of projects' jobs lead to private and loopback addresses too: for receivers, data and
    endpoints in the same cluster."""

    credential_hosts: str | None = Field(
        None, pattern=r"^ *[A-Z][A-Z0-9_]*=[^\s,=]+ *(, *[A-Z][A-Z0-9_]*=[^\s,=]+ *)*$")
    """Variables that jobs of projects may send, each with a host, for example
    `OPENAI_API_KEY=api.openai.com,TEAM_API_KEY=llm.example`. Such a host may have a private address. Administrators'
    jobs are not restricted."""

    data_buckets: str | None = Field(None, pattern=r"^ *[^\s,]+ *(, *[^\s,]+ *)*$")
    """What jobs of projects may read of object stores, as `bucket` or `bucket/prefix`, separated by commas: stages read
    with Eyrie's own credentials. Administrators' jobs are not restricted."""

    max_body_bytes: int = Field(1 << 20, ge=1024)
    """Larger request bodies are refused. A job spec is a few KiB."""

    lease_ttl_s: float = Field(30.0, gt=0.0)
    """A driver that has not renewed its lease within this time is replaced."""

    reconcile_interval_s: float = Field(2.0, gt=0.0)
    """Interval at which unfinished jobs without a live lease are queried, and driven jobs are advanced."""

    retention_interval_s: float = Field(300.0, gt=0.0)
    idempotency_ttl_s: float = Field(24 * 3600.0, gt=0.0)
    """How long an Idempotency-Key is remembered."""

    outbox_ttl_s: float = Field(24 * 3600.0, gt=0.0)
    """How long dispatched outbox rows are kept, for inspection."""

    chore_queue: str | None = Field(None, min_length=1, max_length=128)
    """Name of the chores' queue at the broker; default: derived from the database's URL."""

    chore_threads: int = Field(2, ge=1, le=64)
    visibility_timeout_s: float = Field(300.0, ge=1.0)
    """Longer than any chore: Redis then hands the message out again, and a chore that ran on would run twice."""

    sse_heartbeat_s: float = Field(15.0, gt=0.0)
    sse_poll_s: float = Field(0.25, gt=0.0)
    """Interval of the query for new events, one for all live streams of a process. What it takes of the processor is
    missing where a job computes on the same machine."""

    gpu_hour_prices: str | None = Field(None, pattern=r"^ *[^\s,=]+=[0-9.]+ *(, *[^\s,=]+=[0-9.]+ *)*$")
    """What an hour of a GPU costs, for plans: `NVIDIA-H100-80GB-HBM3=2.5,NVIDIA-B200=5`, by node label of the type."""

    store_prices: str | None = Field(None, max_length=256)
    """What the object store of a cluster's jobs costs, for plans: `aws-s3`, `gcs` or `r2` for its list prices, or
    prices of your own, of a TB (10^12 bytes) for a month, of a million requests that write and that read, and of a TB
    that is read: `storage=20,put=5,get=0.4,traffic=0`. Prices after a name replace single ones of it. Default: by the
    store's address."""

    # Effective throughput of the machine, for plans. Measured on a 2-core AVX-512 CPU with the 16 x 256 quickstart
    # target: 63k tokens generated in 75 CPU seconds, captured in 18, 236k tokens trained (TTT 7) in 150.
    decode_gflops: float = Field(22.0, gt=0.0)
    """Token-by-token generation, all requests together."""

    single_gflops: float = Field(1.5, gt=0.0)
    """Generation for one request at a time, as benchmarks do."""

    prefill_gflops: float = Field(90.0, gt=0.0)
    """Teacher-forced passes."""

    train_gflops: float = Field(48.0, gt=0.0)
    """Forward and backward of the drafter."""

    @field_validator("secret_key")
    @classmethod
    def _check_keys(cls, value: str | None) -> str | None:
        if value is not None and not _FERNET_KEYS.fullmatch(value):
            raise ValueError(_NOT_KEYS)
        return value

    @field_validator("store_prices")
    @classmethod
    def _check_prices(cls, value: str | None) -> str | None:
        # A store that the table does not name has to have every price; which one it is is known with the profile.
        store_prices(value, None)
        return value

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read EYRIE_HOME, EYRIE_DATABASE_URL, ... Raises InvalidInput naming the variable that is wrong."""
        return from_variables(cls, PREFIX, environ, _SECRETS, artifacts=StoreOptions.from_env(environ))

    @property
    def resolved_database_url(self) -> str:
        """The database URL with its default filled in."""
        return self.database_url or f"sqlite:///{self.home.absolute() / 'eyrie.db'}"

    @property
    def is_loopback(self) -> bool:
        """Whether the bind address is reachable from this machine only."""
        return is_loopback_host(self.host)

    def job_dir(self, job_id: str) -> Path:
        return self.home.absolute() / "jobs" / job_id

    def stage_dir(self, job_id: str, stage: str, key: str = "") -> Path:
        stages = self.job_dir(job_id) / "stages" / stage
        return stages / key if key else stages

    def required_token(self) -> str | None:
        """The bearer token that requests must send; None when the bind address is loopback and no token is set.

        For another bind address without a configured token, one is generated and stored in `<home>/token`.
        """
        if self.token is not None or self.is_loopback:
            return self.token
        path = self.home / "token"
        if not path.exists():
            _write_once(path, secrets.token_urlsafe(32))
        return path.read_text().strip()

    @property
    def prices(self) -> dict[str, float]:
        """`gpu_hour_prices` by label."""
        pairs = (part.partition("=") for part in (self.gpu_hour_prices or "").split(",") if part.strip())
        return {label.strip(): float(price) for label, _, price in pairs}

    def required_secret_keys(self) -> tuple[str, ...]:
        """The Fernet keys for stored secrets: those of the setting, then those in `<home>/secret-key`.

        With SQLite the file is generated if there is neither. Servers that share another database need the same key, so
        none is generated there, and there may be none. Raises InvalidInput for a file that is not one of keys.
        """
        path = self.home / "secret-key"
        if self.secret_key is None and self.resolved_database_url.startswith("sqlite") and not path.exists():
            _write_once(path, base64.urlsafe_b64encode(secrets.token_bytes(32)).decode())
        try:
            stored = path.read_text() if path.exists() else None
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error.strerror}", "correct its owner and mode") from None
        if stored is not None and not _FERNET_KEYS.fullmatch(stored):
            raise InvalidInput(f"the content of {path} {_NOT_KEYS}", "restore the file from a backup")
        return tuple(key.strip() for text in (self.secret_key, stored) if text is not None for key in text.split(","))


def _write_once(path: Path, text: str) -> None:
    """Create a file that its owner alone may read, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of two processes that start together one link succeeds, and both read a file that is whole: one created in place
    # would be empty until it is written, and an empty token would admit anybody.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-") as file:
        file.write(text + "\n")
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
