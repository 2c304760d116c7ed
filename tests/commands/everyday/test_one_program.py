"""One program whose first word says what to do, and flags as people of llama.cpp know them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pshard.commands import cli_bench, cli_plan, cli_run
from pshard.commands.parsing.text_flags import _unescape, read_given
from pshard.commands.program import cli_completion, one_program
from pshard.errors import UserError
from pshard.session.find_model import resolve_model

HEAVY = {"torch", "pulp", "numpy", "scipy", "matplotlib", "tokenizers", "gguf", "rich", "prompt_toolkit", "jinja2"}


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pshard.commands.program.one_program import COMMANDS, main\n"
        "assert main(['--help']) == 0\n"
        f"assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)\n"
        "for name in COMMANDS:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        f"    assert not {HEAVY} & set(sys.modules), (name, {HEAVY} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: pshard {name} " in done.stdout for name in one_program.COMMANDS)


def test_version_names_commit_torch_and_driver(capsys: pytest.CaptureFixture) -> None:
    assert one_program.main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["pshard", "torch", "driver", "Python"]
    assert "commit" in lines[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pln"], "there is no command 'pln'; did you mean pshard plan?"),
        (["model.gguf"], "to run a model: pshard run model.gguf"),
        (["zzz"], "there are run, chat, plan"),
        (["run", "x.gguf", "--tmep", "1"], "there is no flag --tmep (did you mean --temp?); see pshard run --help"),
        (["run", "x.gguf", "y.gguf"], "'y.gguf' is one word too many"),
        (["run", "x.gguf", "-m", "y.gguf", "-p", "a"], "x.gguf and y.gguf are two models; give one"),
        (["run", "-hf", "x/y", "-m", "y.gguf", "-p", "a"], "y.gguf and x/y are two models; give one"),
        (["run", "-ngl", "99", "-m", "x.gguf"], "-ngl: pshard decides this; use --vram"),
        (["plan", "x.gguf", "--n-cpu-moe=9"], "--n-cpu-moe: pshard decides this; use --vram"),
        (["chat", "x.gguf", "-ot", "exps=CPU"], "-ot: pshard decides this; use --vram"),
        (["bench", "x.gguf", "-t", "4"], "-t: the profile knows how many threads are fastest here"),
        (["run", "x.gguf", "--temp", "-1"], "--temp is -1.0"),
        (["run", "x.gguf", "--top-p", "7"], "--top-p is 7.0"),
        (["run", "x.gguf", "--samplers", "top_k;xtc"], "--samplers: there is no 'xtc'"),
        (["run", "x.gguf", "--sampling-seq", "kz"], "--sampling-seq: there is no sampler 'z'"),
        (["run", "x.gguf", "-l", "word+1"], "'word+1' is not a token id with what to add"),
        (["run", "x.gguf", "--grammar", "a", "-j", "{}"], "--grammar and --json-schema exclude each other"),
        (["run", "x.gguf", "--grammar-file", "none"], "--grammar-file: cannot read none"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(capsys: pytest.CaptureFixture, words: list[str], told: str) -> None:
    assert one_program.main(words) == 2
    said = capsys.readouterr()
    assert told in said.err and said.err.count("\n") == 1 and said.out == ""


def test_a_flag_is_not_read_as_a_shorter_one_with_a_value() -> None:
    parser = cli_run.make_parser()
    assert parser.parse_args(["-n5", "-p=-x"]).predict == 5
    assert parser.parse_args(["-p=-x"]).prompt == "-x"


def test_flags_that_change_nothing_are_taken_with_a_line_each(capsys: pytest.CaptureFixture) -> None:
    args = cli_bench.make_parser().parse_args(["-fa", "on", "m.gguf", "--mlock", "--no-mmap", "-p", "8"])
    assert (args.reference, args.n_prompt) == ("m.gguf", (8,))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["-fa", "--mlock", "--no-mmap"]
    assert all("changes nothing: " in line for line in lines)


def test_flags_about_memory_and_logs_are_answered_by_their_names(capsys: pytest.CaptureFixture) -> None:
    words = [
        "m.gguf",
        "-v",
        "-lv",
        "3",
        "--cache-reuse",
        "256",
        "-dio",
        "--no-repack",
        "-nocb",
        "--log-file",
        "x",
        "-p",
        "a",
    ]
    args = cli_run.make_parser().parse_args(words)
    assert (args.reference, args.prompt) == ("m.gguf", "a")
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in told] == [
        "-v", "-lv", "--cache-reuse", "-dio", "--no-repack", "-nocb", "--log-file"
    ]  # fmt: skip


def test_sizes_are_read_as_people_write_them() -> None:
    parse = cli_run.make_parser().parse_args
    assert parse(["--vram", "8GB"]).vram == parse(["--vram", "8192 mb"]).vram == (8192,)
    assert [parse(["-c", size]).ctx_size for size in ("0", "4k", "32K", "512")] == [0, 4096, 32768, 512]
    assert cli_plan.make_parser().parse_args(["-c", "4k"]).ctx_size == 4096
    for words in (["-c", "4kb"], ["-c", "-1"], ["--vram", "8TB"]):
        with pytest.raises(UserError, match=words[1]):
            parse(words)


def test_devices_are_listed_as_llama_cpp_lists_them(capsys: pytest.CaptureFixture) -> None:
    for command in ("run", "chat", "serve", "bench"):
        with pytest.raises(SystemExit) as ended:
            one_program.main([command, "--list-devices"])
        assert ended.value.code == 0
        first, device, *_ = capsys.readouterr().out.splitlines()
        assert first == "Available devices:" and re.fullmatch(r"  \w+: .+ \(\d+ MiB.*\)", device)


def test_a_model_may_stand_anywhere_among_the_flags() -> None:
    for words in (["a.gguf", "--vram", "6"], ["--vram", "6", "a.gguf"], ["--explain", "a.gguf", "--vram", "6"]):
        assert cli_plan.make_parser().parse_args(words).reference == "a.gguf"


def test_what_is_here_is_taken_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org" / "repo").mkdir(parents=True)
    assert resolve_model("org/repo") == Path("org/repo") and resolve_model("~/x.gguf") == tmp_path / "x.gguf"
    assert resolve_model("some/missing.gguf") == Path("some/missing.gguf")


def test_escapes_mean_what_they_do_in_c() -> None:
    assert _unescape(r"a\nb\t\"\x41\\n\q") == 'a\nb\t"A\\n\\q'


@pytest.mark.parametrize("flags, text", [([], "a\nb"), (["-e"], "a\nb"), (["--no-escape"], r"a\nb")])
def test_escapes_of_a_prompt_are_read_unless_told_otherwise(flags: list[str], text: str) -> None:
    assert read_given(cli_run.make_parser().parse_args(["-p", r"a\nb", *flags])) == text


@pytest.mark.parametrize("shell", cli_completion.SHELLS)
def test_completion_knows_commands_flags_and_choices(shell: str, capsys: pytest.CaptureFixture) -> None:
    assert one_program.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("doctor", "top-k", "q8_0", "split-mode"))
    assert "%(" not in script  # help as it is shown, not as argparse has it


@pytest.mark.parametrize("shell", cli_completion.SHELLS)
def test_every_program_that_is_installed_is_completed(shell: str, capsys: pytest.CaptureFixture) -> None:
    root = Path(__file__).resolve().parents[3]
    programs = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert one_program.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert not [name for name in programs if not re.search(rf"\b{name}(?![\w-])", out)]


def test_bash_completes_commands_and_flags() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "pshard.commands.program.one_program", "completion", "bash"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    for words, wanted in (
        (("pshard", "pr"), "profile"), (("pshard", "plan", "--expl"), "--explain"),
        (("pshard-run", "-ctk", "q8"), "q8_0"), (("pshard", "completion", "z"), "zsh"),
    ):  # fmt: skip
        line = " ".join(f"'{word}'" for word in words)
        asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _pshard; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [wanted], done
