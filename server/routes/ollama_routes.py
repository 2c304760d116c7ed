"""Ollama's interface: /api/chat, /api/generate, and what is told of the model."""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pshard import __version__
from pshard.models.text.tool_templates import takes_tools
from pshard.server.api.faults import Fault, show_fault_at
from pshard.server.api.read_ollama import OllamaAsk
from pshard.server.http.answers import Answers
from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import LINES, Reply, Stream, reply_json, write_line
from pshard.server.reading import read_requests
from pshard.server.routes.chat_routes import prepare_chat
from pshard.server.shapes.show_ollama import NEVER, Calls, Shape, Times, show_details, show_entry, show_time
from pshard.server.shapes.usage import Usage
from pshard.server.text.answer_reader import Delta
from pshard.server.text.formats import thinks
from pshard.server.text.prompts import Prompt

SPOKEN = "0.40.0"  # Ollama's version whose interface this is: clients compare it with what they need
REFUSED = {  # what Ollama does and this server does not, by path
    "/api/embed": "embeddings are not made here: the model's answers are text",
    "/api/embeddings": "embeddings are not made here: the model's answers are text",
    "/api/pull": "models are not fetched through the server; run: pshard pull",
    "/api/push": "models are not sent from here",
    "/api/create": "models are not made here",
    "/api/copy": "models are not copied here; start the server with --alias for another name",
    "/api/delete": "models are not deleted through the server; run: pshard rm",
}


async def chat(desk: Desk, call: Call) -> Reply:
    """Continue a conversation. Raises Fault."""
    return await _answer(desk, call, True, *await desk.read(read_requests.read_ollama_chat, call.body))


async def generate(desk: Desk, call: Call) -> Reply:
    """Answer a prompt, continue a text or fill a gap. Raises Fault."""
    return await _answer(desk, call, False, *await desk.read(read_requests.read_ollama_prompt, call.body))


async def _answer(desk: Desk, call: Call, chats: bool, ask: OllamaAsk, prompt: Prompt | None) -> Reply:
    name, chat = desk.model.name, ask.chat
    shape = Shape(name, chats, None if chat.generation.likely is None else desk.words)
    if prompt is None:  # it is to be there, and is
        now = time.monotonic()
        return reply_json(shape.show(Delta(), []) | shape.show_end("load", Usage(0, 0, 0), Times(now, now, now)))
    if ask.thinks and not thinks(desk.model.template):
        raise Fault(400, f"think cannot be kept: {name!r} does not think, by its template", "think", "invalid_value")
    answers = await prepare_chat(desk, chat, prompt, desk.head("ollama-").id, call.key)
    told = _Told(answers, shape, time.monotonic())
    answers.start()
    if chat.answering.stream:
        return Stream(told.stream(call.path), answers.cancel, LINES)
    return reply_json(await told.gather())


@dataclass(frozen=True)
class _Told:
    """An answer that is told when it is made, or while it is."""

    answers: Answers
    shape: Shape
    begun: float

    def _show_end(self) -> dict[str, Any]:
        (answer,), now = self.answers.all, time.monotonic()
        return self.shape.show_end(answer.reason, self.answers.usage(), Times(self.begun, answer.first or now, now))

    async def gather(self) -> dict[str, Any]:
        """The whole answer as one object. Raises Fault."""
        await self.answers.gather()
        (answer,), calls = self.answers.all, Calls()
        told = calls.take(answer.whole.calls) + calls.close(answer.reader.cut)
        return self.shape.show(answer.whole, told) | self._show_end()

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        """A line for what is new each time, and one for the end."""
        calls = Calls()

        def write(delta: Delta, made: list[dict[str, Any]]) -> bytes:
            return write_line(self.shape.show(delta, made))

        def show(_: int, delta: Delta) -> Iterator[bytes]:
            made = calls.take(delta.calls)
            if delta.text or delta.thought or delta.entries or made:
                yield write(delta, made)

        try:  # an empty line would be no JSON to clients: what says that somebody is there has no text
            async for piece in self.answers.tell(show, lambda: write(Delta(), [])):
                yield piece
        except Fault as fault:
            yield write_line(show_fault_at(path, fault))
            return
        if made := calls.close(self.answers.all[0].reader.cut):
            yield write(Delta(), made)
        yield write_line(self.shape.show(Delta(), []) | self._show_end())


async def list_tags(desk: Desk, call: Call) -> Reply:
    """The model, by all its names."""
    return reply_json({"models": [show_entry(desk.model, name) for name in desk.names]})


async def list_loaded(desk: Desk, call: Call) -> Reply:
    """The model, where it is in memory."""
    plan = desk.service.snapshot().plan
    if plan is None:
        return reply_json({"models": []})
    vram = min(sum(plan.vram_mib) << 20, desk.model.nbytes)  # clients take the rest of the size for host memory
    more = {"expires_at": NEVER, "size_vram": vram, "context_length": desk.model.context}
    return reply_json({"models": [show_entry(desk.model, desk.model.name) | more]})


async def tell_version(desk: Desk, call: Call) -> Reply:
    """Ollama's version whose interface this is, and the server's own."""
    return reply_json({"version": SPOKEN, "pshard": __version__})


async def show_model(desk: Desk, call: Call) -> Reply:
    """What the model is, has room for and can do. Raises Fault 404 for another."""
    await desk.read(read_requests.read_ollama_name, call.body)
    model = desk.model
    fills = desk.reader.prompts.gap_marks is not None
    template = (model.template or "") + ("{# .Prompt .Suffix #}" if fills else "")  # a word that Continue looks for
    abilities = {"completion": True, "tools": takes_tools(model.template or ""), "thinking": thinks(model.template),
                 "insert": fills}  # fmt: skip
    family = model.family or "unknown"
    return reply_json(
        {
            "modelfile": f"FROM {model.file}\n",
            "parameters": f"num_ctx {model.context}",
            "template": template,
            "details": show_details(model),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": model.weights,
                f"{family}.context_length": model.context,
                f"{family}.vocab_size": model.vocab,
            },
            "capabilities": [name for name, has in abilities.items() if has],
            "modified_at": show_time(datetime.fromtimestamp(model.created, UTC)),
        }
    )


async def refuse(desk: Desk, call: Call) -> Reply:
    """What is not done here. Raises Fault that says so."""
    raise Fault(400, REFUSED[call.path], code="not_done")
