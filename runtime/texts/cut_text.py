"""Cuts a text back to its first tokens, as far as its blocks, its states and what drafts beside it let that be."""

from pshard.runtime.texts.block_copies import BlockCopies
from pshard.runtime.texts.commit_texts import Commits
from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_blocks import TextBlocks


def cut_text(
    text: Text, length: int, blocks: TextBlocks, commits: Commits, copies: BlockCopies, later: bool = False
) -> list[int]:
    """Let a text have its first tokens; those of them that it has lost, and that are to be given to it again.

    later: see `Commits.cut_states`.
    """
    wanted = text.ids[: max(0, length)]
    if text.opened is not None or len(wanted) < len(text.ids):
        at = commits.find_length(text, len(wanted))
        at = at if blocks.keeps_window(text, at) else 0
        for copy in blocks.own_last(text, at):
            copies.copy(*copy)
        commits.cut_states(text, at, later)
        blocks.shorten(text, at)
    commits.follower.cut(text, max(0, length))
    return wanted[len(text.ids) :]
