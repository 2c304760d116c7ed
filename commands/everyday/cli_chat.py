"""pshard chat: talk with a model in several turns."""

import sys
from argparse import ArgumentParser

from pshard.commands.command_line import new_parser, run_cli
from pshard.commands.parsing.sampling_flags import add_sampling_flags
from pshard.commands.parsing.spec_flags import add_spec_flags
from pshard.commands.parsing.text_flags import add_text_flags, check_text_flags, read_given
from pshard.commands.run_flags import add_batch_flags, add_plan_flags, make_request


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard chat."""
    description = "Talk with a model; what is piped in is one message a line."
    parser = new_parser("pshard-chat", description, takes_model=True)
    add_plan_flags(parser)
    add_batch_flags(parser)
    add_text_flags(parser, chats=True)
    add_sampling_flags(parser)
    add_spec_flags(parser)
    return parser


def _main(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    check_text_flags(args)
    first = read_given(args)

    from pshard.commands.everyday.chat_session import run_chat

    return run_chat(make_request(args, plans=True), args, first, ("pshard.commands.everyday.cli_chat", argv))


if __name__ == "__main__":
    sys.exit(main())
