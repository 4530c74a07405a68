"""Durations and sizes as people read them, in the terminal and on pages, and as Kubernetes writes them. Pure."""

import re
from decimal import Decimal

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_FACTORS = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
            "T": Decimal(10**12), "P": Decimal(10**15), "Ki": Decimal(2**10), "Mi": Decimal(2**20),
            "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50)}


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 12s, 3m05s, 2h10m, 4d3h."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def amount(value: object) -> Decimal | None:
    """Of a quantity of Kubernetes (`500m`, `4`, `64Gi`); None for anything else."""
    read = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    return None if read is None else Decimal(read[1]) * _FACTORS[read[2] or ""]


def size(num_bytes: float) -> str:
    """Bytes in binary units."""
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("the last unit always returns")
