"""A server over the demo model for real clients."""

from collections.abc import Iterator

import pytest
from http_client import serve
from small_service import SmallService, demo_model, open_service

from pshard.server.http.guards import Door
from pshard.server.http.make_app import make_app

KEY = "a-key"


@pytest.fixture(scope="module")
def service() -> Iterator[SmallService]:
    made = open_service()
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(service: SmallService) -> Iterator[str]:
    with serve(make_app(service, demo_model(), door=Door(keys=(KEY,)))) as found:
        yield found
