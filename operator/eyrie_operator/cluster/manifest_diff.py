"""Compares a manifest with the object in the cluster, so that nothing is written when nothing has changed. Pure.

Two checks are needed. The digest of the last applied manifest, in an annotation, detects changes of the manifest,
removed fields included. Comparing the manifest with the object detects changes of our fields by others. Fields added by
the server or by others are ignored; quantities are compared as numbers, since the server writes `1000m` as `1`.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from eyrie_operator.manifests.deployment import GROUP, Manifest, digest

APPLIED = f"{GROUP}/applied"
"""Annotation: digest of the applied manifest."""

_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_UNITS = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
          "T": Decimal(10**12), "P": Decimal(10**15), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
          "Ti": Decimal(2**40), "Pi": Decimal(2**50)}


def with_digest(manifest: Manifest) -> Manifest:
    """The manifest with its own digest as an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def is_applied(manifest: Manifest, found: Mapping[str, Any]) -> bool:
    """Whether this with_digest manifest was the last one applied to the object."""
    annotations = found["metadata"].get("annotations") or {}
    return bool(annotations.get(APPLIED) == manifest["metadata"]["annotations"][APPLIED])


def difference(wanted: Any, found: Any, path: str = "") -> str | None:
    """Path of the first field that differs from the manifest; None when none does. Additional fields are ignored."""
    if isinstance(wanted, Mapping):
        have = found if isinstance(found, Mapping) else {}
        return _first(difference(value, have.get(key), f"{path}.{key}") for key, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _list_difference(wanted, found if isinstance(found, Sequence) else (), path)
    return None if wanted == found or _same_amount(wanted, found) or (not wanted and found is None) else path


def _list_difference(wanted: Sequence[Any], found: Sequence[Any], path: str) -> str | None:
    if all(isinstance(item, Mapping) and "name" in item for item in wanted):  # others may have added items
        named = {one["name"]: one for one in found if isinstance(one, Mapping) and "name" in one}
        return _first(difference(one, named.get(one["name"]), f"{path}[{one['name']}]") for one in wanted)
    if len(wanted) != len(found):
        return path
    return _first(difference(one, other, f"{path}[{at}]")
                  for at, (one, other) in enumerate(zip(wanted, found, strict=True)))


def _first(found: Any) -> str | None:
    return next((one for one in found if one is not None), None)


def _same_amount(wanted: Any, found: Any) -> bool:
    amounts = [_amount(one) for one in (wanted, found)]
    return amounts[0] is not None and amounts[0] == amounts[1]


def _amount(value: Any) -> Decimal | None:
    read = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    return None if read is None else Decimal(read[1]) * _UNITS[read[2] or ""]
