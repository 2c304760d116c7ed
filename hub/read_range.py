"""Reads a part of a file of the Hub, and no more of it."""

import time
from collections.abc import Callable, Iterator

from pshard.errors import UserError

CONNECT_SECONDS = 10.0
TRIES = 5  # connections in a row that bring no byte
PAUSE_SECONDS = 1.0  # between connections
BEYOND_END = 416  # the HTTP status of a range that a file does not have


def read_range(repo: str, commit: str, name: str, first: int, end: int) -> Iterator[bytes]:
    """Bytes [first, end) of a file, in pieces; fewer where the file or the connection ends before.

    Raises what the Hub's library and its HTTP client raise (see tell_errors.py).
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(repo, name, revision=commit)
    headers = {**build_hf_headers(), "Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=CONNECT_SECONDS, follow_redirects=True) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        skip, left = (first if response.status_code == 200 else 0), end - first  # 200: the whole file comes
        for piece in response.iter_bytes():  # as it comes: what came before a cut is kept
            kept = piece[skip : skip + left]
            skip = max(0, skip - len(piece))
            left -= len(kept)
            if kept:
                yield kept
            if not left:
                return  # which closes the connection


def read_steadily(repo: str, commit: str, name: str, first: int, end: int, take: Callable[[bytes], object]) -> None:
    """Give bytes [first, end) of a file to `take`, over as many connections as it needs while each brings something.

    Raises UserError when connections bring nothing any more, and for a file that is shorter; else as `read_range`.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    at, idle = first, 0
    while at < end:
        before = at
        try:
            for piece in read_range(repo, commit, name, at, end):
                take(piece)
                at += len(piece)
            why = "the Hub ended it"
        except HfHubHTTPError as error:
            if error.response.status_code != BEYOND_END:
                raise
            raise UserError(
                f"{repo}: {name} ends after {at} bytes, before the Hub's list says; try again later"
            ) from None
        except HTTPError as error:
            why = str(error) or type(error).__name__
        idle = 0 if at > before else idle + 1
        if idle == TRIES:
            raise UserError(f"{repo}: {name} was cut after {at} of {end} bytes ({why}); run it again: it goes on there")
        if at < end:
            time.sleep(PAUSE_SECONDS)


def read_bytes(repo: str, commit: str, name: str, first: int, end: int) -> bytes:
    """Bytes [first, end) of a file in one piece. Raises as `read_steadily`."""
    data = bytearray()
    read_steadily(repo, commit, name, first, end, data.extend)
    return bytes(data)
