"""Blocks with several holders: none is lost, none has two that write, and what is left longest goes first."""

from hypothesis import given
from hypothesis import strategies as st

from pshard.runtime.memory.kv_blocks import BlockPool, blocks_of
from pshard.units.kv_cells import KV_BLOCK

STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4 * KV_BLOCK), st.integers(0, 1)), max_size=40)


class Holders:
    """Four texts over a pool; each has one of two contents, whose blocks are shared as soon as they are full."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.held: list[list[int]] = [[] for _ in range(4)]
        self.cells, self.content = [0] * 4, [0] * 4

    def close(self, number: int) -> None:
        self.pool.resize(self.held[number], 0)
        self.cells[number] = 0

    def open(self, number: int, content: int, cells: int) -> None:
        self.content[number] = content
        for at in range(cells // KV_BLOCK):
            block = self.pool.find(key(content, at))
            if block is None:
                break
            self.held[number].append(self.pool.hold(block))
        self.cells[number] = len(self.held[number]) * KV_BLOCK

    def extend(self, number: int, cells: int) -> None:
        held = self.held[number]
        if cells <= self.cells[number] or self.pool.missing([(held, cells)]):
            return
        self.pool.resize(held, cells)
        for at in range(self.cells[number] // KV_BLOCK, cells // KV_BLOCK):
            held[at] = self.pool.share(held[at], key(self.content[number], at))
        self.cells[number] = cells

    def check(self) -> None:
        pool = self.pool
        lists = [held for held in self.held if held]
        used = {block for held in lists for block in held}
        assert [len(held) for held in self.held] == [blocks_of(n) for n in self.cells]
        assert pool.room == pool.blocks - len(used)
        assert not used & set(pool.idle) and len(set(pool.idle)) == len(pool.idle)
        for held, cells, content in zip(self.held, self.cells, self.content):
            assert len(set(held)) == len(held)
            if cells % KV_BLOCK:  # the one that is written to
                assert sum(held[-1] in other for other in lists) == 1 and pool.key(held[-1]) is None
            assert [pool.key(b) for b in held[: cells // KV_BLOCK]] == [key(content, i) for i in range(cells // 64)]
        for block in pool.idle:
            assert pool.find(pool.key(block)) == block


def key(content: int, at: int) -> bytes:
    return bytes([content, at])


@given(st.integers(1, 10), STEPS)
def test_any_order_of_opening_growing_and_closing_loses_no_block_and_shares_no_written_one(
    blocks: int, steps: list[tuple[int, int, int]]
) -> None:
    holders = Holders(blocks)
    for number, cells, content in steps:
        if holders.cells[number] and cells % 3 == 0:
            holders.close(number)
        elif not holders.cells[number]:
            holders.open(number, content, cells)
        holders.check()
        holders.extend(number, cells)
        holders.check()
    for number in range(4):
        holders.close(number)
    holders.check()
    assert holders.pool.room == blocks


def test_the_block_that_was_left_first_goes_first_and_the_last_of_a_text_before_its_first() -> None:
    holders = Holders(6)
    for number, content in ((0, 0), (1, 1)):
        holders.extend(number, 0)
        holders.open(number, content, 0)
        holders.extend(number, 2 * KV_BLOCK)
    holders.close(0)
    holders.close(1)
    holders.open(0, 0, KV_BLOCK)  # its first block is in use again, and is left last now
    holders.close(0)
    gone = []
    for wanted in range(3, 7):  # two are empty
        holders.content[2] = 7
        before = set(holders.pool.idle)
        holders.extend(2, wanted * KV_BLOCK)
        gone += [content for block in before - set(holders.pool.idle) for content in [block]]
    assert gone == [1, 3, 2, 0]


def test_of_two_equal_blocks_one_is_left_and_both_texts_hold_it() -> None:
    holders = Holders(4)
    for number in (0, 1):  # both compute what neither has
        holders.pool.resize(holders.held[number], KV_BLOCK)
    for number in (0, 1):
        holders.held[number][0] = holders.pool.share(holders.held[number][0], key(0, 0))
        holders.cells[number] = KV_BLOCK
    assert holders.held[0] == holders.held[1] and holders.pool.room == 3
    holders.check()
    holders.close(0)
    holders.check()
    assert holders.pool.idle == ()


def test_only_blocks_that_nobody_holds_are_dropped() -> None:
    holders = Holders(4)
    holders.extend(0, 2 * KV_BLOCK)
    first, second = holders.held[0]
    holders.open(1, 0, KV_BLOCK)
    holders.close(0)
    holders.pool.drop(second)
    holders.pool.drop(first)
    holders.check()
    assert holders.pool.room == 3 and holders.pool.find(key(0, 0)) == first
