"""Load balancing over several endpoints of the same model. Pure: the time is passed in.

A request goes to the endpoint with the fewest requests in flight. An endpoint that fails is unavailable for a backoff
that doubles with each consecutive failure, as long as another one is available; after the backoff one request probes
it, and the first answer makes it available again. When all are unavailable, the one whose backoff ends first is used:
the retries of a request then set the pace, as with a single endpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0

IDS_FIELDS: tuple[str | None, ...] = ("return_token_ids", "return_output_ids_in_sglext", None)
"""Request fields that ask for token ids: vLLM and Eyrie; SGLang; None where a server has no such field."""


@dataclass
class Route:
    """The state of one endpoint."""

    url: str
    in_flight: int = 0
    answered: int = 0
    failures: int = 0
    """Consecutive failures."""

    unavailable_until: float = 0.0
    ids_field_index: int = 0
    """Index into IDS_FIELDS of the field sent to this endpoint."""

    @property
    def ids_field(self) -> str | None:
        """The field that asks this endpoint for token ids, if it accepts one."""
        return IDS_FIELDS[self.ids_field_index]

    def reject_ids_field(self, ids_field: str | None) -> None:
        """Use the next field from now on; concurrent requests may report the same field."""
        if ids_field is not None:
            self.ids_field_index = max(self.ids_field_index, IDS_FIELDS.index(ids_field) + 1)


class Routes:
    """All endpoints of a job."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Route(url) for url in urls]

    def take(self, now: float) -> Route:
        """The endpoint for the next request, which counts as in flight until `answered` or `failed`."""
        available = [route for route in self.all if self._is_available(route, now)]
        if available:
            route = min(available, key=lambda route: (route.in_flight, route.answered))
        else:
            route = min(self.all, key=lambda route: (route.unavailable_until, route.in_flight))
        route.in_flight += 1
        return route

    def answered(self, route: Route) -> None:
        """The endpoint answered; an error about one prompt counts as an answer."""
        route.in_flight -= 1
        route.answered += 1
        route.failures, route.unavailable_until = 0, 0.0

    def failed(self, route: Route, now: float, retry_after_s: float = 0.0) -> None:
        """The endpoint failed and becomes unavailable; requests that failed during one backoff count once.

        retry_after_s   the pause that the endpoint asked for
        """
        route.in_flight -= 1
        if now >= route.unavailable_until:
            backoff_s = min(FIRST_BACKOFF_S * 2.0**min(route.failures, 30), MAX_BACKOFF_S)
            route.unavailable_until = now + max(retry_after_s, backoff_s)
            route.failures += 1

    def dropped(self, route: Route) -> None:
        """A request was cancelled; its endpoint's state does not change."""
        route.in_flight -= 1

    def has_available(self, now: float) -> bool:
        """Whether a failed request can be retried at once on another endpoint."""
        return any(self._is_available(route, now) for route in self.all)

    @staticmethod
    def _is_available(route: Route, now: float) -> bool:
        # After a backoff a single request probes the endpoint: none may be in flight.
        return route.failures == 0 or (now >= route.unavailable_until and route.in_flight == 0)
