"""A small HTTP server that answers as the Hugging Face Hub does, on this machine, with faults where a test wants them.

It knows what programs ask of a model's repository: the list of files with sizes and checksums, and files by HEAD and
GET, in parts too, large ones behind a redirect to another address, as the Hub has them.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1 << 12  # bytes; larger files lie in the store behind a redirect, and have a checksum
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Faults:
    """What goes wrong. refused: an HTTP status for every request about a repository, with an X-Error-Code. cut_after:
    file data is cut after so many bytes of an answer, so many `cuts` times. short: the store has so many bytes fewer
    than the list says. spoilt: the store has other bytes. no_ranges: the store answers with whole files."""

    refused: tuple[int, str] | None = None
    cut_after: int = 0
    cuts: int = 0
    short: int = 0
    spoilt: bool = False
    no_ranges: bool = False


@dataclass
class HubServer:
    """repositories: path -> bytes by name. requests: (method, path, Range) of all that came. sent: bytes of files."""

    endpoint: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    sent: int = 0

    def of_files(self) -> list[tuple[str, str, str]]:
        """The requests that files were sent for."""
        return [r for r in self.requests if r[0] == "GET" and r[1].startswith("/store/")]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve on a free port until the block ends."""
    hub = HubServer()

    class Handler(_Handler):
        server_of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: HubServer

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server_of, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        listing, file = _API.fullmatch(path), _FILE.fullmatch(path)
        if path.startswith("/store/"):
            return self._send_stored(path)
        if hub.faults.refused and (listing or file):
            status, code = hub.faults.refused
            return self._refuse(status, code)
        match = listing or file
        if not match or match[1] not in hub.repositories:
            return self._refuse(401, "RepoNotFound")
        files = hub.repositories[match[1]]
        if listing:
            return self._send(200, json.dumps(_list(match[1], files)).encode(), {"Content-Type": "application/json"})
        assert file
        if file[3] not in files:
            return self._refuse(404, "EntryNotFound")
        data = files[file[3]]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(data)}"', "Accept-Ranges": "bytes"}
        if len(data) <= LARGE:
            return self._send_part(data, headers)
        store = hub.endpoint.replace("127.0.0.1", "localhost")  # another host, as far as programs can tell
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{_etag(data)}"'}
        self._send(302, b"", headers | {"Location": f"{store}/store/{match[1]}/{file[3]}"})

    def _send_stored(self, path: str) -> None:
        hub = self.server_of
        _, _, org, name, file = path.split("/", 4)
        data = hub.repositories[f"{org}/{name}"][file]
        if hub.faults.spoilt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if hub.faults.short:
            data = data[: -hub.faults.short]
        self._send_part(data, {"Accept-Ranges": "bytes"})

    def _send_part(self, data: bytes, headers: dict[str, str]) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted or self.server_of.faults.no_ranges:
            return self._send(200, data, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        self._send(206, data[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _refuse(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code} if code else {}
        headers |= {"Retry-After": "7"} if status == 429 else {}
        if code == "BadToken":
            headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
        self._send(status, b"{}", headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        faults = self.server_of.faults
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.path.startswith("/store/") and faults.cuts and len(body) > faults.cut_after:
            faults.cuts -= 1
            body, self.close_connection = body[: faults.cut_after], True
        self.server_of.sent += len(body)
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):  # whoever asked has had enough
            self.close_connection = True


def _etag(data: bytes) -> str:
    if len(data) > LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _list(name: str, files: dict[str, bytes]) -> dict[str, Any]:
    siblings = []
    for path, data in files.items():
        entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": _etag(data)}
        if len(data) > LARGE:
            entry["lfs"] = {"sha256": _etag(data), "size": len(data), "pointerSize": 134}
        siblings.append(entry)
    return {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
