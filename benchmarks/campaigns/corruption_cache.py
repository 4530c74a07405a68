"""The model cache of a cluster: part of `benchmarks.campaigns.corruption`.

`prefetch` fills a cache from a double of the Hub. One of its files is damaged, and `prefetch` runs again, as before
each job and each engine. Rules: it ends with the Hub's bytes in every file of the snapshot and with a record that
readers accept, or with an error that names the file.

Not covered: a file whose bytes changed and whose size and time did not, as by a disk that returns other bits. It counts
as verified, since hashing 64 GB before each stage would take minutes.
"""

import hashlib
import os
import random
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.campaigns.corruption_damage import Damage, Verdict, damage_bytes
from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.targets.model_cache import cached_snapshot, recorded_digests
from tests.servers.hub import ServedHub, served_hub

_TARGET = TargetSpec(model="org/model")
_LIMIT_S = 300.0


class ModelCache:
    """A cache with one target."""

    def __init__(self, path: Path) -> None:
        self.cache, self.kept, self._stack = path / "cache", path / "kept", ExitStack()
        self._hub: ServedHub

    def build(self) -> None:
        """Fill it."""
        shutil.rmtree(self.cache.parent, ignore_errors=True)
        self.cache.mkdir(parents=True)
        rng = random.Random(0)
        self._hub = self._stack.enter_context(served_hub({
            "config.json": b'{"architectures": ["LlamaForCausalLM"]}', "tokenizer.json": b'{"version": "1.0"}',
            "model.safetensors": rng.randbytes(300_000)}))
        code, said = self._fill()
        assert code == 0, said
        shutil.copytree(self.cache, self.kept, symlinks=True)

    def files(self) -> list[str]:
        """All of it but locks."""
        return sorted(path.relative_to(self.kept).as_posix() for path in self.kept.rglob("*")
                      if path.is_file() and not path.is_symlink() and path.stat().st_size
                      and not path.name.endswith("lock"))

    def damaged(self, file: str, damage: Damage, rng: random.Random) -> bytes | None:
        """A file's bytes after the damage; an older one is another file of the cache."""
        path = self.kept / file
        return damage_bytes(path.read_bytes(), damage, rng,
                            next((one for one in sorted(path.parent.iterdir()) if one.name != path.name), None))

    def try_case(self, file: str, data: bytes) -> Verdict:
        """Damage, fill, judge."""
        shutil.rmtree(self.cache)
        shutil.copytree(self.kept, self.cache, symlinks=True)
        (self.cache / file).write_bytes(data)
        code, said = self._fill()
        if code != 0:
            named = Path(file).name in said and "Traceback" not in said
            return ("refused", {}) if named else ("an error names the file", {"code": code, "output": said[-1500:]})
        snapshot = cached_snapshot(self.cache, _TARGET)
        if snapshot is None:
            return "a filled cache has the target", {"output": said[-1500:]}
        digests = {name: "sha256:" + hashlib.sha256(bytes).hexdigest() for name, bytes in self._hub.files.items()}
        wrong = [name for name, bytes in self._hub.files.items() if (snapshot / name).read_bytes() != bytes]
        if wrong or recorded_digests(snapshot) != digests:
            return "damage is not used", {"differ": wrong, "recorded": recorded_digests(snapshot)}
        return "made again", {}

    def _fill(self) -> tuple[int, str]:
        environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
        environment |= {"HF_ENDPOINT": self._hub.url, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run([sys.executable, "-m", "eyrie_workers.targets.prefetch", "--cache", str(self.cache),
                               "--model", _TARGET.model], capture_output=True, text=True, check=False,
                              timeout=_LIMIT_S, env=environment)
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        """Stop the Hub."""
        self._stack.close()
