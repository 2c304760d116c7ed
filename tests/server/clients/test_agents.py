"""Requests as Codex, Claude Code, Open WebUI and Continue send them: every field is kept to, or refused by its name."""

from dataclasses import dataclass

import pytest
from http_client import ask, events_of
from quick_service import QuickService
from small_service import demo_model

from pshard.server.http.guards import Door
from pshard.server.jobs import Ended, Made, Progress
from pshard.server.page.page_routes import OPEN_PATHS
from pshard.server.routes.make_app import make_app

TEMPLATE = (  # thinks, has tools, and takes a system at the beginning alone
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% endif %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{{ reasoning_effort }}"
)
KEY = "a-key"
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


@dataclass
class Scripted(QuickService):
    """Says the same text to every request."""

    script: str = "Yes."

    def submit(self, job, listener):
        self.jobs.append(job)
        listener.put(Progress(len(job.prompt), len(job.prompt), 0))
        for token in demo_model().tokenizer.encode(self.script, add_special=False)[: job.most]:
            listener.put(Made((token,)))
        listener.put(Ended("stop"))
        listener.wake()

    @property
    def prompt(self) -> str:
        return demo_model().tokenizer.decode(list(self.jobs[-1].prompt))


@pytest.fixture
def service() -> Scripted:
    return Scripted()


@pytest.fixture
def app(service):
    return make_app(service, demo_model(TEMPLATE), door=Door(keys=(KEY,)))


def send(app, path, body=None, **headers):
    return ask(app, path, body, headers={"authorization": f"Bearer {KEY}"} | headers)


# Codex: /v1/responses, always streamed and never stored.
SHELL = {"type": "function", "name": "shell_command", "description": "Runs a command.", "strict": False,
         "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}  # fmt: skip
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}  # fmt: skip
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.",
         "tools": [{"type": "function", "name": "read", "parameters": PATH, "strict": False}]}  # fmt: skip
CODEX = {
    "model": "demo", "instructions": "You are Codex.", "tools": [SHELL, PATCH, FILES], "tool_choice": "auto",
    "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
    "stream_options": {"include_obfuscation": False}, "include": ["reasoning.encrypted_content"],
    "service_tier": "auto", "prompt_cache_key": "0199", "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be careful."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    ],
}  # fmt: skip
CODEX_HEADERS = {"accept": "text/event-stream", "originator": "codex_cli_rs", "session_id": "1", "version": "0.162.1"}
CODEX_SAYS = (
    '<think>hm</think><tool_call>{"name": "mcp__files__read", "arguments": {"path": "a"}}</tool_call>'
    '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+a"}}</tool_call>'
)


def test_codex_calls_functions_custom_tools_and_those_of_namespaces(app, service) -> None:
    service.script = CODEX_SAYS
    found = send(app, "/v1/responses", CODEX, **CODEX_HEADERS)
    assert found.status_code == 200, found.text
    assert "(shell_command)(apply_patch)(mcp__files__read)" in service.prompt and "medium" in service.prompt
    assert service.prompt.startswith("[system]You are Codex.\n\nBe careful.[user]<environment_context/>")
    events = events_of(found)
    thought, read, patch = (e["item"] for e in events if e["type"] == "response.output_item.done")
    assert thought["content"][0]["text"] == "hm" and thought["encrypted_content"]
    assert (read["type"], read["namespace"], read["name"]) == ("function_call", "mcp__files", "read")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n+a")
    assert "arguments" not in patch and patch["call_id"].startswith("call_")
    (text,) = (e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta")
    assert text == patch["input"] and events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["parallel_tool_calls"] is True and events[-1]["response"]["store"] is False

    service.script = "Done."
    history = [
        *CODEX["input"],
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": thought["encrypted_content"]},
        {k: read[k] for k in ("type", "namespace", "name", "arguments", "call_id")},
        {k: patch[k] for k in ("type", "status", "name", "input", "call_id")},
        {"type": "function_call_output", "call_id": read["call_id"], "output": "text of a"},
        {"type": "custom_tool_call_output", "call_id": patch["call_id"],
         "output": [{"type": "input_text", "text": "patched"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hurry."}]},
    ]  # fmt: skip
    found = send(app, "/v1/responses", CODEX | {"input": history}, **CODEX_HEADERS)
    assert found.status_code == 200, found.text
    told = service.prompt
    assert "<think>hm</think>" in told and '"name": "mcp__files__read"' in told and "*** Begin" in told
    assert "[tool]text of a[tool]patched[user]Hurry." in told  # the template takes no system there


@pytest.mark.parametrize("kind", ["web_search", "image_generation", "tool_search", "local_shell", None])
def test_tools_that_run_elsewhere_are_refused_by_their_type(app, kind) -> None:
    for tools, where in (
        ([SHELL, {"type": kind}], "tools[1].type"),
        ([FILES | {"tools": [{"type": kind}]}], "tools[0].tools[0].type"),
    ):
        error = send(app, "/v1/responses", CODEX | {"tools": tools}).json()["error"]
        assert error["param"] == where and str(kind) in error["message"] and "turn it off" in error["message"]


def test_calls_that_the_model_spoiled_do_not_end_a_conversation(app, service) -> None:
    """What it wrote comes back with every later request."""
    call = {"type": "function_call", "name": "shell_command", "arguments": '{"command": "ls', "call_id": "c"}
    answer = {"type": "function_call_output", "call_id": "c", "output": "no JSON"}
    found = send(app, "/v1/responses", CODEX | {"input": [*CODEX["input"], call, answer], "stream": False})
    assert found.status_code == 200 and 'ls"' in service.prompt, found.text
    service.script = '<tool_call>{"name": "apply_patch", "arguments": {"text": 1}}</tool_call>'
    (item,) = send(app, "/v1/responses", CODEX | {"stream": False}).json()["output"]
    assert item["input"] == '{"text": 1}'


# Claude Code: /v1/messages with the fields of its betas.
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24"
CLAUDE_HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": BETAS, "x-app": "cli",
                  "x-stainless-timeout": "600", "user-agent": "claude-cli/2.1.226 (external, cli)"}  # fmt: skip
CLAUDE = {
    "model": "demo", "max_tokens": 32000, "stream": True, "thinking": {"type": "adaptive"},
    "metadata": {"user_id": "{}"}, "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.226; cch=abcde;"},
        {"type": "text", "text": "You are Claude Code.", **EPHEMERAL},
    ],
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": {**PATH, "$schema": "http://json-schema.org/x"},
         **EPHEMERAL},
        {"name": "Later", "description": "", "input_schema": PATH, "defer_loading": True,
         "eager_input_streaming": True},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi", **EPHEMERAL}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I read."},
            {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "a"}, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": False,
             "content": [{"type": "text", "text": "text of a"}, {"type": "tool_reference", "tool_name": "Later"}]},
            {"type": "text", "text": "<system-reminder/>"}]},
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    ],
}  # fmt: skip


def test_claude_code_is_answered_with_thinking_and_calls(app, service) -> None:
    service.script = '<think>so</think>Yes.<tool_call>{"name": "Read", "arguments": {"path": "b"}}</tool_call>'
    found = send(app, "/v1/messages?beta=true", CLAUDE, **CLAUDE_HEADERS)
    assert found.status_code == 200, found.text
    events = events_of(found)
    blocks = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-1] == {"type": "message_stop"}
    told = service.prompt
    assert told.startswith("[system]You are Claude Code.[user]Hi[assistant]<think>hm</think>I read.")
    assert "[tool]text of a\nLater[user]<system-reminder/>\n\nBe brief." in told and told.endswith("(Later)medium")
    counted = {k: v for k, v in CLAUDE.items() if k not in ("max_tokens", "stream")}
    counted = send(app, "/v1/messages/count_tokens?beta=true", counted, **CLAUDE_HEADERS).json()
    assert counted == {"input_tokens": len(service.jobs[-1].prompt)}


def test_claude_codes_small_requests_are_answered(app, service) -> None:
    assert ask(app, "/", method="HEAD").status_code == 200 and "/" in OPEN_PATHS  # asks whether somebody is there
    quota = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}], "metadata": {}}
    assert send(app, "/v1/messages?beta=true", quota).json()["usage"]["output_tokens"] == 1
    (model,) = send(app, "/v1/models?limit=1000").json()["data"]
    assert model["type"] == "model" and model["display_name"] and model["created_at"].startswith("2023-11-14T")
    title = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    title |= {"additionalProperties": False}
    for given in ({"output_config": {"format": {"type": "json_schema", "schema": title}}},
                  {"output_format": {"type": "json_schema", "schema": title}}):  # fmt: skip
        assert send(app, "/v1/messages", quota | given).status_code == 200
        assert service.jobs[-1].constrain is not None


@pytest.mark.parametrize(("more", "where"), [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]}, "tools[0].type"),
    ({"tools": [{"type": "advisor_20260301", "name": "advisor"}]}, "tools[0].type"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
])  # fmt: skip
def test_what_claude_code_may_ask_and_is_not_done_is_refused_by_name(app, more, where) -> None:
    found = send(app, "/v1/messages", CLAUDE | more, **CLAUDE_HEADERS)
    assert found.status_code == 400 and where in found.json()["error"]["message"]


def test_errors_have_the_shape_and_words_that_claude_code_reads(app) -> None:
    found = ask(app, "/v1/messages", CLAUDE, headers={"x-api-key": "wrong"})
    assert found.status_code == 401 and found.json()["type"] == "error"
    assert found.json()["error"]["type"] == "authentication_error"
    long = send(app, "/v1/messages", CLAUDE | {"messages": [{"role": "user", "content": "word " * 600}]})
    assert long.status_code == 400 and long.json()["error"]["message"].startswith("prompt is too long: ")
    assert "-c" not in long.json()["error"]["message"]  # the demo model was made for no more than it has


# Open WebUI: the list of models, chats with usage, and titles and tags beside them.
WEBUI = {
    "stream": True, "model": "demo", "stream_options": {"include_usage": True}, "params": {}, "tool_ids": [],
    "features": {"web_search": False}, "chat_id": "c", "session_id": "s", "id": "i", "background_tasks": {},
    "reasoning": {"effort": "low"}, "logit_bias": {"5": 10}, "max_tokens": 64, "seed": -7, "stop": ["###"],
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi", **EPHEMERAL}]},
        {"role": "assistant", "content": ""}, {"role": "user", "content": "Again"},
    ],
}  # fmt: skip


def test_open_webui_chats_and_asks_for_titles(app, service) -> None:
    assert [model["id"] for model in send(app, "/v1/models").json()["data"]] == ["demo"]
    found = send(app, "/v1/chat/completions", WEBUI, **{"x-openwebui-user-name": "A%20B"})
    assert found.status_code == 200, found.text
    *_, usage, done = events_of(found)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] and done == "[DONE]"
    assert service.prompt.endswith("[user]Againlow") and service.jobs[-1].sampling.seed == (1 << 63) - 7
    for task in ("title_generation", "tags_generation", "follow_up_generation"):
        body = {"model": "demo", "stream": False, "max_completion_tokens": 1000, "messages": WEBUI["messages"][-1:],
                "metadata": {"task": task, "task_body": {}}}  # fmt: skip
        assert send(app, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "Yes."
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
    error = send(app, "/v1/chat/completions", WEBUI | {"messages": [picture]}).json()["error"]
    assert error["param"] == "messages[0].content[0]" and "text only" in error["message"]


# Continue: chats with tools, and gaps filled by /v1/completions with the model's own marks.
MARKS = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
         "<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```"]  # fmt: skip
CONTINUE_HEADERS = {"x-api-key": KEY, "api-key": KEY, "accept": "application/json"}


def test_continue_chats_and_fills_gaps(app, service) -> None:
    tool = {"type": "function", "function": {"name": "read_file", "description": "Reads.", "parameters": PATH}}
    body = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4096,
            "temperature": 0.5, "tools": [tool], "parallel_tool_calls": False, "stop": None,
            "messages": [{"role": "user", "content": "Hi"}]}  # fmt: skip
    service.script = '<tool_call>{"name": "read_file", "arguments": {"path": "a"}}</tool_call>' * 2
    chunks = events_of(send(app, "/v1/chat/completions", body, **CONTINUE_HEADERS))[:-1]
    parts = [call for c in chunks if c["choices"] for call in c["choices"][0]["delta"].get("tool_calls", [])]
    assert {part["index"] for part in parts} == {0} and parts[0]["function"]["name"] == "read_file"
    service.script = "a + b```"
    gap = {"model": "demo", "prompt": "<|fim_prefix|>def add(a, b): return <|fim_suffix|>\n<|fim_middle|>",
           "max_tokens": 4096, "temperature": 0.01, "stream": True, "stop": MARKS}  # fmt: skip
    found = send(app, "/v1/completions", gap, **CONTINUE_HEADERS)
    assert "".join(c["choices"][0]["text"] for c in events_of(found)[:-1]) == "a + b"
    error = send(app, "/v1/completions", gap | {"suffix": "x"}).json()["error"]
    assert error["param"] == "suffix"


def test_a_compressed_body_is_refused_in_words(app) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-encoding": "zstd"}
    found = ask(app, "/v1/responses", content=b"\x28\xb5\x2f\xfd", headers=headers)
    assert found.status_code == 415 and "zstd" in found.json()["error"]["message"]


def test_a_server_without_a_key_takes_what_clients_send_as_one(service) -> None:
    app = make_app(service, demo_model(TEMPLATE))
    assert ask(app, "/v1/models", headers={"authorization": "Bearer undefined", "x-api-key": ""}).status_code == 200
