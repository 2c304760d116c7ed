"""Blocks of layers with a window against a plain model of who sees what: while `missing` is 0 there is room."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pshard.runtime.memory.kv_blocks import RecentBlocks, blocks_of
from pshard.units.kv_cells import KV_BLOCK, window_blocks, window_start

COMMON = 6 * KV_BLOCK  # tokens with which all texts of a kind begin
Step = tuple[str, int, int, int]  # what is done, by which sequence, with how many tokens, of which kind of text


def common_key(kind: int, at: int) -> bytes:
    """Of a block of which all texts of a kind have the same; else nothing."""
    return b"%d:%d" % (kind, at) if (at + 1) * KV_BLOCK <= COMMON else b""


@dataclass
class Texts:
    """What sequences wrote, cell by cell, and what they must still see of it."""

    blocks: RecentBlocks
    window: int
    written: dict[int, dict[int, object]] = field(default_factory=dict)  # by block, by place in it
    tokens: list[list[object]] = field(default_factory=lambda: [[], [], []])
    kinds: list[int] = field(default_factory=lambda: [0, 0, 0])
    known: set[bytes] = field(default_factory=set)
    runs: int = 0

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    def key(self, number: int, at: int) -> bytes:
        return common_key(self.kinds[number], at) or repr(self.tokens[number][at * KV_BLOCK]).encode()

    def token(self, number: int) -> object:
        """The next one: that of its kind of text first, then its own."""
        length = len(self.tokens[number])
        return (self.kinds[number], length) if length < COMMON else (self.runs, length)

    def extend(self, number: int, new: int) -> None:
        length = len(self.tokens[number])
        self.runs += 1
        if self.blocks.missing(self.lengths, {number: length + new}):
            return
        self.blocks.extend(number, length + new, self.lengths)
        others = [b for i in range(3) if i != number for b in self.seen(i)]
        for cell in range(length, length + new):
            block = self.blocks.block(number, cell // KV_BLOCK)
            assert block not in others, "it writes what another sequence sees"
            self.written.setdefault(block, {})[cell % KV_BLOCK] = self.token(number)
            self.tokens[number].append(self.token(number))
        for at in range(length // KV_BLOCK, (length + new) // KV_BLOCK):
            self.blocks.share(number, at, self.key(number, at))
            self.known.add(self.key(number, at))

    def adopt(self, number: int, kind: int, cells: int) -> None:
        """A sequence begins anew, and takes up a prefix that somebody had."""
        self.cut_back(number, 0)
        tokens: list[object] = [(kind, i) for i in range(min(cells, COMMON) // KV_BLOCK * KV_BLOCK)]
        keys = [common_key(kind, at) for at in range(blocks_of(len(tokens)))]
        if not tokens or not set(keys) <= self.known:
            return
        if self.blocks.missing(self.lengths, {number: len(tokens)}):
            return
        lacking = self.blocks.adopt(number, keys, self.lengths)
        self.kinds[number], self.tokens[number] = kind, list(tokens)
        for at in lacking:  # read from a file
            block = self.blocks.block(number, at)
            self.written[block] = dict(enumerate(tokens[at * KV_BLOCK : (at + 1) * KV_BLOCK]))
            self.blocks.share(number, at, keys[at])

    def cut_back(self, number: int, length: int) -> None:
        length = min(length, len(self.tokens[number])) // KV_BLOCK * KV_BLOCK  # what follows is its own again
        self.tokens[number] = self.tokens[number][: length if self.blocks.cut_back(number, length) else 0]

    def seen(self, number: int) -> list[int]:
        length = len(self.tokens[number])
        table = self.blocks.table(number)
        return list(table[window_start(length, self.window) // KV_BLOCK : blocks_of(length)])

    def check(self) -> None:
        for number, tokens in enumerate(self.tokens):
            for cell in range(window_start(len(tokens), self.window), len(tokens)):
                block = self.blocks.block(number, cell // KV_BLOCK)
                assert self.written[block][cell % KV_BLOCK] == tokens[cell]


STEPS = st.tuples(
    st.sampled_from(["extend", "extend", "adopt", "cut"]),
    st.integers(0, 2),
    st.integers(1, 700),
    st.integers(0, 1),
)


@settings(max_examples=150)
@given(st.integers(1, 200), st.integers(16, 200), st.integers(0, 4), st.lists(STEPS, min_size=4, max_size=24))
def test_there_is_room_for_all_windows_whoever_shares_blocks(
    window: int, batch: int, fewer: int, steps: list[Step]
) -> None:
    pool = max(2, window_blocks(window, 3000, 3, batch) - fewer)  # too few at times: `missing` says so
    texts = Texts(RecentBlocks(pool, 3, window), window)
    for what, number, tokens, kind in steps:
        if what == "adopt":
            texts.adopt(number, kind, tokens)
        elif what == "cut":
            texts.cut_back(number, tokens)
        else:
            if not texts.tokens[number]:
                texts.kinds[number] = kind
            for done in range(0, tokens, batch):
                texts.extend(number, min(batch, tokens - done))
        texts.check()


@pytest.mark.parametrize(("window", "sequences", "batch"), [(128, 8, 512), (512, 8, 512), (9, 3, 64), (4096, 2, 512)])
def test_answers_longer_than_the_window_go_on_beside_a_shared_beginning(
    window: int, sequences: int, batch: int
) -> None:
    """gpt-oss, gemma3, a tiny one, Mistral: one has read a system prompt, the others take it up and answer by turns."""
    blocks = RecentBlocks(window_blocks(window, 1 << 20, sequences, batch), sequences, window)
    common = 3 * window // KV_BLOCK * KV_BLOCK or KV_BLOCK
    keys = [b"%d" % at for at in range(common // KV_BLOCK)]
    lengths = [0] * sequences
    for cells in range(0, common, KV_BLOCK):
        blocks.extend(0, cells + KV_BLOCK, lengths)
        blocks.share(0, cells // KV_BLOCK, keys[cells // KV_BLOCK])
        lengths[0] = cells + KV_BLOCK
    for number in range(1, sequences):
        for at in blocks.adopt(number, keys, lengths):
            blocks.share(number, at, keys[at])
        lengths[number] = common
    for _ in range(2 * window + 2 * KV_BLOCK):
        assert not blocks.missing(lengths, {i: n + 1 for i, n in enumerate(lengths)})
        for number in range(sequences):
            blocks.extend(number, lengths[number] + 1, lengths)
        lengths = [n + 1 for n in lengths]


def test_a_block_that_another_has_too_gives_no_room_so_one_more_goes() -> None:
    blocks = RecentBlocks(4, 3, 9)
    blocks.extend(0, 192, [0, 0, 0])
    for at in range(3):
        blocks.share(0, at, b"%d" % at)
    blocks.adopt(1, [b"0"], [192, 0, 0])
    blocks.extend(1, 128, [192, 64, 0])
    assert not blocks.missing([192, 128, 0], {1: 192})
    blocks.extend(1, 192, [192, 128, 0])
    assert len(blocks.table(1)) == 3 and blocks.first(0) == 128


@pytest.mark.parametrize(("window", "batch"), [(9, 64), (100, 24), (128, 512)])
def test_what_comes_in_many_micro_batches_lacks_no_more_than_one_of_them(window: int, batch: int) -> None:
    """However long texts are to become, `extend` has room for one micro-batch after the other."""
    pool = window_blocks(window, 1 << 20, 2, batch)
    blocks, lengths, whole = RecentBlocks(pool, 2, window, batch), [0, 0], [40 * pool, 200 * pool]
    assert RecentBlocks(pool, 2, window).missing(lengths, dict(enumerate(whole)))
    turn = 0
    while lengths != whole:
        assert not blocks.missing(lengths, dict(enumerate(whole)))
        number = turn % 2 if lengths[turn % 2] < whole[turn % 2] else 1 - turn % 2
        end = min(whole[number], lengths[number] + batch)
        blocks.extend(number, end, lengths)
        lengths[number], turn = end, turn + 1
    short = RecentBlocks(2, 2, window, batch)
    assert short.missing([0, 0], {0: batch, 1: 1}) == max(0, -(-batch // KV_BLOCK) - 2)
