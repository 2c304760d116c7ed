"""Programs of others against the server, each where it is installed: langchain-openai, litellm, llm, ollama,
lm-evaluation-harness."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HI = [{"role": "user", "content": "ROMEO:"}]


def test_langchain_chats_streams_and_calls_tools(url) -> None:
    langchain = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed; scripts/test-clients installs it"
    )
    chat = langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="a-key", model="demo", temperature=0, max_tokens=8)
    whole = chat.invoke("ROMEO:")
    assert whole.content and whole.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream("ROMEO:")) == whole.content
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
    tool["function"]["parameters"]["additionalProperties"] = False  # type: ignore[index]
    forced = chat.bind_tools([tool], tool_choice="get_time").bind(max_tokens=40).invoke("what time is it?")
    assert forced.tool_calls[0]["name"] == "get_time"


def test_litellm_completes_and_streams(url) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed; scripts/test-clients installs it")
    ask = {"model": "openai/demo", "api_base": f"{url}/v1", "api_key": "a-key", "messages": HI, "max_tokens": 8}
    whole = litellm.completion(**ask, temperature=0).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, temperature=0, stream=True)]
    assert whole and "".join(parts) == whole
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**ask, n=99)


def test_the_llm_command_asks(url, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="llm is not installed; scripts/test-clients installs it")
    entry = f"- model_id: served\n  model_name: demo\n  api_base: {url}/v1\n  api_key_name: served\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    (tmp_path / "keys.json").write_text(json.dumps({"served": "a-key"}))
    command = [sys.executable, "-m", "llm", "-m", "served", "ROMEO:", "-o", "max_tokens", "8", "-o", "temperature", "0"]
    place = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    for more in ([], ["--no-stream"]):
        found = subprocess.run([*command, *more], env=place, capture_output=True, text=True, timeout=120)
        assert found.returncode == 0 and found.stdout.strip(), found.stderr


def test_ollamas_own_client_lists_chats_streams_and_calls(url) -> None:
    reason = "ollama is not installed; scripts/test-clients installs it"
    ollama = pytest.importorskip("ollama._client", reason=reason)  # a folder of that name may lie beside the checkout
    client = ollama.Client(host=url, headers={"authorization": "Bearer a-key"})
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    shown = client.show(listed.model)
    assert listed.model == loaded.model == "demo" and "completion" in shown.capabilities
    options = {"temperature": 0, "num_predict": 8}
    whole = client.chat("demo", HI, options=options)
    parts = list(client.chat("demo", HI, options=options, stream=True))
    assert whole.message.content == "".join(part.message.content for part in parts) and parts[-1].done_reason
    told = client.generate("demo:latest", "ROMEO:", options=options, raw=True)
    assert told.response and told.eval_count == 8
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    made = client.chat("demo", HI, format=schema, options={"num_predict": 40})
    assert json.loads(made.message.content).keys() == {"ok"}

    def get_time(city: str) -> str:
        """The time.

        Args:
            city: where
        """
        return city

    assert client.chat("demo", HI, tools=[get_time], options=options).message.role == "assistant"
    with pytest.raises(ollama.ResponseError) as refused:
        client.embed("demo", "text")
    assert "embeddings are not made here" in refused.value.error
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat("other", HI)
    assert refused.value.status_code == 404
    assert client.generate("demo", "").done_reason == "load"


QUESTIONS = [
    {"context": "ROMEO:\nI will not", "choices": [" go", " zebra", " the"], "answer": 0},
    {"context": "What say you,", "choices": [" my lord", " xylophone"], "answer": 0},
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A task of two questions, of which each choice is scored, and one whose answers are made."""
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    place = tmp_path / "questions.jsonl"
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {place}\ntest_split: test\n"
    scored = 'output_type: multiple_choice\ndoc_to_text: "{{context}}"\ndoc_to_choice: "{{choices}}"\n'
    (tmp_path / "bard.yaml").write_text(
        f"task: bard\n{data}{scored}doc_to_target: answer\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n"
    )
    made = 'output_type: generate_until\ndoc_to_text: "{{context}}"\ndoc_to_target: "{{choices[0]}}"\n'
    rules = "generation_kwargs:\n  until: ['\\n']\n  max_gen_toks: 8\n  do_sample: false\n"
    rules += "metric_list:\n  - metric: exact_match\n"
    (tmp_path / "poet.yaml").write_text(f"task: poet\n{data}{made}{rules}")
    return tmp_path


def evaluate(model: str, base: str, task: str, tasks: Path, **more: object) -> list[dict]:
    harness = pytest.importorskip(
        "lm_eval", reason="lm-evaluation-harness is not installed; scripts/test-clients installs it"
    )
    from lm_eval.tasks import TaskManager

    found = harness.simple_evaluate(
        model=model,
        model_args={"model": "demo", "base_url": base, "max_length": 512, "auth_token": "a-key", **more},
        tasks=[task],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return found["samples"][task]


def test_the_harness_scores_as_the_engine_does(url, service, tasks, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    samples = evaluate("local-completions", f"{url}/v1/completions", "bard", tasks, tokenizer_backend="remote")
    for sample in samples:
        question = sample["doc"]
        for choice, found in zip(question["choices"], sample["filtered_resps"]):
            context = service.engine.tokenizer.encode(question["context"])
            ids = service.engine.tokenizer.encode(question["context"] + choice)
            service.engine.reset()
            rows = torch.log_softmax(service.engine.forward(ids, all_logits=True).double(), 1)
            own = [float(rows[i - 1, ids[i]]) for i in range(len(context), len(ids))]
            assert float(found[0]) == pytest.approx(sum(own), abs=1e-5)
            greedy = all(int(rows[i - 1].argmax()) == ids[i] for i in range(len(context), len(ids)))
            assert (found[1] is True or found[1] == "True") == greedy


def test_the_harness_asks_chats(url, tasks, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; scripts/test-clients installs it")
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args={"model": "demo", "base_url": f"{url}/v1/chat/completions"},
        tasks=["poet"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        apply_chat_template=True,
        log_samples=True,
        bootstrap_iters=0,
    )
    assert len(found["samples"]["poet"]) == len(QUESTIONS)
    assert all(isinstance(sample["resps"][0][0], str) for sample in found["samples"]["poet"])
