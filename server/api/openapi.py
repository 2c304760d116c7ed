"""The OpenAPI document of the server, from the same tables that read its requests."""

from typing import Any

from pshard.server.api.limits import Limits
from pshard.server.api.read_chat import chat_table
from pshard.server.api.read_completion import completion_table
from pshard.server.api.read_gap import gap_table
from pshard.server.api.read_message_request import messages_table
from pshard.server.api.read_ollama import NAMED, ollama_chat_table, ollama_generate_table
from pshard.server.api.read_responses import responses_table
from pshard.server.api.tables.fields import Schema, Table, schema_of
from pshard.server.api.tables.token_fields import budget_table, detokenize_table, tokenize_table

GETS = {
    "/health": "Whether requests are taken",
    "/v1/models": "The model",
    "/v1/models/{name}": "One model",
    "/props": "The plan in force and the settings",
    "/slots": "Requests that run",
    "/metrics": "Counters for Prometheus",
    "/tokenizer_info": "The tokenizer",
    "/api/tags": "The model, as Ollama's clients ask",
    "/api/ps": "The model in memory",
    "/api/version": "Ollama's version whose interface this is",
    "/openapi.json": "This document",
}
ERRORS = {
    "400": "A field is wrong, or cannot be kept to",
    "401": "The key is missing or wrong",
    "403": "The host or the web page is not allowed",
    "404": "There is no such model",
    "413": "The body is too large",
    "415": "The body is compressed",
    "429": "Too many requests wait",
    "500": "The server failed",
    "503": "The server is loading or stopping",
}


def request_tables(limits: Limits, vocab: int) -> dict[str, Table]:
    """The table of every path that takes a body."""
    return {
        "/v1/chat/completions": chat_table(limits),
        "/v1/completions": completion_table(limits, vocab),
        "/v1/responses": responses_table(limits),
        "/v1/responses/input_tokens": responses_table(limits),
        "/v1/messages": messages_table(limits),
        "/v1/messages/count_tokens": messages_table(limits, True),
        "/api/chat": ollama_chat_table(limits),
        "/api/generate": ollama_generate_table(limits),
        "/api/show": NAMED,
        "/infill": gap_table(limits),
        "/apply-template": chat_table(limits),
        "/tokenize": tokenize_table(limits),
        "/detokenize": detokenize_table(vocab),
        "/budget": budget_table(),
    }


def write_openapi(tables: dict[str, Table], version: str) -> dict[str, Any]:
    """The document, in OpenAPI 3.1, whose schemas are JSON schemas."""
    paths: dict[str, Any] = {}
    for path, about in GETS.items():
        named = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {"get": {"summary": about, "responses": _responses()} | _if("{" in path, {"parameters": named})}
    for path, table in tables.items():
        body = {"required": True, "content": {"application/json": {"schema": schema_of(table)}}}
        paths[path] = {"post": {"requestBody": body, "responses": _responses()}}
    error: Schema = {
        "type": "object",
        "properties": {"error": {"type": "object", "required": ["message", "type"]}},
        "required": ["error"],
    }
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pshard", "version": version},
        "paths": paths,
        "components": {"schemas": {"Error": error}, "securitySchemes": keys},
        "security": [{}, {"key": []}],
    }


def _responses() -> dict[str, Any]:
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    return {"200": {"description": "The answer"}} | {n: {"description": about} | error for n, about in ERRORS.items()}


def _if(true: bool, more: dict[str, Any]) -> dict[str, Any]:
    return more if true else {}
