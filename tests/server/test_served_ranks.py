"""A model over several ranks behind one scheduler: the same texts as on one, and a dead rank ends no server."""

import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe

import pytest
from cli_world import made_up_profile
from engines import pinned_everywhere
from head_engines import add_head
from head_files import write_headed
from model_files import write_gguf
from plan_samples import make_rank_plan, make_variant
from served import EngineLoader
from test_engine_thread import PATIENCE, ask, ready, wait_for
from thread_ranks import Meeting, ThreadGroup

from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import KernelRefused, StepFailed
from pshard.models import open_model
from pshard.models.attach_draft import open_drafted
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.sampling import Sampling
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.server.life.how_to_run import HowToRun
from pshard.server.life.rank_machine import RankMachine, Ranks
from pshard.server.life.rank_program import RankTask, follow_parent, serve_to_the_end
from pshard.server.life.read_facts import plan_drafts, read_facts
from pshard.server.scheduling.promises import Promises
from pshard.server.thread.engine_thread import EngineThread
from pshard.speculation import DRAFT, LOOKUP, MTP
from pshard.workload import Split

TOKENS, CONTEXT, SEQUENCES = (1, 4, 16, 64), 512, 4
HOT = Sampling(seed=11)
NO_DRAFTS = DraftSettings()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("ranks") / "m.gguf", arch="llama", qtype="Q8_0", vocab=333)


def rank_variant(path, mode, draft=None):
    """draft: the model that drafts; "head": the model's own head does."""
    split, headed = Split(mode, (1.0, 1.0)), draft == "head"
    with open_drafted(path, None if headed else draft) as file:
        whole = replace(file.spec, keeps_states=headed)
        specs = cut_ranks(whole, split)
    tiers = [pinned_everywhere(spec, TOKENS, CONTEXT, SEQUENCES) for spec in specs]
    plans = tuple(make_rank_plan(s, t, r, 0.5) for r, (s, t) in enumerate(zip(specs, tiers)))
    variant = make_variant(specs[0], tiers[0], CONTEXT, SEQUENCES, plans)
    variant = replace(variant, workload=variant.workload.under(split))
    return add_head(variant, whole, True) if draft else variant


def facts_of(path, variant, drafts=NO_DRAFTS):
    with open_model(path) as file:
        return lambda notes: plan_drafts(read_facts(file.spec, made_up_profile(), variant, (1, 2), notes), drafts)


class ThreadLoader:
    """Ranks that are threads of this process."""

    budgets = (1, 2)

    def look_again(self, budget, plan, stopped): ...

    def __init__(self, path, mode, drafts=NO_DRAFTS, draft=None, kernels="plain"):
        self.path, self.variant, self.drafts = path, rank_variant(path, mode, draft), drafts
        self.draft, self.kernels = None if draft == "head" else draft, kernels

    def load(self, budget):
        ranks, pairs, meeting = 2, [Pipe() for _ in range(2)], Meeting(2)

        def run(rank):
            group = ThreadGroup(rank, meeting)
            file, device = open_drafted(self.path, self.draft), open_device("cpu")
            with (
                suppress(EOFError),
                build_engine(file, self.variant, device, kernels=self.kernels, group=group) as e,
            ):
                follow_parent(pairs[rank][1], e, rank == 0)

        for rank in range(ranks):
            threading.Thread(target=run, args=(rank,), daemon=True).start()
        group = Ranks([here for here, _ in pairs], [], [])
        return RankMachine(group, facts_of(self.path, self.variant, self.drafts)(group.hear()))


class ProcessLoader(ThreadLoader):
    """Ranks that are processes, as users have them."""

    def load(self, budget):
        task = RankTask(self.path, made_up_profile(), self.variant, HowToRun("plain"))
        self.machine = RankMachine.start(task, facts_of(self.path, self.variant))
        return self.machine


@pytest.fixture
def serve():
    threads = []

    def start(loader) -> EngineThread:
        thread = EngineThread(loader, Promises(gap=10.0))
        thread.start()
        threads.append(thread)
        ready(thread, 100)  # processes import torch one after the other on a small machine
        return thread

    yield start
    for thread in threads:
        thread.drain(0)
        assert thread.join(PATIENCE)


def tell_all(thread) -> list[list[int]]:
    """Greedy and drawn texts, some at once, one scored, one that shares its beginning."""
    prompts = [[(i * 37 + k * 11) % 320 for k in range(5 + 30 * i)] for i in range(4)]
    ears = [ask(thread, f"a{i}", prompt, 6) for i, prompt in enumerate(prompts)]
    ears.append(ask(thread, "hot", prompts[2], 6, sampling=HOT, likely=2))
    ears.append(ask(thread, "scored", prompts[1], 3, scored=True, likely=2))
    for ear in ears:
        assert ear.wait().reason == "length"
    again = ask(thread, "again", prompts[3], 6)
    assert again.wait().reason == "length" and any(getattr(e, "cached", 0) >= 64 for _, e in again.events)
    return [ear.tokens for ear in (*ears, again)]


@pytest.mark.parametrize("mode", ["tensor", pytest.param("layer", marks=pytest.mark.slow)])
def test_ranks_tell_what_one_device_tells(serve, model, mode):
    alone = serve(EngineLoader(model, SEQUENCES, CONTEXT, TOKENS, "plain"))
    thread = serve(ThreadLoader(model, mode))
    assert tell_all(thread) == tell_all(alone)
    wait_for(lambda: not thread.snapshot().running)
    assert thread.snapshot().blocks.used == 0


def test_ranks_with_drafts_tell_what_one_device_tells_without(serve, model, monkeypatch):
    """Whoever drafts the right tokens: a text is cut back on all ranks to those that are told."""
    alone = tell_all(serve(EngineLoader(model, SEQUENCES, CONTEXT, TOKENS, "plain")))
    monkeypatch.setattr("pshard.server.scheduling.step_drafts.LookupDrafter", Guess)
    Guess.told, Guess.right = alone, True
    thread = serve(ThreadLoader(model, "tensor", DraftSettings(LOOKUP, 3, fixed=True)))
    assert tell_all(thread) == alone
    counters = thread.snapshot().counters
    assert counters.accepted[0][1] > 5 and counters.drafted[0][1] > counters.accepted[0][1]
    wait_for(lambda: not thread.snapshot().running and not thread.snapshot().blocks.used)


@pytest.mark.parametrize(("kind", "mode"), [(MTP, "tensor"), (DRAFT, "layer")])
def test_ranks_whose_own_program_drafts_tell_what_they_tell_without(serve, tmp_path, kind, mode):
    """A head that no text was trained on, whose drafts hold by chance; and the model itself, all of whose hold."""
    if kind == MTP:
        write_headed(tmp_path / "m.gguf", "llama")
    else:
        write_gguf(tmp_path / "m.gguf", "llama", qtype="Q8_0", n_layers=2, vocab=320)
    path, draft = tmp_path / "m.gguf", "head" if kind == MTP else tmp_path / "m.gguf"
    alone = tell_all(serve(ThreadLoader(path, mode, kernels="fast")))
    thread = serve(ThreadLoader(path, mode, DraftSettings(kind, 3, fixed=True), draft, "fast"))
    assert tell_all(thread) == alone
    counters = thread.snapshot().counters
    assert counters.drafted[0][1] > 5 and (kind == MTP or counters.accepted[0][1] > 5)
    wait_for(lambda: not thread.snapshot().running and not thread.snapshot().blocks.used)


class Guess:
    """Drafts what came after the same tokens elsewhere, and every other time something else."""

    def draft(self, asked):
        return [self.draft_one(*one) for one in asked]

    def draft_one(self, text, tokens, most):
        Guess.right = not Guess.right
        for told in self.told:
            for made in range(1, len(told)):
                if tokens[-made:] == told[:made]:
                    return tuple((t + (not Guess.right)) % 300 for t in told[made : made + most])
        return ()


class RefusingLoader(ThreadLoader):
    """One of the ranks cannot run a kernel of the first step."""

    def __init__(self, path, mode, refuses):
        super().__init__(path, mode)
        self.refuses, self.loads, self.codes = refuses, 0, []

    def load(self, budget):
        self.loads += 1
        pairs, meeting = [Pipe() for _ in range(2)], Meeting(2)

        def refuse(*_):
            raise KernelRefused("decode_kernel needs 141312 of shared memory: A card (sm_86) cannot run this")

        def run(rank):
            def serve(pipe):
                group, device = ThreadGroup(rank, meeting), open_device("cpu")
                with build_engine(open_model(self.path), self.variant, device, kernels="plain", group=group) as e:
                    if rank == self.refuses:
                        e.texts.step = refuse
                    follow_parent(pipe, e, rank == 0)

            self.codes.append(serve_to_the_end(pairs[rank][1], serve))

        for rank in range(2):
            threading.Thread(target=run, args=(rank,), daemon=True).start()
        group = Ranks([here for here, _ in pairs], [], [])
        return RankMachine(group, facts_of(self.path, self.variant)(group.hear()))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kernel_that_a_rank_cannot_run_ends_the_server_at_once(serve, model, rank, capsys):
    """Loading again would not help, whatever the other ranks do meanwhile: they wait for the one that is gone."""
    loader = RefusingLoader(model, "tensor", rank)
    thread = serve(loader)
    assert ask(thread, "first", (1, 2, 3), 4).wait().reason == "error"
    assert thread.join(PATIENCE)
    assert isinstance(thread.error, KernelRefused) and loader.loads == 1 and thread.snapshot().state == "failed"
    assert str(thread.error).startswith(f"rank {rank} of 2: decode_kernel needs 141312")
    wait_for(lambda: loader.codes[:1] == [1])  # its thread ends behind the server
    assert "cannot run this" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dead_rank_ends_requests_with_an_error_and_the_group_is_started_again(serve, model):
    loader = ProcessLoader(model, "tensor")
    thread = serve(loader)
    expected = tell_all(thread)
    ear = ask(thread, "victim", (1, 2, 3), 400)
    assert ear.began.wait(PATIENCE)
    os.kill(loader.machine._ranks._processes[1].pid, signal.SIGKILL)
    ended = ear.wait()
    assert ended.reason == "error" and ended.retry
    wait_for(lambda: thread.snapshot().counters.restarts == 1)
    ready(thread, 100)
    assert tell_all(thread) == expected


@pytest.mark.slow
def test_a_rank_that_cannot_load_is_named(model, tmp_path):
    loader = ProcessLoader(model, "tensor")
    loader.path = tmp_path / "gone.gguf"
    task = RankTask(loader.path, made_up_profile(), loader.variant, HowToRun("plain"))
    with pytest.raises(StepFailed, match=r"rank . of 2 ended with code 2"):
        RankMachine.start(task, lambda notes: None)
