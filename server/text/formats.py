"""What a model means by the tags in its answers: which enclose reasoning, which calls of tools."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pshard.models.text.tool_templates import takes_tools
from pshard.server.api.asks import Tool
from pshard.server.text.call_reader import CHANNEL_TO, CLOSES, make_call_id, make_short_id
from pshard.server.text.function_tags import OPEN
from pshard.server.text.turns import SHORT_IDS

THOUGHTS = {"<think>": "</think>", "<reasoning>": "</reasoning>", "[THINK]": "[/THINK]"}
CALLS = (
    "<tool_call>",
    OPEN,
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "functools[",
)  # where they end is known to what reads the calls
HARMONY = "<|channel|>"
BARE = ("<|python_tag|>", "ipython", "<tool_call>")  # in templates of models that write a call as bare JSON, at times
ENDS = ("<|call|>", "<|eom_id|>")  # special tokens that end an answer with a call


def thinks(template: str | None) -> bool:
    """Whether a model thinks before it answers, by its template."""
    words = template or ""
    return HARMONY in words or any(tag in words for pair in THOUGHTS.items() for tag in pair)


@dataclass(frozen=True)
class ChatFormat:
    """How to read an answer of a chat.

    begun: the prompt, which may have opened a tag. tags: what is enclosed by what. tools: those that may be called;
    forced: the answer is calls as JSON and nothing else. single: the answer ends with its first call. bare: a call may
    come without a tag. trims: whitespace around what tags enclose is no text.
    """

    begun: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    forced: bool = False
    single: bool = False
    bare: bool = False
    trims: bool = False
    make_id: Callable[[], str] = make_call_id

    @property
    def mark(self) -> str:
        """The tag that a call stands in, "" for none that has an end."""
        return next((tag for tag in CLOSES if tag in self.tags), "")

    def kind_of(self, within: str) -> str:
        """What text within a tag or channel is: "text", "thought" or "call"."""
        if within in CALLS or CHANNEL_TO.search(within):
            return "call" if self.tools else "text"
        return "text" if within in ("", "commentary", "final") else "thought"


def find_format(
    template: str | None,
    prompt: str,
    tools: tuple[Tool, ...],
    forced: bool,
    single: bool = False,
    guided: bool = False,
) -> ChatFormat:
    """The format of the model with that template. What the template never names is text like any other; a template
    without tools gets calls by <tool_call>, as its prompt tells the model (`describe_tools`). guided: an answer that is
    no call is JSON, by a grammar, in which a call has its tag if there is one."""
    words = template or ""
    tags = {begin: end for begin, end in THOUGHTS.items() if begin in words or end in words}
    if tools:
        tags |= {begin: "" for begin in CALLS if begin in words or (begin == CALLS[0] and not takes_tools(words))}
    bare = bool(tools) and any(word in tags or word in words for word in BARE)
    if guided:
        bare = bool(tools) and not any(tag in tags for tag in CLOSES)
    short = make_short_id if SHORT_IDS in words else make_call_id
    return ChatFormat(prompt[-200:], tags, tools, forced, single, bare, bool(tags) or HARMONY in words, short)
