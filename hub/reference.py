"""What users write to name a model of the Hub: `org/repo`, `org/repo:Q4_K_M`, or `org/repo:FILE.gguf`."""

import re
from dataclasses import dataclass
from pathlib import Path

_SITE = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/")
_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(?:blob|resolve)/main/([^?]+\.gguf)(?:\?.*)?", re.IGNORECASE)
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:\.git)?/?(?::(.+))?")


@dataclass(frozen=True)
class HubReference:
    """A repository, and which of its models: a quantisation or a file's name; "" leaves the choice to us."""

    repo: str
    wanted: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.wanted}" if self.wanted else self.repo


def parse_reference(text: str) -> HubReference | None:
    """The model of the Hub that a user names; None for what is, or would be, a path of this machine.

    What exists here is never looked up elsewhere. A leading `hf.co/` or the page's address is taken too,
    and the address of a file.
    """
    site = _SITE.match(text)
    name = text[site.end() :] if site else text
    if site and (file := _FILE.fullmatch(name)):
        return HubReference(file[1], file[2])
    match = _NAME.fullmatch(name)
    if not match or (not site and (Path(text).exists() or match[1].lower().endswith((".gguf", ".safetensors")))):
        return None
    return HubReference(match[1], match[2] or "")
