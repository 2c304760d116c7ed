"""The server that is driven: where it is, what it calls its model, whether it takes prompts as token ids."""

import json
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pshard.errors import UserError
from pshard.session.serve_bench.timed_exchange import Reply, exchange, write_request
from pshard.session.serve_bench.words import WORDS

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
FEWEST_IDS = 16  # different tokens that prompts are made of, where they are made of ids
ASK_SECONDS = 120.0  # for what is asked once: a server may have to wake up


@dataclass(frozen=True)
class Target:
    """address: of the server, without /v1. ids: tokens that prompts are made of; empty: prompts are texts.
    long_answers: the server can be told not to end answers early."""

    address: SplitResult
    key: str
    model: str
    api: str
    ids: tuple[int, ...] = ()
    long_answers: bool = True
    notes: tuple[str, ...] = ()

    def write(self, body: dict[str, Any]) -> bytes:
        """A request for a text."""
        return _write(self.address, self.key, "POST", PATHS[self.api], body)


def parse_address(url: str) -> SplitResult:
    """An address such as http://127.0.0.1:8080, with or without /v1. Raises UserError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise UserError(f"--serve {url}: {error}; give an address such as http://127.0.0.1:8080") from None
    if not usable:
        raise UserError(f"--serve {url} is no address of a server; give one such as http://127.0.0.1:8080")
    return parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"), query="", fragment="")


async def find_target(address: SplitResult, key: str, model: str | None, api: str) -> Target:
    """Ask the server what it needs to be asked with. Raises UserError where there is none, or it takes no request."""
    if model is None:
        model = await _first_model(address, key)
    target = Target(address, key, model, api)
    if api == "completions":
        target = replace(target, ids=await _find_ids(target))
    return await _try_request(target)


async def _first_model(address: SplitResult, key: str) -> str:
    reply = await exchange(address, _write(address, key, "GET", "/v1/models"), ASK_SECONDS)
    check_reply(address, reply)
    try:
        return json.loads(reply.body)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"{address.netloc} lists no model at /v1/models; name one with --served-model") from None


async def _find_ids(target: Target) -> tuple[int, ...]:
    """Ids of plain words, in the form of whoever answers; empty where nobody does."""
    text = " ".join(WORDS)
    asked = {"model": target.model, "content": text, "prompt": text, "add_special": False, "add_special_tokens": False}
    message = _write(target.address, target.key, "POST", "/tokenize", asked)
    reply = await exchange(target.address, message, ASK_SECONDS)
    try:
        ids = json.loads(reply.body)["tokens"]
    except (ValueError, KeyError, TypeError):
        return ()
    known = sorted({i for i in ids if type(i) is int}) if isinstance(ids, list) else []
    return tuple(known) if len(known) >= FEWEST_IDS else ()


async def _try_request(target: Target) -> Target:
    """One small request, in the forms that servers may not take, the best first. Raises UserError if none works."""
    forms = [
        replace(target, ids=ids, long_answers=long) for ids in dict.fromkeys((target.ids, ())) for long in (True, False)
    ]
    for form in forms:
        reply = await exchange(form.address, form.write(_small_body(form)), ASK_SECONDS)
        if reply.status == 200:
            return replace(form, notes=tuple(_describe(form)))
        if reply.status not in (400, 404, 422):
            break
    check_reply(target.address, reply)
    raise AssertionError("a reply that is no answer is an error")


def _small_body(target: Target) -> dict[str, Any]:
    prompt = target.ids[:4] if target.ids else "one two"
    asked = {"messages": [{"role": "user", "content": "one two"}]} if target.api == "chat" else {"prompt": prompt}
    early = {"ignore_eos": True} if target.long_answers else {}
    return {"model": target.model, "max_tokens": 1, "temperature": 0, **asked, **early}


def _describe(target: Target) -> list[str]:
    notes = []
    if not target.ids:
        notes.append("prompts are texts: lengths are as the server counts them, and not those that were asked for")
    if not target.long_answers:
        notes.append("the server does not take ignore_eos: answers may end early")
    return notes


def check_reply(address: SplitResult, reply: Reply) -> None:
    """Raise UserError for anything but an answer with status 200."""
    if reply.status == 200 and not reply.failure:
        return
    where = address.netloc.rpartition("@")[2]
    if reply.status == 0 or reply.failure:
        what = {"connect": "nobody listens", "timeout": "no answer in time"}.get(reply.failure, "the answer was cut")
        raise UserError(f"{where}: {what}; make sure that the server is up and ready")
    advice = "; give --api-key" if reply.status in (401, 403) else ""
    raise UserError(f"{where} answers {reply.status}: {describe_error(reply.body)}{advice}")


def describe_error(body: bytes) -> str:
    """The message of an error, as OpenAI writes it, or the beginning of what came, on one line."""
    try:
        said = json.loads(body)
        said = said["error"] if isinstance(said, dict) and "error" in said else said
        said = said["message"] if isinstance(said, dict) and "message" in said else said
    except (ValueError, RecursionError):
        said = body.decode("utf-8", "replace")
    return " ".join(str(said).split())[:300]


def _write(address: SplitResult, key: str, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return write_request(address, method, path, headers, json.dumps(body).encode() if body else b"")
