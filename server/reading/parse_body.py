"""JSON of a request's body, parsed with care."""

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from pshard.server.api.faults import Fault
from pshard.server.reading.reader import Reader

Result = TypeVar("Result")
Work = Callable[[Reader, dict[str, Any]], Result]  # what a body's object asks for
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_body_as(reader: Reader, work: Work[Result], body: bytes) -> Result:
    """What a body asks for. Raises Fault."""
    return work(reader, parse_object(body))


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, in UTF-8 with or without the mark of its byte order. Raises Fault 400 for what is
    none, for NaN, and for text that is no Unicode."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise _no_json("the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise _no_json("the body has half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise _no_json("the body is nested too deeply") from None
    except ValueError as error:
        raise _no_json(f"the body is no JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise _no_json("the body is no JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _no_json(message: str) -> Fault:
    return Fault(400, message, code="invalid_json")
