"""What the benchmarks of another card's code share: each way runs in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pshard.machine import AS_CARD


def run_way(script: str, way: str, as_card: str, seconds: float, out: Path) -> Any:
    """What a script prints last, JSON, when it runs one way, "native" with this GPU's own code; None where it fails.
    What it says of errors goes to stderr."""
    environment = {key: value for key, value in os.environ.items() if key != AS_CARD}
    environment |= {} if way == "native" else {AS_CARD: as_card}
    command = [sys.executable, script, "--way", way, "--seconds", str(seconds), "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    sys.stderr.write(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
