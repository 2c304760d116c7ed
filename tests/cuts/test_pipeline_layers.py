"""Which layers ranks hold, and how micro-batches add up: properties for random shapes and ratios."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import make_model, models

from pshard.cuts.layer_cuts import cut_layers, join_seconds, pipeline_seconds, share_layers
from pshard.cuts.rank_parts import split_ranges
from pshard.units.embedding import EMBEDDING
from pshard.workload import Split

RATIOS = st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0, 10.0)), min_size=2, max_size=6).filter(any)


@given(models(), RATIOS)
def test_every_layer_is_on_one_rank_and_follows_the_ratio(spec, shares) -> None:
    runs = share_layers(spec, shares)
    assert [i for run in runs for i in run] == list(range(spec.config.n_layers + 1))
    assert not any(run for run, share in zip(runs, shares) if share == 0)
    sizes = [u.packed_nbytes for u in spec.units if u.kind is not EMBEDDING]
    largest = max(max(a + b for a, b in zip(sizes[:-1:2], sizes[1:-1:2])), sizes[-1])
    done = owed = 0.0
    for rank, share in enumerate(shares):
        part = cut_layers(spec, shares, rank)
        done += sum(u.packed_nbytes for u in part.units if u.kind is not EMBEDDING)
        owed += sum(sizes) * share / sum(shares)
        assert abs(done - owed) <= largest / 2 + 1


@given(models(), RATIOS)
def test_what_ranks_read_is_the_file_once_and_hidden_states_pass_through_all_who_work(spec, shares) -> None:
    read = [split_ranges(spec, Split("layer", shares), r) for r in range(len(shares))]
    for unit in spec.units:
        holders = [r for r, table in enumerate(read) if table[unit.name]]
        assert len(holders) == 1
        assert read[holders[0]][unit.name] == {t.name: (0, t.rows, 0, t.cols) for t in unit.tensors}
    parts = [cut_layers(spec, shares, r) for r in range(len(shares))]
    working = [r for r, part in enumerate(parts) if part.packed_nbytes]
    assert all(parts[a].neighbours.target == b and parts[b].neighbours.source == a for a, b in pairwise(working))
    assert parts[working[0]].neighbours.source is None and parts[working[-1]].neighbours.target is None
    for rank in set(range(len(shares))) - set(working):
        assert (parts[rank].neighbours.source, parts[rank].neighbours.target) == (None, None)


def test_a_rank_of_one_holds_the_model() -> None:
    spec = make_model()
    assert cut_layers(spec, (1.0,), 0) is spec


def test_equal_micro_batches_take_the_sum_once_and_then_the_slowest_rank() -> None:
    assert pipeline_seconds([(2.0, 3.0, 1.0)]) == 6.0
    assert pipeline_seconds([(2.0, 3.0, 1.0)] * 4) == 6.0 + 3 * 3.0
    assert pipeline_seconds([(2.0, 3.0), (1.0, 1.0)]) == 6.0
    assert pipeline_seconds([]) == 0.0
    assert join_seconds("layer", [(2.0, 3.0)] * 2) == 8.0
    assert join_seconds("tensor", [(2.0, 3.0)] * 2) == 6.0


@pytest.mark.parametrize("shares", [(), (-1.0, 2.0), (0.0, 0.0)])
def test_ratios_that_are_none_are_refused(shares) -> None:
    with pytest.raises(ValueError, match="are not ratios"):
        share_layers(make_model(), shares)
