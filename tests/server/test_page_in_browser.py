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
        browser.wait_for("!document.getElementById('chat').hidden && document.getElementById('server').hidden")
        browser.ask("document.getElementById('see-server').click()")
        assert browser.text("state") == "ready" and "37 of 128" in browser.text("running")
        before, looks = browser.text("last-step"), service.looks
        browser.wait_for(f"document.getElementById('last-step').innerText !== {before!r}")
        browser.wait_for("document.querySelectorAll('#timeline path').length >= 4")
        label = browser.ask("document.querySelector('#timeline svg').getAttribute('aria-label')")
        assert "busy in them: link 90%" in label
        until = time.monotonic() + 60
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


def test_conversations_are_kept_named_deleted_exported_and_imported(browser: Browser) -> None:
    names = "[...document.getElementById('which').options].map((option) => option.textContent).join('|')"
    with page_server(LookedAt()) as (url, asked):
        browser.open(url)
        say(browser, "first words")
        browser.wait_for(f"{LOG}.includes('You said first') && !document.getElementById('send').disabled")
        browser.ask("document.getElementById('clear').click()")
        say(browser, f"second {NASTY}")
        browser.wait_for(f"{LOG}.includes('You said second') && !document.getElementById('send').disabled")
        browser.open(f"{url}/?again")  # they are there after a reload, the latest first
        assert browser.ask(names) == f"second {NASTY}|first words" and "You said second" in browser.ask(LOG)
        assert browser.ask("document.querySelector('#talk details.thought').open") is False
        choose = "{const s = document.getElementById('which'); s.value = '1'; s.dispatchEvent(new Event('change'))}"
        browser.ask(choose)
        say(browser, "more")
        browser.wait_for(f"{LOG}.includes('You said more') && !document.getElementById('send').disabled")
        told = [turn["content"] for turn in asked[-1]["messages"]]
        assert told[0] == "first words" and told[-1] == "more" and len(told) == 3
        assert all(set(turn) == {"role", "content"} for turn in asked[-1]["messages"])  # no thoughts go back
        browser.ask("document.getElementById('forget').click()")
        assert browser.ask(names) == f"New conversation|second {NASTY}" and browser.ask(LOG).strip() == ""
        give = (
            "{const f = document.getElementById('import-file'), d = new DataTransfer();"
            "d.items.add(new File([%s], 'kept.json')); f.files = d.files; f.dispatchEvent(new Event('change'))}"
        )
        browser.ask(give % """'{"conversations": [{"title": "old", "turns": [{"role": "user", "content": "x"}]}]}'""")
        browser.wait_for(f"({names}).includes('|old|')")
        browser.ask(give % "'{\"conversations\": [1]}'")
        browser.wait_for(f"{LOG}.includes('kept.json has no conversations')")
        assert not browser.faults and browser.ask("document.querySelectorAll('#talk img').length") == 0


def test_text_files_go_along_and_others_are_refused(browser: Browser) -> None:
    give = (
        "{const f = document.getElementById('attach-files'), d = new DataTransfer();"
        "d.items.add(new File(['a = 1'], 'a.py')); d.items.add(new File([new Uint8Array([255, 254, 0])], 'b.bin'));"
        "d.items.add(new File([new Uint8Array((1 << 20) + 1)], 'c.txt'));"
        "f.files = d.files; f.dispatchEvent(new Event('change'))}"
    )
    with page_server(LookedAt()) as (url, asked):
        browser.open(url)
        browser.ask(give)
        browser.wait_for("document.getElementById('attached').textContent === 'a.py'")
        assert "b.bin is no text in UTF-8" in (told := browser.ask(LOG)) and "c.txt is larger than 1 MiB" in told
        say(browser, "explain")
        browser.wait_for(
            "!document.getElementById('send').disabled && document.getElementById('attached').textContent === ''"
        )
        (message,) = asked[0]["messages"]
        assert message["content"] == "a.py:\n```\na = 1\n```\n\nexplain"


def test_the_budget_is_moved_by_a_slider_that_tells_what_each_promises(browser: Browser) -> None:
    with page_server(LookedAt()) as (url, asked):
        browser.open(url)
        for _ in range(3):  # past the link to the message, to the view of the server
            browser.press("Tab")
        assert browser.ask("document.activeElement.id") == "see-server"
        browser.press("Enter")
        browser.wait_for("document.getElementById('budget-size').textContent === '12,000 MiB'")
        assert "9.0 tokens/s" in browser.text("promise")
        slide = "{const s = document.getElementById('budget'); s.value = '0'; s.dispatchEvent(new Event('input'))}"
        browser.ask(slide)
        assert browser.ask("document.getElementById('budget').getAttribute('aria-valuetext')") == "6,000 MiB"
        assert "4.5 tokens/s" in browser.text("promise") and "4,096 after 1.25 s" in browser.text("promise")
        browser.ask("document.getElementById('move').click()")
        browser.wait_for("document.getElementById('promise').textContent.includes('6000 MiB: moved')")
        assert asked == [{"vram_mib": 6000}] and not browser.faults


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
        assert browser.ask("document.getElementById('server').getBoundingClientRect().height") > 300
        assert "37 of 128" in browser.text("running") and browser.ask("document.getElementById('chat').hidden")
        assert not browser.faults


def test_every_field_has_a_name_and_every_picture_a_text(browser: Browser) -> None:
    with page_server(LookedAt()) as (url, _):
        browser.open(url)
        browser.call("Accessibility.enable")
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        browser.ask("document.getElementById('see-server').click()")
        browser.wait_for("!document.getElementById('budget-form').hidden")
        nodes += browser.call("Accessibility.getFullAXTree")["nodes"]
    told = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    for role in ("textbox", "button", "spinbutton", "combobox", "slider", "image", "log", "heading"):
        names = [name for found, name in told if found == role]
        assert names and all(names), role
