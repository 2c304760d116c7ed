"""The page in a real Chromium: figures that move, a chat by keyboard, a key, no fault on its console."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser, open_browser
from page_server import NASTY, LookedAt, page_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium in PATH (chromium, google-chrome)"),
]
pytest.importorskip("starlette", reason="starlette is not installed; pip install 'pshard[serve]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; pip install 'pshard[serve]'")
LOG = "document.getElementById('talk').innerText"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with open_browser(tmp_path / "browser") as found:
        yield found


def say(browser: Browser, words: str) -> None:
    browser.ask("document.getElementById('words').focus()")
    browser.type(words)
    browser.press("Enter")


def test_figures_move_while_the_page_is_looked_at(browser: Browser) -> None:
    service = LookedAt()
    with page_server(service) as (url, _):
        browser.open(url)
        assert browser.text("state") == "ready" and "37 of 128" in browser.text("running")
        before, looks = browser.text("last-step"), service.looks
        browser.wait_for(f"document.getElementById('last-step').innerText !== {before!r}")
        browser.wait_for("document.querySelectorAll('#timeline path').length >= 4")
        label = browser.ask("document.querySelector('#timeline svg').getAttribute('aria-label')")
        assert "busy in them: link 90%" in label
        until = time.monotonic() + 20
        while service.looks == looks:
            assert time.monotonic() < until, "nobody looks at the service any more"
            time.sleep(0.02)
        assert browser.ask("document.querySelector('path.link').getBoundingClientRect().width") > 300
        service.what = {"state": "sleeping", "reason": "nobody asked for a while"}
        browser.wait_for("document.getElementById('state').innerText.includes('nobody asked')")
        assert not browser.faults
        assert all(address.startswith(url) for address in browser.asked)
        assert browser.ask("document.querySelectorAll('img').length") == 0 and NASTY in browser.text("plan")
    browser.wait_for("document.getElementById('link').innerText.includes('does not answer')")


def test_a_chat_by_keyboard_streams_stops_and_begins_anew(browser: Browser) -> None:
    with page_server(LookedAt()) as (url, asked):
        browser.open(url)
        say(browser, "hello")
        browser.wait_for(f"{LOG}.includes('You said hello. {NASTY}')")
        browser.wait_for("!document.getElementById('send').disabled")
        assert browser.ask("document.activeElement.id") == "words"
        assert browser.ask("document.querySelector('details.thought div').textContent") == "well"
        say(browser, "go on")
        browser.wait_for(f"{LOG}.includes('and on and on')")
        browser.press("Escape")
        browser.wait_for("document.getElementById('stop').disabled")
        assert [turn["role"] for turn in asked[1]["messages"]] == ["user", "assistant", "user"]
        say(browser, "fail")
        browser.wait_for(f"{LOG}.includes('too long <b>')")
        browser.press("Tab", shift=False)  # from the message to the buttons
        assert browser.ask("document.activeElement.id") == "send"
        browser.ask("document.getElementById('clear').click()")
        say(browser, "again")
        browser.wait_for(f"{LOG}.includes('You said again')")
        assert len(asked[-1]["messages"]) == 1 and asked[-1]["stream"] is True
        assert browser.ask("document.querySelectorAll('#talk img, #talk b').length") == 0
        assert [fault for fault in browser.faults if "400" not in fault] == []


def test_a_key_is_asked_for_and_used(browser: Browser) -> None:
    with page_server(LookedAt(), key="secret") as (url, asked):
        browser.open(url)
        browser.wait_for("!document.getElementById('key-form').hidden")
        assert "wants a key" in browser.text("state") and browser.text("plan") == ""
        assert browser.ask("document.activeElement.id") == "key"
        browser.type("wrong")
        browser.press("Enter")
        browser.wait_for("document.getElementById('state').innerText.includes('wrong')")
        browser.ask("document.getElementById('key').value = ''")
        browser.type("secret")
        browser.press("Enter")
        browser.wait_for("document.getElementById('plan').innerText.includes('layers streamed')")
        assert browser.ask("document.getElementById('key-form').hidden")
        say(browser, "hello")
        browser.wait_for(f"{LOG}.includes('You said hello')")
        assert len(asked) == 1 and "secret" not in browser.ask("location.href")


def test_it_can_be_read_in_the_dark_on_a_telephone_and_without_scripts(browser: Browser) -> None:
    def colour_of(what: str) -> Any:
        return browser.ask(f"getComputedStyle({what}).backgroundColor")

    with page_server(LookedAt()) as (url, _):
        browser.open(url)
        light = colour_of("document.body")
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert light == "rgb(255, 255, 255)" and colour_of("document.body") == "rgb(22, 24, 28)"
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=2, mobile=True
        )  # fmt: skip
        assert browser.ask("document.documentElement.scrollWidth") <= 360
        browser.call("Emulation.setScriptExecutionDisabled", value=True)
        browser.open(f"{url}/?")
        assert "37 of 128" in browser.text("running") and browser.ask("document.getElementById('chat').hidden")
        assert not browser.faults


def test_every_field_has_a_name_and_every_picture_a_text(browser: Browser) -> None:
    with page_server(LookedAt()) as (url, _):
        browser.open(url)
        browser.call("Accessibility.enable")
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    told = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    for role in ("textbox", "button", "spinbutton", "image", "log", "heading"):
        names = [name for found, name in told if found == role]
        assert names and all(names), role
