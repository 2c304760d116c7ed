"""pshard completion: what a shell needs to complete commands, flags and their choices, read off the parsers."""

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module

from pshard.commands.command_line import new_parser, run_cli
from pshard.commands.program.one_program import COMMANDS

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Word:
    """A flag: its names, the values that it takes (none: any, or a file), and what it says of itself."""

    names: tuple[str, ...]
    choices: tuple[str, ...]
    takes_value: bool
    says: str


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> argparse.ArgumentParser:
    """The flags of pshard completion."""
    parser = new_parser("pshard-completion", "Print a completion script; bash: source <(pshard completion bash)")
    parser.add_argument("shell", choices=SHELLS, help="whose script")
    return parser


def _main(argv: list[str]) -> int:
    shell = make_parser().parse_args(argv).shell
    print({"bash": _for_bash, "zsh": _for_zsh, "fish": _for_fish}[shell](list_words()), end="")
    return 0


def list_words() -> dict[str, list[Word]]:
    """The flags of every command, as its parser has them."""
    found = {}
    for name, (module, _) in COMMANDS.items():
        parser = import_module(f"pshard.commands.{module}").make_parser()
        found[name] = [_as_word(action) for action in parser._actions if action.option_strings]
    from pshard.commands.everyday.cli_serve_bench import make_parser as of_server

    there = {flag for word in found["bench"] for flag in word.names}
    of_servers = [_as_word(action) for action in of_server()._actions if action.option_strings]
    found["bench"] += [word for word in of_servers if not there & set(word.names)]
    return found


def _as_word(action: argparse.Action) -> Word:
    choices = tuple(map(str, action.choices or ()))
    says = (action.help or "") % {"default": action.default}
    return Word(tuple(action.option_strings), choices, action.nargs != 0, says.split(";")[0])


def _for_bash(commands: dict[str, list[Word]]) -> str:
    lines = ["# source <(pshard completion bash)", "_pshard() {"]
    lines.append('  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" flags="" values=""')
    lines.append('  local name="${COMP_WORDS[0]##*/}"; local command="${name#pshard-}"')
    lines.append('  if [ "$name" = pshard ]; then')
    lines.append('    if [ "$COMP_CWORD" -eq 1 ]; then')
    lines.append(f'      COMPREPLY=($(compgen -W "{" ".join(COMMANDS)} --help --version" -- "$word")); return')
    lines += ["    fi", '    command="${COMP_WORDS[1]}"', "  fi", '  case "$command" in']
    for name, words in commands.items():
        names = " ".join(flag for word in words for flag in word.names)
        lines.append(f'    {name}) flags="{names}"')
        lines.append('      case "$before" in')
        lines += [
            f'        {"|".join(word.names)}) values="{" ".join(word.choices)}" ;;' for word in words if word.choices
        ]
        lines.append("      esac ;;")
    lines += ["  esac"]
    values = " ".join(SHELLS)
    lines.append(f'  [ "$command" != completion ] || values="{values}"')
    lines.append('  if [ -n "$values" ]; then COMPREPLY=($(compgen -W "$values" -- "$word")); return; fi')
    lines.append('  case "$word" in -*) COMPREPLY=($(compgen -W "$flags" -- "$word")) ;;')
    lines.append('  *) COMPREPLY=($(compgen -f -- "$word")) ;; esac')
    lines += ["}", f"complete -o filenames -F _pshard pshard {' '.join(_own_names())}", ""]
    return "\n".join(lines)


def _for_zsh(commands: dict[str, list[Word]]) -> str:
    lines = ["#compdef pshard " + " ".join(_own_names()), "# source <(pshard completion zsh)", "_pshard() {"]
    lines.append("  local command=${service#pshard-}")
    lines += ["  if [[ $service == pshard ]]; then", "    if (( CURRENT == 2 )); then"]
    lines.append("      local -a found; found=(")
    lines += [f"        {_quote(f'{name}:{what}')}" for name, (_, what) in COMMANDS.items()]
    lines += ["      )", "      _describe command found; return", "    fi"]
    lines += ["    command=$words[2]; shift words; (( CURRENT-- ))", "  fi", "  case $command in"]
    for name, words in commands.items():
        lines.append(f"    {name}) _arguments \\")
        for word in words:
            says = word.says.replace("[", "(").replace("]", ")").replace(":", " ")
            value = (f":value:({' '.join(word.choices)})" if word.choices else ":value:_files") * word.takes_value
            lines += [f"      {_quote(f'{flag}[{says}]{value}')} \\" for flag in word.names]
        plain = f"*:shell:({' '.join(SHELLS)})" if name == "completion" else "*:file:_files"
        lines.append(f"      {_quote(plain)} ;;")
    lines += ["  esac", "}", "compdef _pshard pshard " + " ".join(_own_names()), ""]
    return "\n".join(lines)


def _for_fish(commands: dict[str, list[Word]]) -> str:
    lines = ["# pshard completion fish | source", "complete -c pshard -n __fish_use_subcommand -f"]
    for name, (_, what) in COMMANDS.items():
        lines.append(f"complete -c pshard -n __fish_use_subcommand -a {name} -d {_quote(what)}")
    for name, words in commands.items():
        calls = [f"-c pshard -n '__fish_seen_subcommand_from {name}'"]
        calls += [f"-c pshard-{name}"] if f"pshard-{name}" in _own_names() else []
        for word in words:
            flags = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-{'s' if len(flag) == 2 else 'o'} {flag[1:]}"
                for flag in word.names
            )
            value = f" -x -a {_quote(' '.join(word.choices))}" if word.choices else " -r" * word.takes_value
            lines += [f"complete {call} {flags}{value} -d {_quote(word.says)}" for call in calls]
    lines.append(f"complete -c pshard -n '__fish_seen_subcommand_from completion' -f -a {_quote(' '.join(SHELLS))}")
    return "\n".join([*lines, ""])


def _own_names() -> list[str]:
    """Commands that also have a name of their own."""
    return [f"pshard-{name}" for name in ("run", "plan", "profile", "serve", "bench", "report")]


def _quote(text: str) -> str:
    """In single quotes, as all three shells read them."""
    return "'" + text.replace("'", "’") + "'"


if __name__ == "__main__":
    sys.exit(main())
