"""Targets, drafters and data of strangers: directories with something evil in one or two of their files.

Each is a valid one (the tiny target of the tests, drafters in published forms, rows of conversations) of which JSON is
mutated as request bodies are (`evil_values`), the header of a safetensors file is, or the bytes of any file are: cut,
changed, emptied, replaced by a directory, by a link to itself or by one to a device.
"""

import gzip
import json
import os
import random
import shutil
from pathlib import Path

from benchmarks.campaigns.evil_values import dump, evil_bytes, mutated
from tests.workers.drafters import published_forms

_ROW = {"messages": [{"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "hi"}], "tools": [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]}


def mutate_target(rng: random.Random, valid: Path, out: Path) -> None:
    """A copy of the target `valid` with one or two of its files mutated."""
    shutil.copytree(valid, out)
    if rng.random() < 0.1:  # weights in shards
        names = json.loads(_header(out / "model.safetensors")[0])
        index = {"metadata": {"total_size": 1}, "weight_map": {
            name: "model.safetensors" for name in names if name != "__metadata__"}}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in rng.sample(sorted(path for path in out.iterdir() if path.is_file()), rng.choice((1, 1, 1, 2))):
        _mutate(rng, file)


def mutate_drafter(rng: random.Random, out: Path) -> str:
    """A drafter in a published form, for a target of `published_forms.TARGET`, one of its files mutated; returns its
    family."""
    program, family = rng.choice(list(published_forms.READ.values()))
    program().write(out)
    files = sorted(out.iterdir())
    _mutate(rng, rng.choice((files[0], files[0], *files)))  # config.json is the first
    return family


def mutate_data(rng: random.Random, out: Path) -> str:
    """Some data in `out`; returns the path that names it, a pattern at times."""
    out.mkdir()
    name = rng.choice(("rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.parquet", "rows.jsonl.zst"))
    rows = [dump(mutated(_ROW, rng) if rng.random() < 0.7 else _ROW) for _ in range(rng.choice((1, 5, 80)))]
    body = b"\n".join(rows) if rng.random() < 0.8 else b"[" + b",".join(rows) + b"]"
    body = evil_bytes(body, rng) if rng.random() < 0.2 else body
    (out / name).write_bytes(gzip.compress(body) if name.endswith(".gz") and rng.random() < 0.8 else body)
    if rng.random() < 0.1:
        (out / "loop.jsonl").symlink_to(out / "loop.jsonl")
    return rng.choice((str(out / name), str(out / name), str(out), f"{out}/[a-z]*.jsonl*", f"{out}/*", f"{out}/[",
                       f"{out}/../{out.name}/{name}", f"{out}/{'?' * 300}"))


def _mutate(rng: random.Random, file: Path) -> None:
    kind = rng.random()
    if kind < 0.05:
        file.unlink()
        rng.choice((lambda: file.symlink_to(file), lambda: file.symlink_to("/dev/zero"), file.mkdir,
                    lambda: os.mkfifo(file)))()
    elif kind < 0.2:
        file.write_bytes(evil_bytes(file.read_bytes(), rng))
    elif file.suffix == ".json":
        file.write_bytes(dump(mutated(json.loads(file.read_bytes()), rng, rng.choice((1, 1, 2, 4)))))
    elif file.suffix == ".safetensors":
        header, rest = _header(file)
        changed = dump(mutated(json.loads(header), rng, rng.choice((1, 1, 2))))
        length = len(changed) if rng.random() < 0.9 else rng.choice((0, 1, len(changed) + 1, 2**40, 2**64 - 1))
        file.write_bytes(length.to_bytes(8, "little") + changed + rest)
    else:
        file.write_bytes(evil_bytes(file.read_bytes(), rng))


def _header(file: Path) -> tuple[bytes, bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end], content[end:]
