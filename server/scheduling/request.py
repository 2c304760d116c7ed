"""A request on its way through the server: what of it is computed, and what was made."""

from dataclasses import dataclass, field

from pshard.runtime.sampling import Sampler
from pshard.runtime.speculation.draft_length import DraftChances
from pshard.runtime.texts.text import Text
from pshard.server.jobs import Event, Job, Likely, Listener


@dataclass(eq=False)
class Request:
    """A request with its tokens: those of the prompt, then those made. text: its handle while it runs.

    scored: what is known of the prompt's tokens, with `Job.scored`. taken, begun, first and last: seconds on the
    scheduler's clock at which it was submitted, ran first, made its first token and its last one; nan: not yet.
    overtaken: whether another one went before it; slot: its place among those that run. chances: how likely
    drafts hold, looked_up: of those that lookup finds first; drafted and accepted: how many there were, and how many
    held.
    """

    job: Job
    listener: Listener
    taken: float
    tokens: list[int] = field(default_factory=list)
    sampler: Sampler | None = None
    text: Text | None = None
    scored: list[Likely] = field(default_factory=list)
    begun: float = float("nan")
    first: float = float("nan")
    last: float = float("nan")
    preempted: int = 0
    chances: DraftChances | None = None
    looked_up: DraftChances | None = None
    drafted: int = 0
    accepted: int = 0
    overtaken: bool = False
    slot: int = 0
    refused_at: int = -1  # count of closed texts when its blocks were lacking: nothing has changed since
    probed_at: int = -1  # the same, when too little of it was there to go before another one
    done: bool = False  # `Ended` was put

    def __post_init__(self) -> None:
        self.tokens = list(self.job.prompt)
        self._prompt = len(self.tokens)

    @property
    def made(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self._prompt

    @property
    def goal(self) -> int:
        """Tokens that are to be computed before the next one can be drawn, or the prompt is scored: the last token of a
        prompt that is scored only tells nothing of it."""
        return len(self.tokens) - (self.job.scored and not self.job.most and len(self.tokens) > 1)

    @property
    def remaining(self) -> int:
        """Of these, how many are not."""
        return self.goal - (len(self.text.ids) if self.text else 0)

    @property
    def decodes(self) -> bool:
        """Whether its last token is all that the next one waits for; so nothing of its prompt is to
        be scored."""
        tokens = len(self.tokens)
        return self.text is not None and tokens > self._prompt and len(self.text.ids) + 1 == tokens

    def tell(self, event: Event) -> bool:
        """Put an event; whether the listener took it. One that fails is not asked again."""
        try:
            self.listener.put(event)
        except Exception:
            return False
        return True
