"""Which of several endpoints is asked next. Pure: the clock's reading is passed in.

The one with the least requests in flight, the same model standing behind all of them. An endpoint that fails is left
alone for a while that doubles with each failure in a row, as long as another one is well; when its rest is over one
request tries it, and the first answer makes it whole again. When all of them rest, the one whose rest ends first is
asked: a request's own retries then set the pace, as they do with a single endpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0

IDS_FIELDS: tuple[str | None, ...] = ("return_token_ids", "return_output_ids_in_sglext", None)
"""How token ids are asked for: vLLM and Eyrie, SGLang, nobody."""


@dataclass
class Route:
    """One endpoint as it stands."""

    url: str
    in_flight: int = 0
    answered: int = 0
    failures: int = 0
    """In a row."""

    unavailable_until: float = 0.0
    ids_place: int = 0
    """Into IDS_FIELDS: what this endpoint is asked for ids with."""

    @property
    def ids_field(self) -> str | None:
        """The field that asks this endpoint for token ids, if it knows one."""
        return IDS_FIELDS[self.ids_place]

    def reject_ids_field(self, ids_field: str | None) -> None:
        """Ask it otherwise from now on; many requests may learn the same thing at once."""
        if ids_field is not None:
            self.ids_place = max(self.ids_place, IDS_FIELDS.index(ids_field) + 1)


class Routes:
    """Every endpoint of a job."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Route(url) for url in urls]

    def take(self, now: float) -> Route:
        """The endpoint for the next request, which counts as in flight until `answered` or `failed`."""
        well = [route for route in self.all if self._takes(route, now)]
        if well:
            route = min(well, key=lambda route: (route.in_flight, route.answered))
        else:
            route = min(self.all, key=lambda route: (route.unavailable_until, route.in_flight))
        route.in_flight += 1
        return route

    def answered(self, route: Route) -> None:
        """It answered, be it with a refusal of one prompt."""
        route.in_flight -= 1
        route.answered += 1
        route.failures, route.unavailable_until = 0, 0.0

    def failed(self, route: Route, now: float, wish_s: float = 0.0) -> None:
        """It failed, and is left alone; requests that failed together count once.

        wish_s   the pause it asked for itself
        """
        route.in_flight -= 1
        if now >= route.unavailable_until:
            backoff_s = min(FIRST_REST_S * 2.0**min(route.failures, 30), LONGEST_REST_S)
            route.unavailable_until = now + max(wish_s, backoff_s)
            route.failures += 1

    def dropped(self, route: Route) -> None:
        """A request was given up, which says nothing about its endpoint."""
        route.in_flight -= 1

    def has_available(self, now: float) -> bool:
        """Whether a request that has just failed need not wait."""
        return any(self._takes(route, now) for route in self.all)

    @staticmethod
    def _takes(route: Route, now: float) -> bool:
        return route.failures == 0 or (now >= route.unavailable_until and route.in_flight == 0)
