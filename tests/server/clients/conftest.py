"""A server over the demo model for real clients: jobs one after the other, or through the scheduler."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from http_client import serve
from served import EngineLoader
from small_service import SmallService, demo_model

from pshard.server.http.guards import Door
from pshard.server.routes.make_app import make_app
from pshard.server.scheduling.promises import Promises
from pshard.server.thread.engine_thread import EngineThread

KEY = "a-key"


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    """Imported where it is used: collecting tests would take seconds longer in each process."""
    return pytest.importorskip("openai", reason="openai is not installed")


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    return pytest.importorskip("anthropic", reason="anthropic is not installed")


@pytest.fixture(scope="module")
def small_url(service: SmallService) -> Iterator[str]:
    with serve(make_app(service, demo_model(), door=Door(keys=(KEY,)))) as found:
        yield found


@pytest.fixture(scope="module")
def scheduled_url() -> Iterator[str]:
    thread = EngineThread(EngineLoader(), Promises())
    thread.start()
    with serve(make_app(thread, demo_model(), door=Door(keys=(KEY,)))) as found:
        while not thread.snapshot().ready:
            assert not thread.join(0.01), thread.error
        yield found
    thread.drain(0)
    assert thread.join(20) and thread.error is None


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """Tests with `either_service` run over both."""
    return request.getfixturevalue(getattr(request, "param", "small_url"))
