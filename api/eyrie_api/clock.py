"""The clock, as an argument. Everything that stamps or compares times takes a `Clock`, so that tests own time."""

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The real one."""
    return datetime.now(UTC)
