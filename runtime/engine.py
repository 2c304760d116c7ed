"""The engine: sequences of tokens in, logits and text out, under a plan."""

import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import torch

from pshard.errors import KernelRefused, StepFailed, UserError
from pshard.plan import RankPlan, Variant
from pshard.predicted_times import tier_seconds
from pshard.routing.follow_use import HitCounts, RankHits
from pshard.routing.followed import expect_hits
from pshard.routing.record import RoutingRecord, join_layers
from pshard.runtime.checkpoints.checkpoints import Checkpoints
from pshard.runtime.devices.device import Device
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.gpu.card_limits import card_limits
from pshard.runtime.kernels.gpu.tiles.kernel_failures import is_kernel_failure, refuse
from pshard.runtime.memory.kv_blocks import RecentBlocks
from pshard.runtime.memory.kv_store import KVStore
from pshard.runtime.sampling import Constraint, Sampler, Sampling
from pshard.runtime.speculation.draft_length import StepSeconds
from pshard.runtime.speculation.draft_program import DraftProgram
from pshard.runtime.speculation.head_program import HeadProgram
from pshard.runtime.speculation.rank_drafts import RankDrafts
from pshard.runtime.speculation.speculator import DraftSettings, Speculator
from pshard.runtime.texts.follower import Follower, NoFollower
from pshard.runtime.texts.numbered_texts import NumberedTexts
from pshard.runtime.texts.text_blocks import TextBlocks
from pshard.runtime.texts.text_pool import TextPool
from pshard.speculation import NONE
from pshard.units.kv_cells import kv_blocks, longest_sequence, window_blocks


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held by an engine, or by one rank of it: `accelerator` is all it took on the device (the driver's figure
    less the context). `page_locked`: whether all host weights are; `host_locked`: bytes of host memory that are, and
    `staging` those of them through which other weights are copied, `disk` those through which weights come from disk;
    `read`: bytes that were read there since the start, `waited`: those that came while something waited for them, and
    the seconds of that. `slots`: of host memory for experts that live there. `process`: what the process took of host
    memory before it loaded anything: Python, torch and the driver. `cores`: those that a rank of several keeps to; its
    memory is from their NUMA nodes."""

    budget: int
    arena: int
    accelerator: int
    host_weights: int
    page_locked: bool
    cores: tuple[int, ...] = ()
    host_locked: int = 0
    staging: int = 0
    disk: int = 0
    read: int = 0
    waited: tuple[int, float] = (0, 0.0)
    slots: int = 0
    process: int = 0


class _Told:
    """What an engine prints as: the model, the budget and the way of its plan, the room of its context."""

    plan: Variant
    _executor: Executor
    _closed: bool

    def __repr__(self) -> str:
        w, closed = self.plan.workload, ", closed" * self._closed
        budget, name = "+".join(map(str, w.vram_mib)), self._executor.spec.name
        return f"<Engine {name}: {budget} MiB ({self.plan.way}), {w.context} tokens of context{closed}>"


class Engine(_Told):
    """A loaded model. Not thread-safe. Close it, or use it in a `with` block.

    Attributes:
        plan: the variant in force; rank_plan: this rank's part of it. tokenizer: None for files without one.
        notes: one line for every fallback in use; longest: tokens that a sequence can have.
        texts: texts by handle, in the same KV cache; what they have is not for `forward` and its like.
    """

    def __init__(
        self,
        executor: Executor,
        variant: Variant,
        tokenizer: Any,
        notes: tuple[str, ...],
        on_close: Callable[[], None],
        store: KVStore,
        checkpoint_bytes: int = 0,
        head: Executor | None = None,  # drafts beside the model
    ) -> None:
        self._executor, self.plan, self.tokenizer, self.notes = executor, variant, tokenizer, notes
        self._on_close, self._checkpoints = on_close, Checkpoints(executor, checkpoint_bytes)
        self.notes += self._checkpoints.in_words
        context, sequences = variant.workload.context, variant.workload.sequences
        self.longest = longest_sequence(executor.spec.config, context)
        blocks = TextBlocks(sequences, self.longest, kv_blocks(context, sequences), _recent_blocks(executor))
        self.drafter = _make_drafter(head, executor, blocks, variant.drafters)
        self.texts = TextPool(executor, blocks, self._checkpoints, store, self._guard, self.drafter)
        self._sequences, self._seconds = NumberedTexts(self.texts), _time_steps(variant)
        self._broken: BaseException | None = None
        self._closed, self._told = False, 0  # told: tiles that were passed over and stand in the notes

    @property
    def rank_plan(self) -> RankPlan:
        return self._executor.plan

    @property
    def device(self) -> Device:
        return self._executor.device

    @property
    def vocab(self) -> int:
        """Token ids are 0..vocab-1."""
        return self._executor.spec.config.vocab

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.texts.lengths

    def tokens(self, sequence: int = 0) -> tuple[int, ...]:
        """Ids of the tokens of a sequence. Raises UserError when there is no such one."""
        with self._sequences.use([sequence]) as (text,):
            return tuple(text.ids)

    @property
    def link_bytes(self) -> int:
        """Bytes moved host to device since the start."""
        return self._executor.link_bytes

    @property
    def switches(self) -> int:
        """How often a tier gave way to another."""
        return self._executor.switches

    @property
    def expert_hits(self) -> HitCounts:
        """How often experts were found in this rank's slots that follow use, since the start."""
        self._executor.device.synchronize()
        self._executor.slots.observe()
        return self._executor.slots.counts

    def hits_by_rank(self) -> tuple[RankHits, ...]:
        """What every rank's slots have found since the start, in order. All ranks call it."""
        return tuple(self._executor.group.gather(RankHits(self.expert_hits, expect_hits(self.rank_plan))))

    def agree(self, value: Any) -> Any:
        """Rank 0's value (anything that pickles) on every rank; all call it. For what rank 0 alone can decide."""
        return self._executor.group.broadcast(value)

    def memory(self) -> MemoryReport:
        """What the engine holds, in bytes."""
        return _report_memory(self._executor)

    def memory_by_rank(self) -> tuple[MemoryReport, ...]:
        """What every rank holds, in order. All ranks call it."""
        return tuple(self._executor.group.gather(self.memory()))

    def reset(self, sequence: int | None = None, length: int = 0) -> int:
        """Forget the tokens after the first `length` of one sequence, or of all; returns how many of the others were
        computed again. All ranks call it.

        Layers with a window keep their last cells only: where those are gone that the next token sees, what is left of
        the sequence is computed again. So is, where a state cannot be cut back, what follows its last checkpoint at or
        before that length.

        Raises UserError when there is no such one.
        """
        return self._sequences.cut(sequence, length)

    def save(self, path: str | Path, sequence: int = 0) -> None:
        """Write a sequence's KV cache to a file that an engine over any number of ranks can load. All ranks call it.

        Raises UserError when it cannot be written; then there is no new file.
        """
        self._check_alive()
        with self._sequences.use([sequence]) as (text,):
            self.texts.save(text, Path(path))

    def load(self, path: str | Path, sequence: int = 0) -> tuple[int, ...]:
        """Make a saved KV cache that of a sequence; returns the token ids it stands for. All ranks call it.

        Raises UserError for a file that is damaged, of another model or KV type, or too long; the sequence is empty
        then.
        """
        self._check_alive()
        return self._sequences.load(Path(path), sequence)

    def record_routing(self, fingerprint: str) -> RoutingRecord:
        """Which experts all tokens so far have used, of a model with that fingerprint (registries/routing_file.py); of
        all layers, whichever rank holds them. All ranks call it. Raises ValueError for an engine that was not built to
        record, or has computed nothing.
        """
        picks = self._executor.host.picks
        own = picks.record(fingerprint) if picks is not None and picks.records else None
        # without neighbours each rank has all routers, which choose alike
        parts = [own] if self._executor.spec.neighbours is None else self._executor.group.gather(own)
        if not any(parts):
            raise ValueError("the engine was not built to record routing")
        return join_layers([part for part in parts if part])

    def forward(
        self, tokens: Sequence[int] | Sequence[Sequence[int]], all_logits: bool = False, best_only: bool = False
    ) -> torch.Tensor | list[torch.Tensor]:
        """Append tokens to the sequences and compute.

        Args:
            tokens: ids for sequence 0, or one list per sequence (empty lists are skipped); lengths may differ.
            all_logits: logits of every new token instead of each sequence's last.
            best_only: instead of logits the largest one and its id, which is all that ranks then exchange of them.

        Returns:
            float32 on the host: for one flat list [vocabulary] (or [n, vocabulary] with all_logits); for a list per
            sequence a list of those, with an empty tensor for a skipped sequence. With best_only 2 stands for
            vocabulary.

        Raises:
            UserError: an id is no whole number or not in the vocabulary, the context is full, or there are too many
                sequences.
            KernelRefused: the card cannot run a kernel that this takes.
            StepFailed: this call failed half-way (out of memory, a failed copy), or an earlier one did.
        """
        single = len(tokens) > 0 and not isinstance(tokens[0], Sequence)
        lists = _whole_numbers([tokens] if single else tokens)  # type: ignore[list-item, arg-type]
        self._check_alive()
        parts = self._sequences.extend(lists, all_logits, best_only)
        results = _join_rows(parts, all_logits, 2 if best_only else self.vocab)
        return results[0] if single else results

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Around what leaves the caches half-written where it fails: no further text may come from them then."""
        self._check_alive()
        try:
            yield
            passed_over = getattr(self._executor.acc_kernels, "passed_over", ())  # of kernels with tiles
            self.notes, self._told = (*self.notes, *passed_over[self._told :]), len(passed_over)
        except BaseException as error:
            self._broken = error
            _tell_failure(error, self.device)
            raise

    def _check_alive(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._broken is not None:
            raise StepFailed("an earlier step failed; load the model again") from self._broken

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        text: bool = True,
        constraint: Constraint | None = None,
        speculation: DraftSettings | None = None,
    ) -> Iterator[Any]:
        """Continue a prompt in sequence 0 and yield as it comes.

        Args:
            prompt: text (needs a tokenizer) or token ids.
            max_tokens: at most so many; it ends before at an end-of-text token or a full context.
            constraint: what tokens may come, as of a grammar (pshard.runtime.sampling.grammar).
            speculation: who drafts; the tokens are the same, and may come several a step.
            text: yield pieces of text (whole characters; U+FFFD at the end for one not completed), else token ids.
        """
        ids = _encode(self.tokenizer, prompt)
        stops = self.tokenizer.eos_ids if self.tokenizer else frozenset()
        sampler = Sampler(sampling or Sampling(), constraint, self.vocab)
        before = (*self.tokens(), *ids)
        sampler.see(before)
        decoder = self.tokenizer.stream() if text and self.tokenizer else None
        first = _draw(self, ids, sampler)
        if speculation is None or speculation.kind == NONE:
            made = _decode(self, first, max_tokens, sampler, stops)
        else:
            made = self._speculate(before, first, max_tokens, sampler, stops, speculation)
        with closing(made):
            for token in made:
                yield decoder.push(token) if decoder else token
        if decoder and (rest := decoder.finish()):
            yield rest

    def _speculate(
        self,
        before: Sequence[int],
        first: int,
        most: int,
        sampler: Sampler,
        stops: Collection[int],
        wanted: DraftSettings,
    ) -> Generator[int]:
        rows = self.texts.most_rows
        if rows < 2:
            raise UserError("rows of drafts cannot be held back from the model's states; leave out --spec")
        wanted = replace(wanted, most=min(wanted.most, rows - 1))
        with self._sequences.use([0]) as (text,):
            agree = partial(self._executor.group.broadcast, soon=True)
            speculator = Speculator(self.texts, text, sampler, wanted, self._seconds, stops, self.drafter, agree)
            yield from speculator.go_on(before, first, most)

    def close(self) -> None:
        """Release device and host memory. May be called twice."""
        if not self._closed:
            self._closed = True
            try:
                with closing(self._executor), closing(self.drafter):
                    if self._broken is None:
                        self.texts.finish_files()
            finally:
                self.device.close()
                self._on_close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _time_steps(variant: Variant) -> StepSeconds:
    """What the plan says of steps."""
    return StepSeconds(tier_seconds(variant), variant.speculation.rows if variant.speculation else ())


def _make_drafter(head: Executor | None, model: Executor, blocks: TextBlocks, plans: Sequence[RankPlan]) -> Follower:
    """What drafts beside the model, if anything. head: this rank's; plans: of the ranks that have some of it."""
    if not plans:
        return NoFollower()
    make = HeadProgram if head and head.spec.takes_states else DraftProgram
    program = make(head, model, blocks) if head else None
    if program and len(plans) == model.group.size:
        return program
    return RankDrafts(program, plans[0].rank, model.group, blocks)


def _report_memory(e: Executor) -> MemoryReport:
    budget, taken = e.plan.budget_mib << 20, e.device.process_bytes()
    host = e.host_nbytes, e.page_locked, e.group.cores, e.locked_nbytes, e.staging_nbytes
    slots = sum(cache.nbytes for cache in e.plan.caches if cache.on_host)
    disk = e.transfers.beyond_nbytes, e.transfers.read_bytes, e.transfers.waited, slots
    return MemoryReport(budget, e.arena_nbytes, taken, *host, *disk, e.process)


def _tell_failure(error: BaseException, device: Device) -> None:
    """Raise StepFailed for a step that failed, KernelRefused where the card cannot run a kernel of it; other errors are
    the caller's."""
    if isinstance(error, KernelRefused):
        return
    if is_kernel_failure(error):
        raise refuse(error, card_limits(device.torch_device)) from error
    if not isinstance(error, Exception):  # interrupted while it entered a mode of torch, which lives as long
        traceback.clear_frames(error.__traceback__)
    if isinstance(error, (RuntimeError, MemoryError, OSError)):  # torch's out of memory is a RuntimeError
        cause = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise StepFailed(f"a step failed ({cause}); load the model again") from error


def _join_rows(parts: list[list[torch.Tensor]], all_logits: bool, width: int) -> list[torch.Tensor]:
    """Every sequence's rows of logits, or its last one."""
    if all_logits:
        return [torch.stack(rows) if rows else torch.empty(0, width) for rows in parts]
    return [rows[-1] if rows else torch.empty(0) for rows in parts]


def _encode(tokenizer: Any, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    if not tokenizer:
        raise UserError("the model file has no tokenizer: give token ids")
    return tokenizer.encode(prompt)


def _draw(engine: Engine, tokens: Sequence[int], sampler: Sampler) -> int:
    """Append tokens to sequence 0; the next one."""
    found = engine.forward(tokens, best_only=sampler.greedy)
    assert isinstance(found, torch.Tensor)
    return sampler.take_best(*found.tolist()) if sampler.greedy else sampler.choose(found)


def _decode(engine: Engine, token: int, most: int, sampler: Sampler, stops: Collection[int]) -> Generator[int]:
    """Tokens one by one. engine: its `forward` computes each; a leader of ranks stands for one."""
    for made in range(most):
        if token in stops:
            break
        yield token
        if made + 1 == most or engine._sequences.is_full(0):
            break
        token = _draw(engine, [token], sampler)


def _recent_blocks(executor: Executor) -> RecentBlocks | None:
    """Blocks of layers with a window, on every rank alike; None where the model has no such layers."""
    window, shape = executor.spec.config.window, executor.states
    if not window:
        return None
    blocks = window_blocks(window, shape.context, shape.sequences, shape.batch or shape.context)
    return RecentBlocks(blocks, shape.sequences, window, shape.batch or shape.context)


def _whole_numbers(lists: Sequence[Sequence[int]]) -> list[list[int]]:
    """The lists with their numbers as ints, of whatever integer type they are. Raises UserError for other things."""
    try:
        return [[index(token) for token in ids] for ids in lists]
    except TypeError as error:
        raise UserError(
            f"these are no token ids ({error}); give whole numbers, in one list or one for each sequence"
        ) from None
