"""What object stores charge, for plans: storage, requests and traffic. Pure.

Published list prices in dollars, without discounts, free tiers and taxes; read them again before you rely on them. An
administrator sets others (EYRIE_STORE_PRICES). Traffic within a provider's region is free at all three: what is read
from elsewhere costs only where `traffic` is set.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

_TB, _GIB = 1e12, 2**30

_FIELDS = ("storage", "put", "get", "traffic")


@dataclass(frozen=True)
class StorePrices:
    """Of one store, in one currency."""

    name: str
    storage: float
    """Of 10^12 bytes for a month."""

    put: float
    """Of a million requests that write or list."""

    get: float
    """Of a million requests that read."""

    source: str
    traffic: float = 0.0
    """Of 10^12 bytes that are read."""


# Amazon and Google bill a GB of 2^30 bytes, Cloudflare one of 10^9. Of prices in steps the first.
STORES: Mapping[str, StorePrices] = {row.name: row for row in (
    StorePrices("aws-s3", 0.023 * _TB / _GIB, 5.0, 0.40,
                "list prices of S3 Standard in us-east-1, https://aws.amazon.com/s3/pricing/"),
    StorePrices("gcs", 0.020 * _TB / _GIB, 5.0, 0.40,
                "list prices of Standard storage in us-central1, https://cloud.google.com/storage/pricing"),
    StorePrices("r2", 15.0, 4.50, 0.36,
                "list prices of Standard storage, https://developers.cloudflare.com/r2/pricing/"),
)}
_HOSTS = (("amazonaws.com", "aws-s3"), ("storage.googleapis.com", "gcs"), ("r2.cloudflarestorage.com", "r2"))


def store_prices(text: str | None, endpoint_url: str | None) -> StorePrices | None:
    """The prices of a store; None where nothing is known of it.

    text           of EYRIE_STORE_PRICES: the name of a row, prices that replace its own, or both; None: the row of the
                   endpoint's host
    endpoint_url   None: AWS

    Raises ValueError for a text that names no row, or not every price.
    """
    host = re.sub(r"^https?://|[:/].*$", "", endpoint_url or "https://s3.amazonaws.com")
    row = STORES.get(next((name for suffix, name in _HOSTS if host.endswith(suffix)), ""))
    prices: dict[str, float] = {}
    for part in (piece.strip() for piece in (text or "").split(",")):
        field, is_price, number = part.partition("=")
        if is_price and field in _FIELDS and re.fullmatch(r"\d+(\.\d+)?", number):
            prices[field] = float(number)
        elif part in STORES:
            row = STORES[part]
        elif part:
            raise ValueError(f"{part!r} is neither a known store ({', '.join(STORES)}) nor a price like storage=20 "
                             f"({', '.join(_FIELDS)})")
    if not prices:
        return row
    if row is None:
        missing = [field for field in _FIELDS[:3] if field not in prices]
        if missing:
            raise ValueError(f"{', '.join(missing)} is missing, and no known store is named")
        return StorePrices("of EYRIE_STORE_PRICES", source="EYRIE_STORE_PRICES", **prices)
    changed = StorePrices(row.name, prices.get("storage", row.storage), prices.get("put", row.put),
                          prices.get("get", row.get), "", prices.get("traffic", row.traffic))
    return replace(changed, source=f"{row.source}; {', '.join(prices)} of EYRIE_STORE_PRICES")
