"""What tests of the interface share: one small service over the demo model a file, and the app over it."""

from collections.abc import Iterator

import pytest
from small_service import SmallService, demo_model, open_service


@pytest.fixture(scope="module")
def service() -> Iterator[SmallService]:
    made = open_service()
    yield made
    made.close()


@pytest.fixture(scope="module")
def app(service: SmallService):
    from pshard.server.routes.make_app import make_app  # with the extra serve alone

    return make_app(service, demo_model())
