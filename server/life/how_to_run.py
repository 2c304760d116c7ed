"""How an engine that serves computes, and what of texts outlives it."""

from dataclasses import dataclass, field

from pshard.session.choose_drafts import DraftAsk


@dataclass(frozen=True)
class PrefixLimits:
    """Bytes of host memory and of files that prefixes of texts may take."""

    memory: int
    files: int


@dataclass(frozen=True)
class HowToRun:
    """kernels: "fast" or "plain"; deterministic: all runs under one tier, and experts stay where the plan has them.
    prefixes: what prefixes of texts may take to outlive the engine; None: they end with it. drafts: who drafts."""

    kernels: str = "fast"
    deterministic: bool = False
    prefixes: PrefixLimits | None = None
    drafts: DraftAsk = field(default_factory=DraftAsk)
