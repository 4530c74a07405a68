"""Renderings are made once per session and read by many tests."""

import pytest

from tests.helm.rendering import SETS, Rendered, render

_made: dict[str, Rendered] = {}


@pytest.fixture(params=list(SETS))
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """One of the value sets, on the newest Kubernetes."""
    if request.param not in _made:
        values, apis = SETS[request.param]
        _made[request.param] = render(values, apis=apis)
    return _made[request.param]
