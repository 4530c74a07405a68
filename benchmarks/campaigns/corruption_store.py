"""The objects of an S3 store that is the jobs' work area: part of `benchmarks.campaigns.corruption`.

The finished job of `corruption_home` is uploaded to rclone's S3 server. One object is damaged: written again with
other bytes and the metadata of before. Then a pod with an empty disk downloads the inputs of a stage, or the API server
reads the file. Rules: an error names the object, or what was read is what the job wrote.
"""

import hashlib
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import boto3
from pydantic import TypeAdapter

from benchmarks.campaigns.corruption_damage import Damage, Verdict, damage_bytes
from benchmarks.campaigns.corruption_home import Home
from eyrie_api.artifacts import MANIFEST
from eyrie_api.artifacts.directories import upload_dir
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.contract.stages import StageSpec
from eyrie_api.errors import EyrieError
from eyrie_api.http.job_files import JobFiles
from eyrie_api.settings import Settings
from eyrie_pipelines.work_area import WorkArea
from tests.servers.processes import Session, private_dir
from tests.servers.s3 import start_rclone

_BUCKET = "corruption"
_SERVED = "the API server"
_SPEC: TypeAdapter[StageSpec] = TypeAdapter(StageSpec)


@dataclass(frozen=True)
class Read:
    """One object, and the stage whose pod reads it."""

    reader: str
    key: str

    def __str__(self) -> str:
        return f"{self.key}, read by {self.reader}"


class StoreObjects:
    """A finished job in a store. Raises Unavailable without rclone."""

    def __init__(self, home: Home) -> None:
        self._home, self._session = home, Session()
        self._older = home.path / "older object"

    def build(self) -> None:
        """Upload the job."""
        server, self._server = start_rclone(private_dir())
        secret = self._home.path / "secret"
        secret.mkdir(exist_ok=True)
        (secret / "access_key").write_text(server.access_key)
        (secret / "secret_key").write_text(server.secret_key)
        self._client = boto3.client("s3", endpoint_url=server.endpoint_url, region_name="us-east-1",
                                    aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key)
        self._client.create_bucket(Bucket=_BUCKET)
        self._store = open_store(options=StoreOptions(url=f"s3://{_BUCKET}/eyrie", endpoint_url=server.endpoint_url,
                                                      credentials_dir=secret))
        self._job = f"jobs/{self._home.ended}"
        for directory in self._stages():
            upload_dir(self._store, self._home.kept / self._job / "stages" / directory,
                       f"{self._job}/stages/{directory}")
        self._store.write(f"{self._job}/job.json", (self._home.kept / self._job / "job.json").read_bytes())

    def files(self) -> list[Read]:
        """Every object with each of its readers."""
        found = []
        for reader in (*self._stages(), _SERVED):
            self._empty_disk()
            self._read(reader)
            read = (path.relative_to(self._home.home).as_posix() for path in self._home.home.rglob("*")
                    if path.is_file() and not path.name.startswith("."))
            found += [Read(reader, key) for key in read if self._store.stat(key) is not None]
        return sorted(found, key=str)

    def damaged(self, file: Read, damage: Damage, rng: random.Random) -> bytes | None:
        """The object's bytes after the damage; an older one is that of another stage with the same name."""
        data, path = self._kept(file.key), self._home.kept / file.key
        others = [one for one in sorted((self._home.kept / "jobs").rglob(path.name)) if one.read_bytes() != data]
        return damage_bytes(data, damage, rng, others[0] if others else None)

    def try_case(self, file: Read, data: bytes) -> Verdict:
        """Damage an object, read it, judge, write it back."""
        place = {"Bucket": _BUCKET, "Key": f"eyrie/{file.key}"}
        whole, metadata = self._kept(file.key), self._client.head_object(**place)["Metadata"]
        self._client.put_object(**place, Body=data, Metadata=metadata)
        try:
            self._empty_disk()
            self._read(file.reader)
        except EyrieError as error:
            path = Path(file.key)
            named = path.name in str(error) or path.parent.name in str(error)
            return ("refused", {}) if named else ("an error names the object", {"message": str(error)})
        finally:
            self._client.put_object(**place, Body=whole, Metadata=metadata)
        wrong = [path.relative_to(self._home.home).as_posix() for path in self._home.home.rglob("*")
                 if path.is_file() and not path.name.startswith(".")
                 and path.read_bytes() != self._kept(path.relative_to(self._home.home).as_posix())]
        return ("damage is not used", {"differ": wrong}) if wrong else ("answered", {})

    def _stages(self) -> list[str]:
        stages = self._home.kept / "jobs" / self._home.ended / "stages"
        return sorted(path.parent.relative_to(stages).as_posix() for path in stages.rglob(MANIFEST))

    def _kept(self, key: str) -> bytes:
        return (self._home.kept / key).read_bytes()

    def _empty_disk(self) -> None:
        shutil.rmtree(self._home.home, ignore_errors=True)

    def _read(self, reader: str) -> None:
        """Download what the reader reads to the same paths; raises EyrieError."""
        home, job = self._home.home, self._job
        if reader == _SERVED:
            files = JobFiles(Settings(home=home), self._store)
            for one in files.manifests(self._home.ended):
                for entry in one.manifest.files:
                    data = b"".join(files.pieces(one, entry))
                    assert "sha256:" + hashlib.sha256(data).hexdigest() == entry.sha256
                    path = one.directory / entry.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
            return
        spec = _SPEC.validate_json((self._home.kept / job / "stages" / reader / "spec.json").read_bytes())
        directory = home / job / "stages" / reader
        area = WorkArea(home / job, self._store, uploads=False)
        area.begin()
        # The stage itself is unfinished: its manifest is the one object that is away.
        manifest = f"{job}/stages/{reader}/{MANIFEST}"
        text = self._store.read(manifest)
        self._store.delete(manifest)
        try:
            with area.stage(spec, directory):
                shutil.rmtree(directory, ignore_errors=True)  # what it left: its own program reads that
        finally:
            self._store.write(manifest, text)

    def close(self) -> None:
        """Stop the server."""
        self._session.end()
