"""What one request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds that keep one request from hurting others. Lengths of text are bounded by the body and the context.

    body: bytes of a request. choices: `n`; prompts: of one to /v1/completions; jobs: choices times prompts. stops:
    stop strings, each of at most `stop_letters`. named: texts of a choice. top: likeliest tokens beside each.
    biases: tokens of `logit_bias`. schema_bytes and depth: of a JSON schema, and depth of nesting; compile_seconds:
    until a grammar must be ready. messages, tools: of a chat; tools_bytes: of its tools together; calls: of tools,
    where an answer has to be calls. template_steps: loops and calls of a chat template. body_seconds: until a body
    must be there; write_seconds: without progress before a reader is given up; ping_seconds: between signs of life
    in a stream.
    """

    body: int = 8 << 20
    choices: int = 16
    prompts: int = 256
    jobs: int = 256
    stops: int = 16
    stop_letters: int = 256
    named: int = 1024
    top: int = 20
    biases: int = 1024
    schema_bytes: int = 64 << 10
    depth: int = 64
    compile_seconds: float = 10.0
    messages: int = 4096
    tools: int = 256
    tools_bytes: int = 1 << 20
    calls: int = 16
    template_steps: int = 1_000_000
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    ping_seconds: float = 5.0


DEFAULT_LIMITS = Limits()
