"""JSON as clients read it."""

import json
from typing import Any

# made once: `json.dumps` with other than its usual settings makes one each time
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}


def write_json(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return encode_line(ENCODER.encode(value))


def encode_line(text: str) -> bytes:
    """JSON in UTF-8, on what is one line to clients that split text as Python does, too."""
    return (text if text.isascii() else text.translate(LINE_ENDS)).encode()
