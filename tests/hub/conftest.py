"""A Hub on this machine, in the place of the real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, hub_server


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub's library, which read its settings when it was imported, asks this server and keeps files in tmp_path."""
    import huggingface_hub
    from huggingface_hub import constants

    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        url = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr("pshard.hub.read_range.PAUSE_SECONDS", 0.0)
        for name in ("read_range.CONNECT_SECONDS", "repository.LISTING_SECONDS"):
            monkeypatch.setattr(f"pshard.hub.{name}", 120.0)  # nothing here is late but what a busy machine makes so
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()
