"""Which NVIDIA driver runs here, without starting CUDA."""

import re
from pathlib import Path


def find_driver() -> str | None:
    """The version of the NVIDIA driver, or None without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
        return found if isinstance(found, str) else found.decode()
    except Exception:  # no library, or one without a driver beneath
        pass
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module\S*\s.*?(\d+\.\d+[\d.]*)", text)
    return match[1] if match else None
