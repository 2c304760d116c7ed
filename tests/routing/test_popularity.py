"""Popularity: the order that a record gives, and the uses that its places are worth."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experts_file import ExpertsFile
from model_files import write_gguf
from routing_samples import make_record

from pshard.models import open_model
from pshard.registries.routing_file import fingerprint_routers
from pshard.routing.measure_popularity import measure_popularity
from pshard.routing.order_experts import order_experts
from pshard.runtime.memory.kv_store import fingerprint_model
from pshard.units.moe.popularity import check_popularity, pack_numbers, pack_uses, unpack_numbers, unpack_uses


def test_the_most_used_come_first_and_ties_go_to_the_lower_number() -> None:
    record = make_record(2, layers=2, experts=6, used=2)
    ids = np.array([[[5, 2], [0, 1]], [[2, 4], [1, 0]]], np.uint8)
    popularity = measure_popularity(replace(record, ids=ids))
    assert popularity.order_of(1) == (2, 4, 5, 0, 1, 3)
    assert popularity.order_of(2) == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_uses_are_held_out_so_that_the_next_text_keeps_what_they_promise(skew: float) -> None:
    """The first places of chance are worth no more than others; those of habit are worth what the next text gives."""
    record = make_record(4000, layers=8, experts=32, used=4, skew=skew)
    first, second = (
        replace(record, ids=record.ids[part], batches=(n,)) for part, n in ((slice(300), 300), (slice(300, None), 3700))
    )
    popularity = measure_popularity(first)
    assert sum(popularity.uses) == pytest.approx(4)
    assert list(popularity.uses) == sorted(popularity.uses, reverse=True)
    counts = second.count_uses()
    for n in (4, 8, 16):
        promised = [sum(popularity.uses_of(layer)[:n]) / 4 for layer in record.layers]
        held = [c[list(popularity.order_of(layer)[:n])].sum() / c.sum() for c, layer in zip(counts, record.layers)]
        assert promised == pytest.approx(held, abs=0.08)
        assert np.mean(promised) == pytest.approx(np.mean(held), abs=0.03)
        assert sum(popularity.uses[:n]) / 4 == pytest.approx(np.mean(promised))
        assert (np.mean(promised) > n / 32 + 0.1) == (skew > 0)


def test_no_expert_is_said_to_be_never_used() -> None:
    for tokens in (3, 30_000):
        assert min(measure_popularity(make_record(tokens, 1, experts=64, skew=9.0)).uses) > 0


def test_uses_are_packed_into_a_byte_for_each_expert() -> None:
    uses = -np.sort(-np.random.default_rng(0).dirichlet([0.5] * 128) * 8)
    assert unpack_uses(pack_uses(uses), 128, 8) == pytest.approx(uses, rel=0.03, abs=2e-3)
    assert len(pack_uses(uses)) <= 4 / 3 * 128 + 4


@pytest.mark.parametrize("experts", [4, 256, 512])
def test_an_order_is_packed_into_a_byte_or_two_for_each_expert(experts: int) -> None:
    numbers = tuple(np.random.default_rng(0).permutation(experts).tolist())
    packed = pack_numbers(numbers)
    assert unpack_numbers(packed, experts) == numbers
    assert len(packed) <= 4 / 3 * experts * (1 + (experts > 256)) + 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, tokens=0), "no tokens"),
        (lambda p: replace(p, used=17), "more experts than there are"),
        (lambda p: replace(p, experts=15), "each of 15 experts"),
        (lambda p: replace(p, layers=()), "no layers"),
        (lambda p: replace(p, layers=p.layers[::-1]), "ascend"),
        (lambda p: replace(p, layers=(replace(p.layers[0], order="!"),)), "layers.0. does not name"),
        (lambda p: replace(p, layers=(replace(p.layers[0], order=pack_numbers([0] * 16)),)), "once"),
        (lambda p: replace(p, layers=(replace(p.layers[0], uses="AAAA"),)), "with its uses"),
        (lambda p: replace(p, layers=(replace(p.layers[0], uses="A" * 21 + "="),)), "with its uses"),
    ],
)
def test_a_popularity_that_no_record_gives_is_refused(change, message: str) -> None:
    popularity = measure_popularity(make_record())
    check_popularity(popularity, "it")
    with pytest.raises(ValueError, match=message):
        check_popularity(change(popularity), "it")


def test_a_popularity_of_other_layers_or_experts_is_refused() -> None:
    spec = ExpertsFile(layers=3).spec
    with pytest.raises(ValueError, match="says nothing of layer 0"):
        order_experts(spec, measure_popularity(make_record(layers=3, experts=8)))
    record = make_record(layers=3, experts=9)
    with pytest.raises(ValueError, match="is of 9 experts"):
        order_experts(spec, measure_popularity(replace(record, layers=(0, 1, 2))))


def test_an_order_changes_no_fingerprint_of_the_model(tmp_path: Path) -> None:
    """Plans, KV cache files and records fit a model with or without one."""
    with open_model(write_gguf(tmp_path / "m.gguf", "qwen3moe", n_layers=2)) as file:
        before = file.fingerprint_inputs(), fingerprint_model(file), fingerprint_routers(file)
        popularity = measure_popularity(replace(make_record(layers=2, experts=8), layers=(0, 1)))
        file.spec = order_experts(file.spec, popularity)
        assert file.spec.unit("blk.0.experts").order == popularity.order_of(0)
        assert (file.fingerprint_inputs(), fingerprint_model(file), fingerprint_routers(file)) == before
        assert order_experts(file.spec, None).unit("blk.0.experts").order == ()
