"""Targets, drafters and data of strangers: directories with something evil in one or two of their files.

Each is a valid one (the tiny target of the tests, drafters in published forms, rows of conversations) of which JSON is
mutated as request bodies are (`evil_values`), the header of a safetensors file is, or the bytes of any file are: cut,
changed, emptied, or the file is replaced by what is none (`_NO_FILES`): links, directories, FIFOs, sockets. Data is
named by patterns too.
"""

import gzip
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
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
    for extra in range(rng.choice((0, 0, 0, 1, 3))):
        rng.choice(_NO_FILES)(out / rng.choice((f"{extra}.jsonl", f"{extra}.parquet", f"{extra}.json.gz", f".{extra}")))
    return rng.choice((str(out / name), str(out / name), str(out), f"{out}/../{out.name}/{name}",
                       f"{out}/{evil_pattern(rng, name)}", f"{out}/{evil_pattern(rng, name)}"))


def evil_pattern(rng: random.Random, name: str) -> str:
    """The last part of a path: a pattern that may match `name`, one that matches slowly, or no pattern at all."""
    if rng.random() < 0.3:
        return rng.choice(("*" * 200 + "x", "*a" * 100 + "b", "?" * 300, "[", "[]", "[!]", "[!a-z]*", "[z-a]*", "**",
                           "*\\", "[[:alpha:]]*", "*\n", "{a,b}*", "..", "[.][.]", "*[\u00e9]*", "~*"))
    at = rng.randrange(len(name) + 1)
    return rng.choice((name[:at] + "*", "*" + name[at:], name[:at] + "*" + name[at:], name[:at] + "?" + name[at + 1:],
                       f"[{name[:1]}-z]{name[1:]}", f"*{name[at:]}*", "*.jsonl*", "*", ".*"))


def _linked(to: str) -> Callable[[Path], None]:
    return lambda file: file.symlink_to(to)


def _loop(file: Path) -> None:
    other = file.with_name(f"{file.name}.loop")
    other.symlink_to(file)
    file.symlink_to(other)


def _chain(file: Path) -> None:
    """More links in a row than a kernel follows."""
    for number in range(45):
        file.with_name(f"{file.name}.{number}").symlink_to(f"{file.name}.{number + 1}")
    file.symlink_to(f"{file.name}.0")


def _sparse(file: Path) -> None:
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)


def _listening(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:  # its name relative to the directory: a socket's has 107 bytes at most
        before = os.open(".", os.O_RDONLY)
        os.chdir(file.parent)
        try:
            end.bind(file.name)
        finally:
            os.fchdir(before)
            os.close(before)


_NO_FILES: tuple[Callable[[Path], object], ...] = (
    _loop, _chain, _sparse, _listening, Path.mkdir, os.mkfifo, lambda file: file.symlink_to(file.name),
    *map(_linked, ("/dev/zero", "/dev/full", "/dev/random", "/dev/tty", "/proc/self/mem", "/proc/kmsg",
                   "/proc/1/environ", ".", "..", "/", "gone", "gone/gone", "../" * 100, "a" * 255, "\udcff")))
"""What replaces a file: links (in loops, too many, to nothing, to devices, to directories), and what never ends."""


def _mutate(rng: random.Random, file: Path) -> None:
    kind = rng.random()
    if kind < 0.1:
        file.unlink()
        rng.choice(_NO_FILES)(file)
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
