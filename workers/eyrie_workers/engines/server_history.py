"""What became of a stage's servers over all its runs: how often one was replaced, and which version answered.

A stage that is killed and run again reports the restarts of its earlier runs too, and the version of the servers it
measured even where everything is in its ledgers and no server starts again.
"""

from pathlib import Path

from eyrie_api.v1alpha1.model import Digest, Frozen
from eyrie_workers.jsonl_ledger import JsonlLedger

HISTORY = "servers.jsonl"


class ServerRecord(Frozen):
    """One line."""

    variant: str
    version: str = ""
    """That its server reported; empty where the line is of an end."""

    ended: str = ""
    """Why the server ended while it was used, before another replaced it."""


class ServerHistory:
    """The history in the directory of a stage; that of another spec is set aside."""

    def __init__(self, out_dir: Path, spec_digest: Digest) -> None:
        """Open or begin it."""
        self._ledger = JsonlLedger(out_dir / HISTORY, ServerRecord, spec_digest)

    @property
    def restarts(self) -> int:
        """Servers that were replaced after they had ended."""
        return sum(bool(record.ended) for record in self._ledger.entries)

    @property
    def version(self) -> str:
        """Of the servers; several, where it changed between runs; empty before one was asked."""
        return ", ".join(dict.fromkeys(record.version for record in self._ledger.entries if record.version))

    def note_end(self, variant: str, message: str) -> None:
        """Record that the server of a variant ended and is replaced."""
        self._ledger.append(ServerRecord(variant=variant, ended=message or "without a message"))

    def note_version(self, variant: str, version: str) -> None:
        """Record the version that a server reports, unless it is known."""
        if version not in self.version.split(", "):
            self._ledger.append(ServerRecord(variant=variant, version=version))
