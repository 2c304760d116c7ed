"""What becomes of tokens that texts have computed for good: full blocks are shared, states are kept."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from pshard.runtime.checkpoints.checkpoints import EVERY, Checkpoints
from pshard.runtime.residents import Snapshot
from pshard.runtime.texts.block_keys import next_key
from pshard.runtime.texts.follower import Follower
from pshard.runtime.texts.open_rows import OpenRows
from pshard.runtime.texts.prefix_cache import PrefixCache
from pshard.runtime.texts.text import Text
from pshard.runtime.texts.text_blocks import TextBlocks
from pshard.units.kv_cells import KV_BLOCK


@dataclass
class DueStates:
    """States of a text that are kept at a length, taken unit by unit."""

    text: Text
    length: int
    states: Snapshot = field(default_factory=dict)


class Commits:
    """Those of one engine's texts.

    Attributes:
        follower: drafts beside them. open_rows: what drafts leave open.
    """

    def __init__(
        self,
        blocks: TextBlocks,
        checkpoints: Checkpoints,
        cache: PrefixCache,
        root: Callable[[str], bytes],
        most: int,
        follower: Follower,
        open_rows: OpenRows,
    ) -> None:
        """root: the key that the first block of a text with a salt follows; most: tokens of a micro-batch."""
        self.open_rows = open_rows
        self._due = dict[Text, slice]()  # rows of the last step that hold, which states are yet to take in
        self.follower = follower
        self._blocks, self._checkpoints, self._cache = blocks, checkpoints, cache
        self._root, self._most = root, most

    def commit_all(self, text: Text, start: int, end: int) -> None:
        """All that a text has holds; its states are kept where that is due, as soon as they have taken it in. start,
        end: from and to which length the tokens reach that it is being given."""
        self.hold(text)
        if not text.ids or text in self._due:
            return
        if text.salt is None:
            self._checkpoints.note(text.number, text.committed, (start, end), self._most)
        elif self._is_border(text):
            self._keep_states(text)

    def hold(self, text: Text) -> None:
        """All that a text has holds; its states are kept by whoever calls."""
        text.committed = len(text.ids)
        if text.ids and text.salt is not None:
            self._share(text, text.salt)

    def take_back(self, text: Text, keys: int) -> None:
        """Nobody shares what a text was to hold beyond its first so many keys: it was not computed."""
        for key in self._blocks.forget_keys(text, keys):
            self._cache.forget(key)

    def find_due(self, text: Text, span: tuple[int, int], last: int) -> DueStates | None:
        """What is kept of a text's states at its length now; None for nothing. span: as of `commit_all`; last: the
        length of which some are to be kept before, 0 for none."""
        length = text.committed
        if text.salt is not None:
            is_due = self._is_border(text)
        else:
            last = max(last, self._checkpoints.last(text.number, length))
            is_due = self._checkpoints.is_due(length, span, self._most, last)
        return DueStates(text, length) if is_due else None

    def read_states(self, due: DueStates, units: Collection[str]) -> None:
        """Take what is due of the states of these units, which are now what they are at its length."""
        due.states.update(self._checkpoints.read(due.text.number, units))

    def keep_due(self, due: DueStates) -> None:
        """Keep states that were taken of all units."""
        if due.text.salt is None:
            self._checkpoints.keep(due.text.number, due.length, due.states)
        else:
            self._keep_states(due.text, due)

    def forget(self, text: Text) -> None:
        """A text is closed."""
        self.follower.forget(text)
        self._forget_open(text)
        self._due.pop(text, None)
        self._checkpoints.go_back(text.number, 0)

    def find_length(self, text: Text, length: int) -> int:
        """The largest length up to this one that a text can be cut back to: its states say, what drafts beside it does,
        and where its last block would be one that others hold too, whether there is room for a copy of it."""
        if length < len(text.ids) and not (self._checkpoints.each or self.follower.can_go_on(text, length)):
            length -= 1
        while length < len(text.ids):
            found = self._find_states(text, length)
            if not self._blocks.can_own(text, found):
                found = found // KV_BLOCK * KV_BLOCK
            if found == length:
                break
            length = found
        return length

    def _find_states(self, text: Text, length: int) -> int:
        if not self._checkpoints.each or self._is_open_at(text, length):
            return length
        at = self._checkpoints.last(text.number, length)
        ends = range(min(length // KV_BLOCK, len(text.keys)), at // KV_BLOCK, -1)
        return next((n * KV_BLOCK for n in ends if self._checkpoints.has_shared(text.keys[n - 1])), at)

    def open(self, text: Text, row: int) -> None:
        """States take in nothing of a text's rows in the next step, which begin with this one, until `cut_states`."""
        text.opened = row
        self.open_rows.waiting.add(text.number)

    def _forget_open(self, text: Text) -> None:
        text.opened = None
        self.open_rows.waiting.discard(text.number)

    def _is_open_at(self, text: Text, length: int) -> bool:
        """Whether states are yet to take in what follows the text's committed tokens, as far as that length."""
        return text.opened is not None and length >= text.committed

    def cut_states(self, text: Text, length: int, later: bool = False) -> None:
        """Make a text's states what they are at a length that `find_length` has found. It has its keys still. later:
        open rows are taken in by `settle`."""
        opened, is_open = text.opened, self._is_open_at(text, length)
        self._forget_open(text)
        if is_open:
            assert opened is not None
            self._due[text] = slice(opened, opened + length - text.committed)
            if not later:
                self._take_in(text)
            return
        kept = self._checkpoints.last(text.number, length)
        self._checkpoints.go_back(text.number, length)
        if self._checkpoints.each and kept < length:
            self._checkpoints.adopt(text.number, length, text.keys[length // KV_BLOCK - 1])

    def settle(self) -> None:
        """Let states of all texts take in rows that hold, where they have not."""
        for text in list(self._due):
            self._take_in(text)
            self.commit_all(text, text.committed, text.committed)

    def _take_in(self, text: Text) -> None:
        self.open_rows.settle(text.number, self._due.pop(text))

    def _share(self, text: Text, salt: str) -> None:
        """Give blocks that are full now their keys."""
        keys = text.keys
        for at in range(len(keys), text.committed // KV_BLOCK):
            parent, ids = self._parent(text, at, salt), text.ids[at * KV_BLOCK : (at + 1) * KV_BLOCK]
            keys.append(next_key(parent, ids))
            self._cache.offer(keys[-1], parent, ids)
            text.blocks[at] = self._blocks.pool.share(text.blocks[at], keys[-1])
            if self._blocks.recent:
                self._blocks.recent.share(text.number, at, keys[-1])

    def _parent(self, text: Text, at: int, salt: str) -> bytes:
        """The key of what block number `at` of a text follows."""
        return text.keys[at - 1] if at else self._root(salt)

    def _is_border(self, text: Text) -> bool:
        """Whether a checkpoint is made at a block's end: where prompts end or part, and every so many tokens."""
        length = text.committed
        return bool(self._checkpoints.most) and (length in text.borders or length % EVERY == 0)

    def _keep_states(self, text: Text, due: DueStates | None = None) -> None:
        """Make a checkpoint of what a text's states are now, or of what was due."""
        length = due.length if due else text.committed
        at = length // KV_BLOCK - 1
        key = text.keys[at]
        if not self._checkpoints.has_shared(key):
            self._cache.offer(key, self._parent(text, at, text.salt or ""), text.ids[length - KV_BLOCK : length])
        self._checkpoints.share(text.number, length, key, due.states if due else None)
