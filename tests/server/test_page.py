"""The page at /: what it says of a snapshot, to whom, and only while somebody looks."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from page_server import NASTY, LookedAt, make_snapshot

from pshard.server.page.draw_steps import (
    busy_share,
    draw_timeline,
    gaps_of,
    join_short,
    keep_longest,
    rates_of,
    recent_steps,
)
from pshard.server.page.page_routes import ASSETS
from pshard.server.page.show_parts import quantile_of, show_parts
from pshard.server.snapshot import Histogram, StepSeen


def open_client(service: Any, key: str = "", keyed: bool = False) -> Any:
    """A client of the page's routes; `key`: who the server's guard says that it is."""
    pytest.importorskip("httpx", reason="httpx is not installed: starlette's test client needs it")
    pytest.importorskip("starlette", reason="starlette is not installed; pip install 'pshard[serve]'")
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    from pshard.server.page.page_routes import page_routes

    app = Starlette(routes=page_routes(service, "demo <1>", keyed))

    async def named(scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})["key"] = key
        await app(scope, receive, send)

    return TestClient(named)


def test_the_page_is_whole_without_scripts_and_lets_nothing_else_in() -> None:
    answer = open_client(LookedAt()).get("/")
    page, policy = answer.text, answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "demo &lt;1&gt;" in page and "<1>" not in page
    for said in (
        "37 of 128",
        "2,048 of 16,384",
        "200 used, 100 cached",
        "151.2",
        "promised are 200 ms",
        "120.0 tokens",
    ):
        assert said in page
    assert "layers streamed" in page and NASTY not in page and "&lt;img src=x" in page
    assert (
        policy.startswith("default-src 'none'") and "unsafe" not in policy and "//" not in policy.replace("data:", "")
    )
    assert " style=" not in page and " onclick=" not in page and "<script>" not in page and "http:" not in page
    assert page.count('role="img" aria-label="') == 4 and 'http-equiv="refresh"' in page
    assert answer.headers["cache-control"] == "no-store" and answer.headers["x-content-type-options"] == "nosniff"
    for id in show_parts(make_snapshot()):
        assert page.count(f'id="{id}"') == 1


def test_script_and_style_are_served_by_the_server_itself() -> None:
    client = open_client(LookedAt())
    for path, kind in ASSETS.items():
        answer = client.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind) and len(answer.text) > 1000
        assert "://" not in answer.text
    assert client.get("/page/live.html").status_code == 404 and client.post("/").status_code == 405


def test_who_has_no_key_learns_nothing() -> None:
    service = LookedAt()
    page = open_client(service, key="", keyed=True).get("/").text
    assert "wants a key" in page and "151.2" not in page and service.looks == 0
    assert "151.2" in open_client(service, key="key-1", keyed=True).get("/").text


def test_a_server_with_a_key_opens_the_page_and_keeps_its_events() -> None:
    pytest.importorskip("httpx", reason="httpx is not installed: starlette's test client needs it")
    pytest.importorskip("starlette", reason="starlette is not installed; pip install 'pshard[serve]'")
    from starlette.testclient import TestClient

    from pshard.commands.everyday.cli_serve import make_parser, read_app
    from pshard.server.snapshot import ServedModel

    app = read_app(make_parser().parse_args(["--api-key", "k"]))
    model = ServedModel("demo <1>", 1, 512, 512, 300, None, None)
    client = TestClient(app(LookedAt(state="draining"), model), base_url="http://127.0.0.1:8080")  # type: ignore[arg-type]
    for path in ("/", "/page/live.js", "/page/live.css"):
        answer = client.get(path)
        assert answer.status_code == 200 and "151.2" not in answer.text
    assert client.get("/events").status_code == 401
    known = {"Authorization": "Bearer k"}
    assert "151.2" in client.get("/", headers=known).text and "151.2" in client.get("/events", headers=known).text


def test_nobody_looks_when_nobody_watches_and_watchers_share_looks() -> None:
    from pshard.server.page.look import Watch

    async def watch() -> None:
        service = LookedAt()
        watch = Watch(service, period=0.3)  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert service.looks == 0
        streams = [watch.stream() for _ in range(5)]
        first = [await anext(stream) for stream in streams]
        assert service.looks == 1 and watch.watchers == 5
        for event in first:
            assert event.startswith("event: parts\ndata: {") and event.endswith("}\n\n")
        second = json.loads((await anext(streams[0])).splitlines()[1].removeprefix("data: "))
        assert "timeline" in second and "plan" not in second  # which has not changed
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        looks = service.looks
        await asyncio.sleep(0.05)
        assert watch.watchers == 0 and service.looks == looks

    asyncio.run(watch())


def test_a_server_that_ends_ends_its_events() -> None:
    from pshard.server.page.look import Watch

    async def watch() -> list[str]:
        return [event async for event in Watch(LookedAt(state="draining")).stream()]  # type: ignore[arg-type]

    events = asyncio.run(asyncio.wait_for(watch(), 5))
    assert len(events) == 1 and "draining" in events[0]


def test_too_many_watchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    client = open_client(LookedAt())
    from pshard.server.page import page_routes

    monkeypatch.setattr(page_routes, "MOST_WATCHERS", 0)
    answer = client.get("/events")
    assert answer.status_code == 503 and "too many" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "what",
    [
        {"state": "loading", "plan": None, "steps": (), "running": (), "waiting": (), "reason": NASTY},
        {"steps": (StepSeen(1, 99.0, 0.0, 1, 0, 0),)},
        {"gap_ms": 1e-9, "steps": ()},
    ],
)
def test_a_server_with_nothing_to_show_is_shown_too(what: dict[str, Any]) -> None:
    parts = show_parts(make_snapshot(**what))
    assert all(NASTY not in html and "nan" not in html and "inf" not in html for html in parts.values())
    if what.get("state"):
        assert "loading" in parts["state"] and "bad" in parts["state"] and "No plan" in parts["plan"]


def test_pictures_show_the_last_steps_only() -> None:
    now = make_snapshot(100.0)
    steps = recent_steps(now)
    assert 145 <= len(steps) <= 151 and steps[-1].number == 999
    picture = draw_timeline(now)
    assert (
        picture.count("M") == 3 * len(steps) and "37 with prompts; busy in them: link 90%, accelerator 40%" in picture
    )
    assert busy_share(replace(steps[0], busy=()), "link") is None and busy_share(steps[0], "cpu") == 0
    many = replace(now, steps=tuple(StepSeen(n, 99 + n / 1e4, 1e-4, 1, 1, 0) for n in range(9000)))
    assert len(draw_timeline(many)) < 40_000


def test_short_steps_fill_the_pictures_and_none_of_them_is_lost() -> None:
    short = tuple(
        StepSeen(n, 85 + n / 200, 0.004, 8, 3, 2 if n == 1500 else 0, busy=(("acc", 0.002),)) for n in range(3000)
    )
    now = make_snapshot(100.0, steps=short)
    steps, bars = recent_steps(now), join_short(short)
    assert len(steps) >= 2998 and f"{len(steps)} steps" in draw_timeline(now) and 200 <= len(bars) <= 250
    assert sum(bar.decodes for bar in bars) == 9000 and sum(bool(bar.prompts) for bar in bars) == 1
    assert all(busy_share(bar, "acc") == pytest.approx(0.4, abs=0.05) for bar in bars)
    gaps = [(step.start, 0.5 if step.number == 700 else 0.005) for step in short]
    kept = keep_longest(gaps)
    assert len(kept) <= 251 and max(gap for _, gap in kept) == 0.5 and kept == sorted(kept)


def test_gaps_are_between_steps_that_decode_and_rates_count_their_tokens() -> None:
    steps = [StepSeen(n, n / 10, 0.1, 16, decodes, 5) for n, decodes in enumerate((3, 0, 4, 5))]
    assert [round(gap, 3) for _, gap in gaps_of(steps)] == [0.2, 0.1]
    rates = rates_of(steps, 15.0)
    assert len(rates) == 30 and rates[0] == (0.25, 24.0) and sum(rate for _, rate in rates) == 24.0
    late = [replace(step, start=step.start + 10) for step in steps]  # of earlier ones nothing is known
    assert next(at for at, _ in rates_of(late, 15.0)) == 9.75 and not rates_of([], 15.0)


def test_quantiles_are_bounds_of_buckets() -> None:
    histogram = Histogram((1.0, 2.0, 4.0), (50, 40, 9, 1), 0.0)
    assert [quantile_of(histogram, share) for share in (0.5, 0.9, 0.99, 1.0)] == [1.0, 2.0, 4.0, float("inf")]
    assert quantile_of(Histogram((1.0,), (0, 0), 0.0), 0.5) is None
