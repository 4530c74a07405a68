"""Values, names and bytes that well-behaved clients do not send, drawn from a seeded generator.

JSON is written here and not by `json.dumps`, which cannot write most of it: numbers above 1e308, numbers of thousands
of digits, lone surrogates, bytes that are not UTF-8, brackets nested deeper than parsers recurse, members that occur
twice.
"""

import json
import random
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote


class Raw(str):
    """Text that is JSON already, or is to be sent as if it were."""


STRINGS = ("", " ", "\x00", "a\x00b", "..", "../../../../etc/passwd", "/", "//", "\\", "a" * 4000, "x" * 70_000,
           "\ufeff",
           "\u202e", "e\u0301", "\U0001f600" * 100, "NaN", "null", "-1", "1e309", "$(HOME)", "${HOME}", "{{7*7}}",
           "%00", "%s%n", "'; DROP TABLE jobs; --", "<script>", "http://[", "http://169.254.169.254/", "file:///etc/passwd",
           "s3://", "\r\nX-Injected: 1", "\t", "default", "quickstart", "0001-01-01T00:00:00Z", "9" * 400)
NUMBERS = (Raw("1e309"), Raw("-1e309"), Raw("1e400"), Raw("9223372036854775807"), Raw("9223372036854775808"),
           Raw("-9223372036854775809"), Raw("18446744073709551616"), Raw("9" * 400), Raw("1" * 5000), Raw("0.1e-400"),
           Raw("-0"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), 0, -1, 1.5, 10**18, 1e308, 5e-324)
BROKEN = (Raw('"\\ud800"'), Raw('"\\udc00\\ud800"'), Raw('"\\u0000"'), Raw("[" * 100 + "]" * 100),
          Raw("[" * 5000 + "]" * 5000), Raw("[" * 100_000), Raw('{"a":' * 3000 + "1" + "}" * 3000),
          Raw('{"a":1,"a":2}'), Raw(""), Raw("{"), Raw('"'), Raw("tru"), Raw('{"":{}}'))
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [None], [[]], {"": ""}, ["a"] * 3000,
                           {f"label-{number}": "v" for number in range(3000)})
NAMES = ("\x00", "\u0000id", "__proto__", "a" * 4000, "", "model_config", "\ud800", "labels", "target")
HEADERS: dict[str, tuple[bytes, ...]] = {
    "Host": (b"[", b"", b"[::1", b"evil.example", b"a" * 5000, b"127.0.0.1:99999999", b"\xff", b"localhost:x", b"::1"),
    "Content-Type": (b"text/plain", b"", b"application/json; charset=utf-16", b"application/x-www-form-urlencoded",
                     b"\xff", b"multipart/form-data; boundary=", b"application/json;" + b"a" * 3000),
    "Accept": (b"text/event-stream", b"*/*;q=1e309", b"\xff", b"application/json"),
    "Eyrie-Project": (b"..", b"", b"\xff\xfe", b"a" * 5000, b"default", b"never", b"%00", b"A B"),
    "Idempotency-Key": (b"", b"k" * 300, b"\xff", b"\x7f", b"same", b"\xed\xa0\x80"),
    "Last-Event-ID": (b"-1", b"9223372036854775808", b"1e309", b"x", b"9" * 5000, b"\xff"),
    "Authorization": (b"Bearer", b"Bearer ", b"Bearer \xff", b"Basic Og==", b"Bearer " + b"x" * 5000, b"eyk_"),
    "Origin": (b"null", b"http://evil.example", b"http://[", b"\xff", b"file://"),
    "Range": (b"bytes=-1", b"bytes=9223372036854775808-", b"bytes=5-1,1-2", b"x", b"bytes=" + b"0-1," * 500),
    "If-None-Match": (b"*", b"\xff", b'"' * 900), "X-Request-Id": (b"\xff", b"a" * 4000, b"{}"),
    "Traceparent": (b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-00", b"\xff"),
    "Transfer-Encoding": (b"gzip", b"identity"),
    "Cookie": (b"a" * 7000, b"\xff=\xff"), "Expect": (b"100-continue", b"x"), "Upgrade": (b"h2c", b"websocket"),
}


def evil_value(rng: random.Random) -> Any:
    """One value for a JSON document."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(NUMBERS)
    if kind < 0.7:
        return rng.choice(STRINGS)
    return rng.choice(BROKEN) if kind < 0.85 else rng.choice(OTHERS)


def evil_segment(rng: random.Random) -> str:
    """A path segment or query value, percent-encoded, not always correctly."""
    kind = rng.random()
    if kind < 0.6:
        return quote(rng.choice(STRINGS).encode(), safe="" if rng.random() < 0.8 else "/.:")[:8000]
    if kind < 0.8:
        return str(rng.choice([one for one in NUMBERS if len(str(one)) < 500]))
    return rng.choice(("%", "%zz", "%00", "%ed%a0%80", "%ff%fe", "%2e%2e%2f" * 10, ";", "a;b=c",
                       "%0d%0aX-Injected:1", "+"))


def mutated(document: Any, rng: random.Random, evils: int = 1) -> Any:
    """The document with a value replaced, removed or added, that often."""
    for _ in range(evils):
        document = _mutated_once(document, rng)
    return document


def _mutated_once(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and not isinstance(value, Raw) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.08:
            return {name: one for name, one in value.items() if name != key}
        if kind < 0.16:
            return value | {rng.choice(NAMES): evil_value(rng)}
        return value | {key: _mutated_once(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], _mutated_once(value[at], rng), *value[at + 1:]]
    return evil_value(rng)


def dump(value: Any) -> bytes:
    """The document as bytes; lone surrogates are escaped, `Raw` is written as it is."""
    return _text(value).encode("utf-8", "surrogatepass")


def _text(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_text(one) for one in value) + "]"
    return json.dumps(value)


def evil_bytes(body: bytes, rng: random.Random) -> bytes:
    """The body cut, with a byte changed, or replaced."""
    kind = rng.randrange(5)
    if kind == 0:
        return body[:rng.randrange(len(body) + 1)]
    if kind == 1 and body:
        at = rng.randrange(len(body))
        return body[:at] + bytes([rng.randrange(256)]) + body[at + 1:]
    fixed: Sequence[bytes] = (b"", b"\xff\xfe", b"\xef\xbb\xbf" + body, body.decode("latin-1").encode("utf-16"),
                              body + body, b"null", b"[]", b'"x"', b"0", b"\x00" * 1000)
    return rng.choice(fixed)
