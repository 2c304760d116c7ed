"""Rows of large micro-batches are told apart by what attends to them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pshard.batch_sizes import SMALL_BATCH
from pshard.runtime.kernels.api import Segment
from pshard.runtime.kernels.row_index import list_spans, make_rows, part_rows
from pshard.units.kv_cells import KV_BLOCK

SIZES = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 70]), st.integers(0, 300)), min_size=1, max_size=160)


@given(sizes=SIZES, in_splits=st.booleans(), window=st.sampled_from([0, 128]))
def test_each_row_is_in_one_part_whose_cells_are_its_own(
    sizes: list[tuple[int, int]], in_splits: bool, window: int
) -> None:
    segments, start, block = [], 0, 0
    for sequence, (tokens, past) in enumerate(sizes):
        count = -(-(past + tokens) // KV_BLOCK)
        segments.append(Segment(sequence, start, tokens, past, tuple(range(block, block + count))))
        start, block = start + tokens, block + count
    rows = replace(make_rows(segments), window=window)
    runs, prompts = part_rows(rows, in_splits)
    seen = [row for new, _ in (*runs, *prompts) for row in range(new.start, new.stop)]
    assert sorted(seen) == list(range(rows.tokens))
    for new, index in runs:
        assert in_splits and index.window == window and 1 <= index.tokens <= SMALL_BATCH
        assert index.segments == tuple(s for s in segments if new.start <= s.start < new.stop)
        assert all(s.tokens == 1 for s in index.segments) and index.cells == max(s.past for s in index.segments) + 1
        for at, segment in enumerate(index.segments):
            assert index.position[at] == segment.past
            assert index.blocks[index.begin[at]] == segment.blocks[0]
    begins = {start: at for start, _, _, at in list_spans(segments)}
    for new, at in prompts:
        (segment,) = (s for s in segments if s.start == new.start)
        assert new.stop - new.start == segment.tokens and at == begins[new.start]
        assert segment.tokens > 1 or not in_splits
