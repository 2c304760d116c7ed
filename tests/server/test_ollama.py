"""Ollama's interface over the demo model: lines, options, tools, formats, thinking, what is told of the model."""

import json
from dataclasses import replace

import pytest
from clients.test_agents import PATH, TEMPLATE, Scripted
from http_client import ask
from small_service import demo_model

from pshard.server.http.guards import Door
from pshard.server.routes.make_app import make_app
from pshard.server.shapes.show_ollama import show_count

HI = {"model": "demo", "messages": [{"role": "user", "content": "ROMEO:"}], "options": {"num_predict": 8}}
PROMPT = {"model": "demo:latest", "prompt": "ROMEO:", "options": {"num_predict": 8, "temperature": 0}}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
READ = {"type": "function", "function": {"name": "read_file", "description": "Reads.", "parameters": PATH}}


def lines_of(found) -> list[dict]:
    assert found.status_code == 200, found.text
    assert found.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in found.text.splitlines()]  # an empty line would end Ollama's clients


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def thinker(scripted):
    return make_app(scripted, demo_model(TEMPLATE))


@pytest.mark.parametrize(("path", "body", "read"), [
    ("/api/chat", HI, lambda told: told["message"]["content"]),
    ("/api/generate", PROMPT, lambda told: told["response"]),
    ("/api/generate", PROMPT | {"raw": True}, lambda told: told["response"]),
])  # fmt: skip
def test_an_answer_streams_by_lines_unless_it_is_to_be_whole(app, path, body, read) -> None:
    body = body | {"options": body["options"] | {"temperature": 0}}
    whole = ask(app, path, body | {"stream": False}).json()
    *lines, last = lines_of(ask(app, path, body))
    assert read(whole) and "".join(map(read, lines)) == read(whole) and read(last) == ""
    assert not any(line["done"] for line in lines) and last["done"] and last["done_reason"] == "length"
    for told in (whole, last):
        assert told["eval_count"] == 8 and told["prompt_eval_count"] > 1 and told["model"] == "demo"
        assert told["total_duration"] >= told["prompt_eval_duration"] + told["eval_duration"] - 1 > 0
        assert told["created_at"].endswith("Z")


def test_options_are_kept_by_their_names(app, service) -> None:
    options = {"seed": 7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "temperature": 0.3, "repeat_penalty": 1.2,
               "repeat_last_n": 9, "stop": ["\n"], "num_predict": -2, "num_ctx": 512, "num_gpu": 99, "num_thread": 4,
               "mirostat": 0, "tfs_z": 1, "use_mmap": True}  # fmt: skip
    assert ask(app, "/api/chat", HI | {"options": options, "stream": False}).status_code == 200
    job = service.jobs[-1]
    drawn = job.sampling
    assert (drawn.seed, drawn.top_k, drawn.top_p, drawn.min_p, drawn.temperature) == (7, 5, 0.5, 0.1, 0.3)
    assert (drawn.penalties.repeat, drawn.penalties.last) == (1.2, 9)
    assert job.most == 512 - len(job.prompt) + 1


@pytest.mark.parametrize(("path", "more", "where"), [
    ("/api/chat", {"options": {"num_ctx": 4096}}, "options.num_ctx is at most 512"),
    ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"),
    ("/api/chat", {"options": {"max_tokens": 9}}, "options.max_tokens is num_predict here"),
    ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature"),
    ("/api/chat", {"temperature": 0.5}, "temperature is options.temperature here"),
    ("/api/chat", {"format": "xml"}, "format"),
    ("/api/chat", {"format": {"type": "objct"}}, "format cannot be kept"),
    ("/api/chat", {"think": True}, "think cannot be kept"),
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]}, "messages[0].images"),
    ("/api/chat", {"messages": [], "keep_alive": 0}, "keep_alive"),
    ("/api/generate", {"images": ["AA=="]}, "images"), ("/api/generate", {"context": [1, 2]}, "context"),
    ("/api/generate", {"suffix": "x"}, "suffix"), ("/api/generate", {"raw": True, "system": "s"}, "raw"),
    ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_its_name(app, path, more, where) -> None:
    found = ask(app, path, (HI if path == "/api/chat" else PROMPT) | more)
    assert found.status_code == 400 and found.json()["error"].startswith(where), found.text


def test_a_model_that_is_not_here_is_a_404_in_words(app) -> None:
    for path in ("/api/chat", "/api/generate", "/api/show"):
        found = ask(app, path, {"model": "other:7b"})
        assert found.status_code == 404 and "other:7b" in found.json()["error"]


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings", "/api/pull", "/api/create", "/api/copy"])
def test_what_only_ollama_does_is_refused_with_what_does_it_here(app, path) -> None:
    assert "here" in (told := ask(app, path, {"model": "demo", "input": "a"}).json()["error"]) or "pshard" in told
    assert "pshard rm" in ask(app, "/api/delete", method="DELETE").json()["error"]


def test_a_schema_and_the_word_json_are_followed(app) -> None:
    for path, body in (("/api/chat", HI), ("/api/generate", PROMPT)):
        told = ask(app, path, body | {"format": CITY, "options": {"num_predict": 60}, "stream": False}).json()
        text = told["message"]["content"] if path == "/api/chat" else told["response"]
        assert text in ('{"city":"Rome"}', '{"city":"Bern"}') and told["done_reason"] == "stop"
    told = ask(app, "/api/chat", HI | {"format": "json", "stream": False}).json()
    assert told["message"]["content"].startswith("{")


def test_nothing_to_say_tells_that_the_model_is_there(app, service) -> None:
    before = len(service.jobs)
    for path, body in (("/api/generate", {"model": "demo"}), ("/api/chat", {"model": "demo", "messages": []})):
        told = ask(app, path, body | {"keep_alive": "5m"}).json()
        assert told["done"] and told["done_reason"] == "load"
    assert len(service.jobs) == before


def test_thinking_and_calls_are_told_apart(thinker, scripted) -> None:
    scripted.script = '<think>hm</think>Yes.<tool_call>{"name": "read_file", "arguments": {"path": "b"}}</tool_call>'
    body = HI | {"tools": [READ], "think": "high", "options": {}}
    call = {"index": 0, "name": "read_file", "arguments": {"path": "b"}}
    message = ask(thinker, "/api/chat", body | {"stream": False}).json()["message"]
    assert message == {"role": "assistant", "content": "Yes.", "thinking": "hm", "tool_calls": [{"function": call}]}
    assert scripted.prompt.endswith("(read_file)high")
    *lines, last = [line["message"] for line in lines_of(ask(thinker, "/api/chat", body))]
    assert "".join(line.get("thinking", "") for line in lines) == "hm"
    assert [c for line in lines for c in line.get("tool_calls", [])] == [{"function": call}]
    assert last == {"role": "assistant", "content": ""}


def test_a_conversation_with_calls_comes_back(thinker, scripted) -> None:
    """As Ollama's clients keep it: arguments are objects, results name the tool, thoughts have their own field."""
    call = {"function": {"name": "read_file", "arguments": {"path": "a"}}}
    history = [
        *HI["messages"],
        {"role": "assistant", "content": "", "thinking": "so", "tool_calls": [call]},
        {"role": "tool", "tool_name": "read_file", "content": "text of a"},
    ]
    lines_of(ask(thinker, "/api/chat", HI | {"messages": history, "tools": [READ]}))
    assert "<think>so</think>" in scripted.prompt and '"path": "a"' in scripted.prompt
    assert "[tool]text of a" in scripted.prompt


def test_a_cut_call_is_no_call_and_a_failing_answer_ends_in_an_error_line(thinker, scripted, service) -> None:
    scripted.script = '<tool_call>{"name": "read_file", "arguments": {"pa'
    told = ask(thinker, "/api/chat", HI | {"tools": [READ], "options": {"num_predict": 20}, "stream": False}).json()
    assert "tool_calls" not in told["message"]
    app = make_app(replace_submit(service), demo_model())
    *_, last = lines_of(ask(app, "/api/chat", HI))
    assert last == {"error": "a step failed"}


def replace_submit(service):
    from pshard.server.jobs import Ended

    class Failing(type(service)):
        def __init__(self) -> None: ...

        def submit(self, job, listener) -> None:
            listener.put(Ended("error", "a step failed"))
            listener.wake()

    return Failing()


def test_logprobs_stand_beside_the_text_of_each_line(app) -> None:
    *lines, _ = lines_of(ask(app, "/api/generate", PROMPT | {"logprobs": True, "top_logprobs": 2}))
    told = [entry for line in lines for entry in line["logprobs"]]
    assert len(told) == 8 and all(len(entry["top_logprobs"]) == 2 for entry in told)


def test_the_model_is_told_as_lists_and_details(service) -> None:
    model = replace(demo_model(TEMPLATE), nbytes=1000, family="llama", weights=32_760_000_000, quant="Q4_0")
    app = make_app(service, model, aliases=("other",))
    tags = ask(app, "/api/tags").json()["models"]
    assert [tag["name"] for tag in tags] == ["demo", "other"] and len(tags[0]["digest"]) == 64
    details = tags[0]["details"]
    assert (details["family"], details["parameter_size"], details["quantization_level"]) == ("llama", "32.8B", "Q4_0")
    (loaded,) = ask(app, "/api/ps").json()["models"]
    assert loaded["size_vram"] == 1000 and loaded["context_length"] == 512
    shown = ask(app, "/api/show", {"name": "demo:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"] and shown["template"] == TEMPLATE
    assert shown["model_info"]["llama.context_length"] == 512 and shown["parameters"] == "num_ctx 512"
    version = ask(app, "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # below it VS Code's Copilot refuses to talk


@pytest.mark.parametrize(
    ("weights", "told"),
    [(999, "999"), (134_515_008, "135M"), (999_499_999, "999M"), (999_500_000, "1B"), (32_763_876_352, "32.8B")],
)
def test_a_count_of_weights_has_three_figures_and_a_letter(weights, told) -> None:
    assert show_count(weights) == told


def test_the_key_guards_ollamas_paths_too(service) -> None:
    app = make_app(service, demo_model(), door=Door(keys=("k",)))
    found = ask(app, "/api/tags")
    assert found.status_code == 401 and isinstance(found.json()["error"], str)


# As front ends send them.
def test_open_webui_lists_shows_and_chats(thinker, scripted) -> None:
    assert ask(thinker, "/api/tags").json()["models"][0]["model"] == "demo"
    assert ask(thinker, "/api/ps").status_code == ask(thinker, "/api/version").status_code == 200
    body = {"model": "demo", "stream": True, "keep_alive": "5m", "format": "", "think": True,
            "options": {"temperature": 0.7, "num_predict": 64, "seed": 3, "stop": ["###"], "num_ctx": 512},
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]}  # fmt: skip
    *lines, last = lines_of(ask(thinker, "/api/chat", body, headers={"x-openwebui-user-name": "A"}))
    assert "".join(line["message"]["content"] for line in lines) == "Yes." and last["done_reason"] == "stop"
    assert scripted.prompt.startswith("[system]Be kind.[user]Hi")


def test_continue_chats_with_tools_and_asks_what_the_model_has_room_for(thinker, scripted) -> None:
    shown = ask(thinker, "/api/show", {"name": "demo"}).json()
    key, value = shown["parameters"].split("\n")[0].split()
    assert key == "num_ctx"
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "keep_alive": 1800, "stream": False,
            "tools": [READ], "options": {"num_predict": 400, "num_ctx": int(value), "stop": ["</s>"]}}  # fmt: skip
    scripted.script = '<tool_call>{"name": "read_file", "arguments": {"path": "a"}}</tool_call>'
    (call,) = ask(thinker, "/api/chat", body).json()["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"path": "a"}
