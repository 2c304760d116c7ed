"""What the server says about itself: /health, /v1/models, /props, /slots, /metrics; and POST /budget."""

import asyncio
from datetime import UTC, datetime
from typing import Any

from pshard import __version__
from pshard.jsonio import to_json
from pshard.server.api.openapi import write_openapi
from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import Reply, Whole, reply_json
from pshard.server.http.running import as_fault
from pshard.server.jobs import Refused
from pshard.server.reading.read_requests import read_budget
from pshard.server.shapes.metrics_text import write_metrics


async def tell_health(desk: Desk, call: Call) -> Reply:
    """200 when jobs are taken, else 503 with the reason."""
    now = desk.service.snapshot()
    told = {"status": "ok" if now.ready else now.state, "state": now.state}
    if now.ready:
        return reply_json(told)
    error = {"message": now.reason or now.state, "type": "unavailable", "param": None, "code": now.state}
    return reply_json(told | {"error": error}, 503, {"retry-after": "5"})


async def list_models(desk: Desk, call: Call) -> Reply:
    """The model, by all its names."""
    models = [show_model(desk, name) for name in desk.names]
    more = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}  # as Anthropic's clients read
    return reply_json({"object": "list", "data": models, **more})


async def tell_model(desk: Desk, call: Call) -> Reply:
    """One model. Raises Fault 404 for another."""
    name = dict(call.arguments)["name"]
    desk.reader.check_model(name)
    return reply_json(show_model(desk, name))


def show_model(desk: Desk, name: str) -> dict[str, Any]:
    """A model as front ends of vLLM and llama.cpp read it."""
    model = desk.model
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": model.created,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "owned_by": "pshard",
        "max_model_len": model.context,
        "meta": {
            "n_ctx": model.context,
            "n_ctx_train": model.trained or model.context,
            "n_vocab": model.vocab,
            "size": model.nbytes,
        },
    }


async def tell_props(desk: Desk, call: Call) -> Reply:
    """What is in force: the plan with its tiers, the context, how tokens are drawn, the template."""
    now, model = desk.service.snapshot(), desk.model
    return reply_json(
        {
            "model": model.name,
            "model_path": model.file,
            "state": now.state,
            "reason": now.reason,
            "total_slots": now.plan.sequences if now.plan else 0,
            "default_generation_settings": {"n_ctx": model.context, "params": to_json(desk.usual)},
            "chat_template": model.template or "",
            "bos_token": model.tokenizer.bos_text if model.tokenizer else "",
            "eos_token": model.tokenizer.eos_text if model.tokenizer else "",
            "max_gap_ms": now.gap_ms,
            "queue": now.queue,
            "prefix_cache_problem": now.blocks.files_problem or None,
            "plan": to_json(now.plan) if now.plan else None,
        }
    )


async def tell_slots(desk: Desk, call: Call) -> Reply:
    """Requests that run, each with its progress; no prompts."""
    now = desk.service.snapshot()
    return reply_json([to_json(text) | {"id": text.slot, "is_processing": True} for text in now.running])


async def tell_metrics(desk: Desk, call: Call) -> Reply:
    """Counters, gauges and histograms for Prometheus."""
    text = write_metrics(desk.service.snapshot())
    return Whole(text.encode(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})


async def tell_openapi(desk: Desk, call: Call) -> Reply:
    """The OpenAPI document."""
    return reply_json(write_openapi(desk.tables, __version__))


async def move_budget(desk: Desk, call: Call) -> Reply:
    """Move to another planned budget; running texts go on. Raises Fault when there is none of that size and none is
    to be, or can be, made, or when the move fails."""
    asked = await desk.read(read_budget, call.body)
    mib = asked["vram_mib"]
    try:
        await asyncio.to_thread(desk.service.find_budget, mib, asked["plan"])
        moved = desk.service.move_budget(mib)
    except Refused as refused:
        fault = as_fault(refused)
        fault.param = "vram_mib" if fault.status == 400 else None
        raise fault from None
    told = await asyncio.shield(asyncio.wrap_future(moved))
    return reply_json({"vram_mib": mib, "plan": told})
