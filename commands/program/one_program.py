"""pshard: one program whose first word says what to do. Only what that word needs is imported."""

import sys
from importlib import import_module

from pshard.commands.command_line import run_cli
from pshard.commands.parsing.command_parser import called_as
from pshard.errors import UserError

COMMANDS = {  # its module, and what it does
    "run": ("cli_run", "run a model: profiles and plans first where that was not done yet"),
    "chat": ("everyday.cli_chat", "talk with a model in several turns"),
    "plan": ("cli_plan", "decide where every part of a model lives, and say how fast that will be"),
    "profile": ("cli_profile", "measure this machine"),
    "serve": ("everyday.cli_serve", "serve a model to many at once, as OpenAI's API"),
    "bench": ("cli_bench", "measure a plan beside its prediction and other strategies"),
    "report": ("cli_report", "draw figures and a page from measurements, plans and profiles"),
    "models": ("everyday.cli_models", "list models that were planned or fetched, with size and predicted rates"),
    "pull": ("everyday.cli_pull", "fetch a model of the Hub"),
    "pack": ("everyday.cli_pack", "write what runs read from disk as it is computed with, once"),
    "ps": ("everyday.cli_ps", "what servers hold, and what they do now"),
    "rm": ("everyday.cli_rm", "delete a model that was fetched from the Hub"),
    "doctor": ("everyday.cli_doctor", "check this machine, and say what to do about what is wrong"),
    "completion": ("program.cli_completion", "print a script that completes commands and flags in bash, zsh or fish"),
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the program; returns the exit code."""
    return run_cli(_main, argv)


def _main(argv: list[str]) -> int:
    first, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if first == "help" and rest:
        first, rest = rest[0], ["--help"]
    if first in ("-h", "--help", "help"):
        print(_help())
        return 0
    if first in ("-V", "--version", "version"):
        from pshard.session.readiness.say_version import describe_version

        print(describe_version())
        return 0
    if first not in COMMANDS:
        raise UserError(_describe_unknown(first))
    with called_as(f"pshard {first}"):
        return import_module(f"pshard.commands.{COMMANDS[first][0]}").main(rest)


def _help() -> str:
    lines = [f"  {name:<11} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        (
            "usage: pshard COMMAND [MODEL] [flags]",
            "",
            "Run language models that are larger than the GPU's memory, as fast as this machine can.",
            "",
            "  pshard run model.gguf             all that is needed; without a prompt it chats",
            "",
            *lines,
            "",
            "flags: -h, --help (also after a command), -V, --version (with commit, torch and driver)",
        )
    )


def _describe_unknown(word: str) -> str:
    from difflib import get_close_matches

    if word.endswith(".gguf") or "/" in word:
        return f"{word!r} is no command; to run a model: pshard run {word}"
    near = get_close_matches(word, COMMANDS, 1)
    instead = f"; did you mean pshard {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
    return f"there is no command {word!r}{instead}"


if __name__ == "__main__":
    sys.exit(main())
