"""What tests have another process do with a body."""

import os
import time
from pathlib import Path
from typing import Any

from pshard.server.api.faults import Fault
from pshard.server.reading.reader import Reader


def tell_process(reader: Reader, body: dict[str, Any]) -> tuple[int, int]:
    return os.getpid(), len(body.get("text", ""))


def take_forever(reader: Reader, body: dict[str, Any]) -> None:
    while True:
        time.sleep(60)


def note_process_and_wait(reader: Reader, body: dict[str, Any]) -> None:
    Path(body["place"]).write_text(str(os.getpid()))
    take_forever(reader, body)


def end_early(reader: Reader, body: dict[str, Any]) -> None:
    os._exit(1)


def refuse(reader: Reader, body: dict[str, Any]) -> None:
    raise Fault(404, "not here", param="text", code="gone", more={"n": 1}, retry_after=2.0)


def fail(reader: Reader, body: dict[str, Any]) -> None:
    raise RuntimeError("ROMEO's secret")
