"""What a client is told when a request cannot be answered: one noun, and its shapes for both families of clients."""

from typing import Any

from pshard.errors import as_line

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable",
}
MESSAGES_TYPES = {  # as /v1/messages names them
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class Fault(Exception):
    """A request that is answered by an error.

    status: of HTTP. param: the field that is wrong, as "messages[2].content"; code: a word that programs look at; more:
    further fields of the error; retry_after: seconds until it is worth trying again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        more: dict[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.more, self.retry_after = more or {}, retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return Fault, (self.status, str(self), self.param, self.code, self.more, self.retry_after)


def bad_field(where: str, what: str) -> Fault:
    """A field that is not as it has to be: `what` goes on after its name."""
    return Fault(400, f"{where} {what}", param=where, code="invalid_value")


def too_long(where: str, prompt: int, context: int, trained: int, least: bool = False) -> Fault:
    """A prompt of so many tokens for which the context has no room. Names both sizes. trained: the longest context that
    the model was made for, 0 where that is not known; least: the prompt was not counted, and has no fewer tokens."""
    has = f"{'at least ' if least else ''}{prompt}"
    more = "; the model was made for no more" if trained and context >= trained else ", or serve it with a larger -c"
    return Fault(
        400,
        f"the prompt has {has} tokens, and the context of this model has {context}; send less text{more}",
        param=where,
        code="context_length_exceeded",
        more={"n_prompt_tokens": prompt, "n_ctx": context} | ({"n_prompt_tokens_at_least": True} if least else {}),
    )


def show_fault(fault: Fault) -> dict[str, Any]:
    """The body of an error as OpenAI's clients read it."""
    kind = TYPES.get(fault.status, "invalid_request_error" if fault.status < 500 else "server_error")
    return {"error": {"message": as_line(fault), "type": kind, "param": fault.param, "code": fault.code, **fault.more}}


def show_messages_fault(fault: Fault) -> dict[str, Any]:
    """The body of an error as Anthropic's clients read it."""
    kind = MESSAGES_TYPES.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
    told = as_line(fault)
    if fault.code == "context_length_exceeded":  # the words by which these clients know that they have to compact
        told = f"prompt is too long: {fault.more['n_prompt_tokens']} tokens > {fault.more['n_ctx']} maximum; {told}"
    return {"type": "error", "error": {"type": kind, "message": told}}


def show_fault_at(path: str, fault: Fault) -> dict[str, Any]:
    """The body of an error as clients of that path read it."""
    if path.startswith("/api/"):  # Ollama's clients read a text
        return {"error": as_line(fault)}
    return show_messages_fault(fault) if path.startswith("/v1/messages") else show_fault(fault)
