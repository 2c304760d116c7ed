"""A chat over an engine: what is computed, what fits, what is forgotten."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import make_world, tokenizer_metadata

import pshard
from pshard.errors import UserError
from pshard.runtime.engine import Engine
from pshard.runtime.ranks.group import SHORT_BYTES
from pshard.runtime.sampling import Sampling
from pshard.session.chat.conversation import Conversation
from pshard.session.chat.thoughts import Sorter
from pshard.session.lead_ranks import LedEngine, follow

TURNS = "{% for m in messages %}<s>{{ m.role[0] }}{{ m.content }}</s>{% endfor %}"
TURNS += "{% if add_generation_prompt %}<s>a{% endif %}"
GREEDY = Sampling(temperature=0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    metadata = tokenizer_metadata() | {"tokenizer.chat_template": TURNS}
    world = make_world(tmp_path, metadata=metadata, n_layers=2)
    with pshard.load(world.model, vram=world.roomy, replan=True) as made:
        yield made


@pytest.fixture
def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of the engine."""
    counts: list[int] = []
    forward = engine.forward

    def counted(tokens, *more, **named):
        counts.append(len(tokens))
        return forward(tokens, *more, **named)

    monkeypatch.setattr(engine, "forward", counted)
    return counts


def say(chat: Conversation, text: str) -> str:
    return "".join(piece.text for piece in chat.answer(text))


def test_twenty_turns_compute_no_token_twice(engine: Engine, computed: list[int]) -> None:
    chat = Conversation(engine, TURNS, GREEDY, system="x", most=5)
    for turn in range(20):
        say(chat, f"No. {turn}")
    assert len(chat.messages) == 41 and chat.total.generated > 20
    assert sum(computed) == engine.lengths[0] == chat.context_used
    assert chat.total.reused > 10 * engine.lengths[0] / 2


def test_turns_give_the_text_of_all_of_them_in_one_prompt(engine: Engine) -> None:
    chat = Conversation(engine, TURNS, GREEDY, most=6)
    said = [say(chat, text) for text in ("Hello.", "And?", "Why?")]
    kept = engine.tokens()
    engine.reset()
    engine.forward(list(kept[:7]))
    again = list(engine.generate(list(kept[7:]), 3, GREEDY, text=False))
    last = list(chat._ids[len(kept) :])
    assert said[-1] and again[: len(last)] == last


def test_other_ranks_follow_every_step_of_a_conversation(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[bytes] = []
    monkeypatch.setattr(engine, "agree", lambda value: orders.append(pickle.dumps(value)))
    leader = LedEngine(engine)
    chat = Conversation(leader, TURNS, Sampling(temperature=1.0, seed=3), most=6)
    say(chat, "Hello.")
    assert all(len(order) < SHORT_BYTES for order in orders[-chat.last.generated + 1 :])  # each in one message
    say(chat, "And?")
    chat.undo()
    say(chat, "Why?")
    with pytest.raises(UserError, match="the context has"):
        say(chat, "a" * 600)
    with pytest.raises(UserError, match="token ids must be in"):
        leader.forward([100_000])
    engine.agree(None)
    with pshard.load(tmp_path / "models" / "tiny.gguf", vram=64) as other:
        follow(other, lambda: pickle.loads(orders.pop(0)))
        assert other.tokens() == engine.tokens() != () and not orders


def test_a_full_context_drops_the_oldest_turns_whole(engine: Engine) -> None:
    chat = Conversation(engine, TURNS, GREEDY, system="Be kind.", most=8)
    dropped = 0
    for turn in range(8):
        say(chat, f"{turn}" + "a" * 100)
        dropped += chat.last.dropped
    roles = [m["role"] for m in chat.messages]
    assert dropped and roles[0] == "system" and roles[1:3] == ["user", "assistant"] and roles[-1] == "assistant"
    assert chat.messages[1]["content"].startswith(f"{dropped}a") and engine.lengths[0] <= engine.longest


def test_a_message_that_does_not_fit_is_refused_and_the_chat_goes_on(engine: Engine) -> None:
    chat = Conversation(engine, TURNS, GREEDY, most=4)
    say(chat, "Hi")
    before = list(chat.messages)
    with pytest.raises(UserError, match=r"the message makes \d+ tokens, the context has 512"):
        say(chat, "a" * 600)
    assert chat.messages == before and say(chat, "Still there?") is not None


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(engine: Engine, computed: list[int]) -> None:
    chat = Conversation(engine, TURNS, GREEDY, most=50)
    pieces: list[str] = []
    for piece in chat.answer("Hi", lambda: sum(computed) > 12):
        pieces.append(piece.text)
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert 0 < chat.last.generated < 50
    say(chat, "Go on")
    assert sum(computed) == engine.lengths[0]


def test_what_is_undone_is_forgotten(engine: Engine) -> None:
    chat = Conversation(engine, TURNS, GREEDY, most=5)
    first = say(chat, "One")
    say(chat, "Two")
    assert chat.undo() == "Two" and chat.undo() == "One" and chat.undo() is None
    assert say(chat, "One") == first


def test_reasoning_and_words_for_tools_are_set_apart() -> None:
    def sort(*pieces: str | tuple[str, str], prompt: str = "") -> list[tuple[str, bool]]:
        sorter = Sorter(prompt)
        found = [
            p for piece in pieces for p in (sorter.push(*piece) if isinstance(piece, tuple) else sorter.push(piece))
        ]
        runs: list[tuple[str, bool]] = []
        for p in [*found, *sorter.finish()]:
            if runs and runs[-1][1] == p.aside:
                runs[-1] = (runs[-1][0] + p.text, p.aside)
            else:
                runs.append((p.text, p.aside))
        return runs

    assert sort("<th", "ink>we", "ll</thi", "nk>Yes <", "3") == [("<think>well</think>", True), ("Yes <3", False)]
    assert sort("hm</think>Yes", prompt="<|a|><think>\n") == [("hm</think>", True), ("Yes", False)]
    assert sort("a<tool_call>{}</tool_call>") == [("a", False), ("<tool_call>{}</tool_call>", True)]
    channel = [("", "<|channel|>"), "analysis", ("", "<|message|>"), "hm", ("", "<|start|>"), "assistant"]
    channel += [("", "<|channel|>"), "final", ("", "<|message|>"), "Yes"]
    assert sort(*channel) == [("\nhm", True), ("Yes", False)]
