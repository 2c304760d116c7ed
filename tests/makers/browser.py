"""A real Chromium without a window, driven over its debugging pipe: nothing else has to be installed."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def find_browser() -> str | None:
    """The program, from PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. Attributes: `faults`, what the page's console complained of; `asked`, addresses that it fetched."""

    def __init__(self, writes: int, reads: int) -> None:
        self._to, self._from = os.fdopen(writes, "wb", buffering=0), os.fdopen(reads, "rb", buffering=0)
        self._rest, self._number, self._session = b"", 0, ""
        self.faults: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol. Raises RuntimeError for one that fails."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            got = self._read()
            if got.get("id") == self._number:
                if "error" in got:
                    raise RuntimeError(f"{method}: {got['error']['message']}")
                return got["result"]
            self._note(got)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._from.read(1 << 16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.faults.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        """Load a page and wait until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of JavaScript in the page. Raises RuntimeError with what it threw."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", expression))
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20.0) -> None:
        """Until it is true. Raises AssertionError when it does not become so."""
        until = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < until, f"never: {expression}; console: {self.faults}"
            time.sleep(0.02)

    def text(self, id: str) -> str:
        """What a place of the page shows."""
        return self.ask(f"document.getElementById({id!r}).innerText")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """A key of the keyboard: "Tab", "Enter", "Escape"."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        what = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        if key == "Enter":
            what["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **what)
        self.call("Input.dispatchKeyEvent", type="keyUp", **what)


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """A browser with a fresh profile in the folder."""
    program = find_browser()
    assert program
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in (theirs_in, theirs_out)]

    def place() -> None:  # Chromium reads commands from 3 and writes to 4
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    words = [program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    words += ["--no-sandbox"] if os.geteuid() == 0 else []
    process = subprocess.Popen(
        words, preexec_fn=place, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for fd in (theirs_in, theirs_out, *high):
        os.close(fd)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
