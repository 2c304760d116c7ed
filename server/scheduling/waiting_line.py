"""Jobs that wait: who is next."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from pshard.server.scheduling.request import Request


class WaitingLine:
    """Jobs whose blocks were taken from them go first, the oldest of them before. Then keys take turns, each with its
    oldest job.

    Attributes:
        tokens: of all prompts that wait.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._returned: deque[Request] = deque()
        self._keys: OrderedDict[str, deque[Request]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._returned) + sum(map(len, self._keys.values()))

    def __iter__(self) -> Iterator[Request]:
        """All, in the order in which they would be taken if none came."""
        yield from self._returned
        turns = [list(jobs) for jobs in self._keys.values()]
        for i in range(max(map(len, turns), default=0)):
            yield from (jobs[i] for jobs in turns if i < len(jobs))

    def add(self, run: Request) -> None:
        """At the end of its key's jobs."""
        self._keys.setdefault(run.job.key, deque()).append(run)
        self.tokens += len(run.tokens)

    def give_back(self, run: Request) -> None:
        """A job that ran, before all others."""
        self._returned.appendleft(run)
        self.tokens += len(run.tokens)

    def take(self, run: Request) -> None:
        """Remove one that enters; the next turn is another key's."""
        if self._drop(run) and run.job.key in self._keys:
            self._keys.move_to_end(run.job.key)

    def pull(self, which: Callable[[Request], bool]) -> list[Request]:
        """Remove those that a test names."""
        found = [run for run in self if which(run)]
        for run in found:
            self._drop(run)
        return found

    def _drop(self, run: Request) -> bool:
        """Remove a job; whether it had a turn, as those have not that ran before."""
        self.tokens -= len(run.tokens)
        if run in self._returned:
            self._returned.remove(run)
            return False
        jobs = self._keys[run.job.key]
        jobs.remove(run)
        if not jobs:
            del self._keys[run.job.key]
        return True
