"""The chat as people use it: piped lines in process, and a terminal that a script plays."""

import io
import json
import os
import re
import sys
import termios
from argparse import Namespace
from pathlib import Path

import pytest
from cli_world import World, make_world, tokenizer_metadata
from warm_python import WarmProcess, run_warm

from pshard.commands.everyday.chat_commands import fit_status
from pshard.commands.everyday.word_wrap import WordWrap, count_columns
from pshard.commands.program import one_program

AT_A_TERMINAL = """  # as a process that a terminal's shell has started
import fcntl, os, runpy, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("pshard.commands.program.one_program", run_name="__main__", alter_sys=True)
"""
TURNS = "{% for m in messages %}<s>{{ m.role[0] }}{{ m.content }}</s>{% endfor %}<s>a"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, metadata=tokenizer_metadata() | {"tokenizer.chat_template": TURNS})


def chat(world: World, lines: str, monkeypatch: pytest.MonkeyPatch, *flags: str, command: str = "chat") -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return one_program.main([command, str(world.model), "--temp", "0", "-n", "4", *flags])


def test_piped_lines_are_messages_and_commands(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    kept = tmp_path / "chat.json"
    lines = (
        f"Hi\nYou\\\nand I\n/stats\n/system Be brief.\n/temp 0.5\n/save {kept}\n/undo\n/reset\n/load {kept}\n/stats\n"
    )
    assert chat(world, lines + "/temp hot\n/nope\n/save\n/help\n/exit\nnot read\n", monkeypatch) == 0
    said = capsys.readouterr().err
    messages = json.loads(kept.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "Be brief." and messages[3]["content"] == "You\nand I"
    for words in (
        r"[\d.]+ tok/s, prompt \d+ tok/s \| \d+ of 512 tokens of context \| \d+% of prompts from the cache",
        "the temperature is 0.5", "5 messages are in", "forgotten: You", "all turns are forgotten",
        "5 messages are taken", "'hot' is no temperature", "there is no /nope", "no file is named; say /save FILE",
        "/load   FILE",
    ):  # fmt: skip
        assert re.search(words, said), words


def test_a_single_turn_answers_the_prompt_of_a_flag(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert chat(world, "not read", monkeypatch, "-st", "-sys", "Be brief.", "-p", "Hi") == 0
    first = capsys.readouterr().out
    assert chat(world, "", monkeypatch, "-st", "-sys", "Be brief.", "-p", "Hi", command="run") == 0
    assert capsys.readouterr().out == first != ""


def test_another_answer_and_a_folder_that_is_not_there(world: World, tmp_path, monkeypatch, capsys) -> None:
    lines = f"/regen\nHi\n/regen\n/stats\n/save {tmp_path / 'new' / 'chat.json'}\n/bye\nnot read\n"
    assert chat(world, lines, monkeypatch) == 0
    said = capsys.readouterr()
    first, again = said.out.splitlines()
    assert first == again and "there is no message to say again" in said.err and "the same answer" in said.err
    assert "so far 8 tokens of answers" in said.err  # both were made
    assert "there is no folder" in said.err and not (tmp_path / "new").exists()  # nobody typed yes


def test_a_status_fits_any_window() -> None:
    stats = Namespace(rate=12.5, prompt_rate=100.0, prompt=10, reused=5)
    said = Namespace(last=stats, total=stats, context_used=40, engine=Namespace(longest=8192))
    whole = fit_status(said, 200)
    assert whole.count(" | ") == 2 and "40 of 8192 tokens of context" in fit_status(said, 60)
    for width in range(1, 100):
        assert len(fit_status(said, width)) <= width and whole.startswith("12.5")


def test_lines_break_between_words_however_a_text_comes() -> None:
    text = "The quick brown fox\njumps over a laziest-of-all-dogs today. 日本語の文章です  end"
    for size in (1, 3, len(text)):
        wrap = WordWrap(lambda: 12)
        told = "".join(wrap.push(text[i : i + size]) for i in range(0, len(text), size)) + wrap.finish()
        assert told.replace("\n", " ").split() == text.replace("\n", " ").split() or "日本" in told
        lines = told.split("\n")
        assert lines[:4] == ["The quick", "brown fox", "jumps over a", "laziest-of-all-dogs"]
        assert all(count_columns(line) <= 12 or " " not in line.strip() for line in lines)
        assert "".join(told.split()) == "".join(text.split())


def test_thinking_is_left_out_where_the_template_can(world: World, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    flags = ["-st", "-p", "Hi", "--reasoning-budget"]
    assert chat(world, "", monkeypatch, *flags, "0") == 2
    assert "cannot leave thinking out" in capsys.readouterr().err
    template = TURNS + "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
    make_world(world.model.parents[1], metadata=tokenizer_metadata() | {"tokenizer.chat_template": template})
    said = []
    for budget in ("-1", "0"):
        assert chat(world, "/stats\n", monkeypatch, *flags[1:], budget) == 0
        said.append(int(re.search(r"(\d+) of 512 tokens of context", capsys.readouterr().err)[1]))
    assert said[1] - said[0] == len("no thoughts")
    assert one_program.main(["run", str(world.model), "-p", "Hi", "--reasoning-budget", "0"]) == 2
    assert "is for chats" in capsys.readouterr().err


def test_a_text_of_r_is_the_last_word_of_an_answer(world: World, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("llguidance", reason="makes the model say what is known")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAgain\n"))
    words = ["chat", str(world.model), "--grammar", 'root ::= "one STOP two"', "-r", "STOP"]
    assert one_program.main(words) == 0
    said = capsys.readouterr()
    assert said.out == "one STOP\none STOP\n" and "(stopped)" not in said.err


def test_files_that_are_no_chats_are_refused_and_the_chat_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "b.json").write_text('{"messages": [{"role": "dog", "content": "woof"}]}')
    lines = "".join(f"/load {tmp_path}/{name}.json\n" for name in "abc")
    assert chat(world, lines + "/stats\n", monkeypatch) == 0
    said = capsys.readouterr().err
    assert "is no chat: it has no list" in said and "a role of system, user" in said and "cannot read" in said
    assert "0 of 512 tokens of context" in said


@pytest.mark.slow
def test_a_chat_over_several_devices_says_what_one_device_says(world: World) -> None:
    """The other ranks follow: no flag, command or sampled token is theirs to decide."""

    def said(command: str, *flags: str) -> tuple[str, str]:
        words = [sys.executable, "-m", "pshard.commands.program.one_program", command, str(world.model), *flags]
        lines = "How are you?\n/temp 1.5\nAgain\n/undo\nOnce more\n/stats\n"
        more = ["-n", "8", "--temp", "0.7", "-s", "5", "-p", "Hi"]
        done = run_warm([*words, *more], input=lines)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    alone, _ = said("chat", "--vram", "64")
    together, beside = said("run", "-cnv", "--vram", "64,64", "-sm", "layer", "-ts", "3,1")
    assert together == alone != ""
    assert beside.count("forgotten: Again") == 1 and beside.count("tok/s, prompt") == 1


def test_a_chat_refuses_flags_that_it_would_ignore(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    for flag in ("--prompt-cache", "--record-routing", "--deterministic"):
        value = [str(tmp_path / "file")] * (flag != "--deterministic")
        assert chat(world, "Hi\n", monkeypatch, "-cnv", flag, *value, command="run") == 2
        assert f"{flag} is for one prompt, and this is a chat" in capsys.readouterr().err


def test_the_system_s_words_are_not_dropped_without_a_chat(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for flag, prompt in (("-no-cnv", "Hi"), ("--tokens", "1,2")):
        assert chat(world, "", monkeypatch, "-sys", "Be brief.", flag, "-p", prompt, command="run") == 2
        assert f"-sys is for a chat; leave out {flag}" in capsys.readouterr().err


def test_lines_that_are_no_text_are_refused_in_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for errors in ("strict", "surrogateescape"):  # the latter is what Python takes in the C locale
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Caf\xe9\n"), "utf-8", errors))
        for command in (["chat"], ["run", "-no-cnv"]):
            sys.stdin.seek(0)
            assert one_program.main([*command, str(world.model), "-n", "2"]) == 2
            assert "is not UTF-8" in capsys.readouterr().err
    assert one_program.main(["run", str(world.model), "-n", "2", "-p", "Caf\udce9"]) == 2
    assert "-p is not UTF-8" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("split", [[], ["--vram", "64,64", "-sm", "layer"]], ids=["one", "two"])
def test_a_terminal_chats_stops_an_answer_and_goes_on(world: World, split: list[str]) -> None:
    pexpect = pytest.importorskip("pexpect", reason="plays the terminal")
    from pexpect.fdpexpect import fdspawn

    words = ["run", str(world.model), "--temp", "0", "--logit-bias", "257-inf", "-c", "512", *split]  # none ends itself
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (30, 120))
    with open(theirs, "rb+", buffering=0) as end:
        process = WarmProcess([sys.executable, "-c", AT_A_TERMINAL, *words], os.environ | {"TERM": "xterm"}, *[end] * 3)
    child = fdspawn(ours, encoding="utf-8", timeout=60)

    def say(words: str) -> None:
        """Type at the next prompt, which asks the terminal where its cursor is."""
        child.expect_exact("\x1b[6n")
        child.send("\x1b[3;1R")
        child.send(words)

    try:
        child.expect("chat with .*Ctrl-D ends it")
        say("Hello\r")
        child.expect("the context is full, so the answer ends here")
        say("/temp 2\r")
        child.expect("the temperature is 2")
        say("half a line\x03")
        child.expect("Ctrl-D ends the chat")
        say("More\r")
        child.expect(r"\?2004l.{20}")  # the answer has begun
        child.send("\x03")
        child.expect("the 1 oldest turn of the chat went")
        child.expect_exact("(stopped)")
        say("")
        child.expect("of 512 tokens of context .*from the cache")  # the status line
        child.send("/stats\r")
        child.expect("so far")
        say("\x04")
        child.expect(pexpect.EOF)
        assert process.wait(60) == 0
    finally:
        process.kill()
        child.close()
