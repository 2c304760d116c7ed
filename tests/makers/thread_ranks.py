"""Ranks as threads of one process: the engine's tensor-parallel path without starting processes."""

import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engines import pinned_everywhere
from plan_samples import (
    keep_rows,
    make_rank_plan,
    make_tier,
    make_variant,
    mix_parts,
    random_places,
    shrink_places,
    split_places,
    with_workload,
)

from pshard.cuts.rank_parts import cut_ranks
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.plan import TierPlan, Variant
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.ranks.group import Group
from pshard.units.moe.expert_cache import ExpertCache
from pshard.units.moe.popularity import Popularity
from pshard.workload import Limits, Split


class Meeting:
    """Where the threads of one group leave their parts."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor | None] = [None] * size
        self.said: list[Any] = [None] * size
        self.sent = [queue.SimpleQueue() for _ in range(size)]  # to each rank
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadGroup(Group):
    """A rank that is a thread; sums in rank order, as every group does."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, len(meeting.parts), meeting

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.parts[self.rank] = part.clone()
        self._meeting.barrier.wait()
        parts = [p for p in self._meeting.parts if p is not None]
        self._meeting.barrier.wait()
        return parts

    def all_reduce(self, tensor: torch.Tensor, exact: bool = False) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        first, *rest = self._exchange(tensor)
        tensor.copy_(first)
        for part in rest:
            tensor.add_(part)

    def broadcast(self, value: Any, source: int = 0, soon: bool = False) -> Any:
        self._meeting.said[self.rank] = value
        self._meeting.barrier.wait()
        said = self._meeting.said[source]
        self._meeting.barrier.wait()
        return said

    def send(self, tensor: torch.Tensor, target: int) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self._meeting.sent[target].put((self.rank, tensor.clone()))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        sender, sent = self._meeting.sent[self.rank].get(timeout=60)
        assert sender == source
        tensor.copy_(sent)

    def gather_columns(self, local: torch.Tensor, seconds: float | None = None, alike: bool = False) -> torch.Tensor:
        return torch.cat(self._exchange(local), dim=1)


Tiers = Callable[[Any], tuple[TierPlan, ...]]


def random_tiers(seed: int, context: int) -> Tiers:
    """Different random placements on every rank: a tier for decode and one for prompts."""

    def make(spec: Any) -> tuple[TierPlan, ...]:
        rng = random.Random(f"{seed} {spec.packed_nbytes}")
        places = random_places(spec, rng)
        smaller = shrink_places(spec, places, rng)
        slots = rng.randint(1, 3)
        return tuple(make_tier(spec, n, p, slots, context, 1) for n, p in ((4, places), (16, smaller)))

    return make


def split_tiers(seed: int, context: int) -> Tiers:
    """As `random_tiers`, with every FFN that decode does not pin split there, and what it has of them in VRAM kept."""

    def make(spec: Any) -> tuple[TierPlan, ...]:
        rng = random.Random(f"{seed} {spec.packed_nbytes}")
        places = random_places(spec, rng)
        decode = split_places(spec, places, rng)
        tiers = ((4, decode), (16, keep_rows(spec, shrink_places(spec, places, rng), decode)))
        return tuple(make_tier(spec, n, p, 2, context, 1) for n, p in tiers)

    return make


def mixed_tiers(seed: int, context: int) -> Tiers:
    """As `random_tiers`, with routed experts on all sides at once in decode, of which larger tiers keep what is in
    VRAM."""

    def make(spec: Any) -> tuple[TierPlan, ...]:
        rng = random.Random(f"{seed} {spec.packed_nbytes}")
        places = random_places(spec, rng)
        decode = mix_parts(spec, places, rng)
        tiers = ((4, decode), (16, keep_rows(spec, shrink_places(spec, places, rng), decode)))
        return tuple(make_tier(spec, n, p, 2, context, 1) for n, p in tiers)

    return make


Source = Path | Any  # a model file, what opens one, or one that a test has made in memory


def open_source(source: Source) -> Any:
    if isinstance(source, Path):
        return open_model(source)
    return source() if callable(source) else source


def split_variant(
    path: Source,
    split: Split,
    context: int,
    tiers: Tiers | None = None,
    reserve_mib: int = 0,
    pools: Callable[[ModelSpec], tuple[ExpertCache, ...]] = lambda _: (),
    keeps_states: bool = False,
) -> Variant:
    """A variant for ranks that hold the model so, each with `tiers` of what it holds (default: everything pinned), and
    with `pools` of slots for experts that follow use. keeps_states: for a head that drafts."""
    make = tiers or (lambda spec: pinned_everywhere(spec, (4, 16), context))
    specs = cut_ranks(replace(open_source(path).spec, keeps_states=keeps_states), split)
    plans = []
    for r, (s, share) in enumerate(zip(specs, split.shares)):
        caches = pools(s)
        cached = sum(cache.nbytes for cache in caches)
        placed = tuple(replace(tier, buffers=replace(tier.buffers, cached=cached)) for tier in make(s))
        plans.append(replace(make_rank_plan(s, placed, r, share), caches=caches))
    variant = make_variant(specs[0], plans[0].tiers, context, 1, tuple(plans), reserve_mib)
    return replace(variant, workload=variant.workload.under(split))


def run_ranks(
    path: Source,
    shares: tuple[float, ...],
    talk: Callable[[Engine], Any],
    context: int,
    tiers: Tiers | None = None,
    kv_types: tuple[str, str] = ("f32", "f32"),
    mode: str = "tensor",
    limits: Limits = (),
    kernels: str = "plain",
    popularity: Popularity | None = None,
    checkpoint_bytes: int = 0,
    pools: Callable[[ModelSpec], tuple[ExpertCache, ...]] = lambda _: (),
) -> list[Any]:
    """What `talk` returns on each rank of a group over the ratios `shares`, split by layers or by tensors."""
    variant = split_variant(path, Split(mode, shares, limits), context, tiers, pools=pools)
    variant = replace(with_workload(variant, type_k=kv_types[0], type_v=kv_types[1]), popularity=popularity)
    return run_variant(path, variant, talk, kernels=kernels, checkpoint_bytes=checkpoint_bytes)


def run_variant(path: Source, variant: Variant, talk: Callable[[Engine], Any], **options: Any) -> list[Any]:
    """The same on each rank of a variant."""
    size = len(variant.ranks)
    meeting = Meeting(size)

    def rank(r: int) -> Any:
        try:
            group = ThreadGroup(r, meeting)
            with build_engine(open_source(path), variant, open_device("cpu"), group=group, **options) as engine:
                return talk(engine)
        except BaseException:
            meeting.barrier.abort()  # the others must not wait
            raise

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(rank, r) for r in range(size)]
    errors = [e for e in (run.exception() for run in runs) if e]
    for error in errors:  # the one that broke the barrier, not those who waited there
        if not isinstance(error.__cause__ or error, threading.BrokenBarrierError):
            raise error
    return [run.result() for run in runs]
