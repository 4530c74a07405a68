"""Empties what a Hopper GPU does not load in a library of CUDA kernels, so that the file compresses well.

The bytes of cubins of other architectures than sm_90 and sm_90a become zeros, and on request those of sm_90 without a
wanted kernel. Headers, host code and sizes stay: what is left equals the published build byte for byte. A kernel
whose cubin was emptied fails when it is launched, not before, since CUDA loads modules lazily
(CUDA_MODULE_LOADING=EAGER would fail at the start).
"""

import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

_FATBIN_MAGIC = 0xBA55ED50


def slim(library: Path, keep: str | None = None) -> str:
    """Empty cubins of the library in place; a line about it. keep: regular expression over demangled kernel names."""
    data = bytearray(library.read_bytes())
    start, size = _section(library, ".nv_fatbin")
    kept = emptied = 0
    for at, length, arch, compressed in [*cubins(data, start, start + size)]:
        if arch == 90 and (keep is None or re.search(keep, _kernels(bytes(data[at:at + length]), compressed))):
            kept += length
        else:
            data[at:at + length] = bytes(length)
            emptied += length
    library.write_bytes(data)
    return f"{library.name}: kept {kept / 1e6:.1f} MB of cubins, emptied {emptied / 1e6:.1f} MB"


def cubins(data: bytes | bytearray, start: int, end: int) -> Iterator[tuple[int, int, int, bool]]:
    """Offset, size, architecture and whether it is compressed, of every cubin in a section of fat binaries."""
    at = start
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != _FATBIN_MAGIC:
            at += 8  # alignment
            continue
        entry, stop = at + header, at + header + size
        while entry < stop:
            head, length = struct.unpack_from("<IQ", data, entry + 4)
            compressed, _, _, _, arch = struct.unpack_from("<IIHHI", data, entry + 16)
            yield entry + head, length, arch, bool(compressed)
            entry += head + length
        at = stop


def _section(library: Path, name: str) -> tuple[int, int]:
    """Offset and size of a section."""
    table = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    found = re.search(rf"\] {re.escape(name)}\s+\S+\s+[0-9a-f]+\s+([0-9a-f]+)\s+([0-9a-f]+)", table)
    if found is None:
        raise SystemExit(f"error: {library} has no section {name}")
    return int(found[1], 16), int(found[2], 16)


def _kernels(blob: bytes, compressed: bool) -> str:
    """Demangled names of a cubin's kernels, one a line."""
    if compressed:
        # The size of the cubin is rounded up with zeros, which end the reader with an error.
        blob = subprocess.run(["zstd", "-dcq"], input=blob, capture_output=True, check=False).stdout
    names = b"\n".join(sorted(set(re.findall(rb"\x00\.text\.(_Z[A-Za-z0-9_]+)", blob))))
    return subprocess.run(["c++filt"], input=names, capture_output=True, check=True).stdout.decode()
