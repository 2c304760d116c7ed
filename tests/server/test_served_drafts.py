"""A server's answers with drafts are those without: alone and in company, greedy and drawn, whatever a step holds."""

import json
import random

import pytest
from draft_engines import open_with
from head_engines import open_headed
from head_files import write_headed
from hybrid_files import random_hybrid, write_hybrid_gguf
from model_files import write_gguf
from served import DEMO, EngineLoader
from test_engine_thread import wait_for
from test_served_model import GREEDY, ask, check_blocks, serve  # noqa: F401

from pshard.models import open_model
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.sampling.sampler import Sampling
from pshard.runtime.speculation.second_program import SecondProgram
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.runtime.texts.open_rows import OpenRows
from pshard.server.scheduling.step_drafts import LookupDrafter
from pshard.speculation import DRAFT, LOOKUP, MTP

pytestmark = pytest.mark.usefixtures("vectors_only")
SAMPLINGS = (
    GREEDY,
    Sampling(seed=5),
    Sampling(seed=6, temperature=1.2, top_k=0, penalties=Penalties(1.2, 0.3, 0.1, 32)),
    Sampling(seed=7, logit_bias=((7, 2.0), (9, float("-inf")))),
)
LINES = ("To be, or not to be: that is the question. ", "ROMEO:\nO, she doth teach the torches to burn bright!\n")
FIXED = DraftSettings(LOOKUP, 3, fixed=True)


class Guess(LookupDrafter):
    """Drafts what other runs told, each token with a chance, and elsewhere as lookup does."""

    def __init__(self, told) -> None:
        super().__init__()
        self._told, self._random = [list(ids) for ids in told], random.Random(3)

    def _look_up(self, text, tokens, most):
        for ids in self._told:
            if ids[: len(tokens)] == list(tokens):
                coming = ids[len(tokens) : len(tokens) + most]
                return tuple(t if self._random.random() < 0.7 else (t + 1) % 90 for t in coming)
        return super()._look_up(text, tokens, most)


def prompts(count: int) -> list[list[int]]:
    with open_model(DEMO) as file:
        tokenizer = file.tokenizer()
        return [tokenizer.encode((LINES[i % 2] * (1 + i % 3))[i % 7 :]) for i in range(count)]


def jobs_of(count: int) -> list[dict]:
    """Of all kinds: greedy, drawn, with log-probabilities, grammars and ends."""
    pytest.importorskip("llguidance")
    from pshard.runtime.sampling.grammar import open_words

    with open_model(DEMO) as file:
        tokenizer = file.tokenizer()
        words = open_words(tokenizer, file.spec.config.vocab)
    schema = {"type": "array", "items": {"enum": ["to be", "not to be"]}, "minItems": 3, "maxItems": 3}
    grammar = words.compile_schema(json.dumps(schema))
    found = []
    for i in range(count):
        job = {"sampling": SAMPLINGS[i % 4], "most": 4 + i % 17, "stops": tokenizer.eos_ids}
        job |= {"likely": i % 3} if i % 5 == 2 else {}
        job |= {"constrain": grammar, "most": 40} if i % 6 == 1 else {}
        found.append(job)
    return found


def tell_all(thread, asked, jobs, salt, at_once) -> list[tuple]:
    """Tokens, log-probabilities and ends of every job."""
    ears = []
    for i, (prompt, job) in enumerate(zip(asked, jobs)):
        ears.append(ask(thread, f"{salt}{i}", prompt, salt=salt, **job))
        if not at_once:
            ears[-1].wait()
    told = []
    for ear in ears:
        reason = ear.wait().reason
        told.append((ear.tokens, [one for _, e in ear.events for one in getattr(e, "likely", ())], reason))
    return told


@pytest.mark.parametrize(("count", "settings"), [(7, (3,)), pytest.param(64, (1, 7), marks=pytest.mark.slow)])
def test_texts_in_company_with_drafts_are_those_alone_without(serve, count, settings):  # noqa: F811
    shape = {"sequences": count, "tokens": (1, 4, 16, 64, 256), "context": 128 * count}
    asked, jobs = prompts(count), jobs_of(count)
    plain = serve(EngineLoader(**shape), promises={"gap": 10.0})
    alone = tell_all(plain, asked, jobs, "alone", at_once=False)
    for most in settings:
        loader = EngineLoader(**shape, drafts=DraftSettings(LOOKUP, most, fixed=True))
        thread = serve(loader, promises={"gap": 10.0})
        assert tell_all(thread, asked, jobs, "company", at_once=True) == alone
        counters = thread.snapshot().counters
        assert counters.made_tokens == sum(len(tokens) for tokens, _, _ in alone)
        assert counters.drafted and counters.accepted and len(counters.drafted) == most
        assert thread.snapshot().plan.drafts == most
        check_blocks(thread, loader)


@pytest.mark.slow
def test_texts_that_move_to_another_budget_are_those_alone(serve, monkeypatch):  # noqa: F811
    asked = prompts(4)
    jobs = [{"sampling": SAMPLINGS[i % 4], "most": 60} for i in range(4)]
    plain = serve(EngineLoader(sequences=4), promises={"gap": 10.0})
    alone = tell_all(plain, asked, jobs, "alone", at_once=False)
    told = [[*prompt, *tokens] for prompt, (tokens, _, _) in zip(asked, alone)]
    monkeypatch.setattr("pshard.server.scheduling.step_drafts.LookupDrafter", lambda: Guess(told))
    loader = EngineLoader(sequences=4, tokens=(1, 4, 16, 64, 128), drafts=FIXED)
    thread = serve(loader, promises={"gap": 10.0})
    ears = [ask(thread, f"j{i}", prompt, **job) for i, (prompt, job) in enumerate(zip(asked, jobs))]
    wait_for(lambda: thread.snapshot().counters.made_tokens > 60)
    assert thread.move_budget(2).result(20)
    assert [ear.wait() and ear.tokens for ear in ears] == [tokens for tokens, _, _ in alone]
    counters = thread.snapshot().counters
    assert counters.budget_moves and counters.accepted[0][1] > 30
    check_blocks(thread, loader)


@pytest.mark.parametrize("drafts", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_texts_whose_states_cannot_be_cut_back_are_those_alone(serve, tmp_path, monkeypatch, drafts):  # noqa: F811
    path = tmp_path / "m.gguf"
    write_hybrid_gguf(path, "dense", random_hybrid("dense"))
    rng = random.Random(2)
    asked = [[rng.randrange(90) for _ in range(20 + i)] for i in range(4)]
    jobs = [{"sampling": SAMPLINGS[i % 4], "most": 40} for i in range(4)]
    shape = {"path": path, "sequences": 4, "context": 512, "tokens": (1, 4, 16, 64)}
    plain = serve(EngineLoader(**shape))
    alone = tell_all(plain, asked, jobs, "alone", at_once=False)
    told = [[*prompt, *tokens] for prompt, (tokens, _, _) in zip(asked, alone)]
    monkeypatch.setattr("pshard.server.scheduling.step_drafts.LookupDrafter", lambda: Guess(told))
    loader = EngineLoader(**shape, drafts=FIXED, planned=drafts)
    thread = serve(loader)
    assert tell_all(thread, asked, jobs, "company", at_once=True) == alone
    counters = thread.snapshot().counters
    assert counters.accepted[0][1] > 20 and loader.machines[0].facts.open_rows == max(16, 4 * (drafts + 1))
    check_blocks(thread, loader)


class HeadLoader(EngineLoader):
    """A model with its multi-token head."""

    def open(self, tiers):
        sizes = {name: self.shape[name] for name in ("kernels", "sequences", "context", "tokens")}
        return open_headed(self.path, head=self.drafts is not None, **sizes)


class DraftLoader(EngineLoader):
    """A model that drafts for itself."""

    def open(self, tiers):
        return open_with(self.path, self.path, sequences=self.shape["sequences"], context=self.shape["context"])


def test_a_draft_model_drafts_for_all_texts_at_once_and_they_are_those_alone(serve, tmp_path):  # noqa: F811
    write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=2, vocab=96)
    rng = random.Random(2)
    asked = [[rng.randrange(90) for _ in range(20 + 30 * i)] for i in range(4)]
    jobs = [{"sampling": SAMPLINGS[i % 2], "most": 30 + i} for i in range(4)]
    shape = {"path": tmp_path / "m.gguf", "sequences": 4, "context": 1024, "tokens": (1, 16, 64)}
    alone = tell_all(serve(EngineLoader(**shape)), asked, jobs, "alone", at_once=False)
    loader = DraftLoader(**shape, drafts=DraftSettings(DRAFT, 3, fixed=True))
    thread = serve(loader)
    assert tell_all(thread, asked, jobs, "company", at_once=True) == alone
    counters = thread.snapshot().counters
    assert counters.accepted[2][1] >= 14  # those of greedy texts all hold
    assert thread.snapshot().plan.drafter == DRAFT
    check_blocks(thread, loader)


@pytest.mark.parametrize("like", ["glm4moe", pytest.param("dense", marks=pytest.mark.slow)])
def test_a_models_head_drafts_for_all_texts_at_once_and_they_are_those_alone(serve, tmp_path, like):  # noqa: F811
    write_headed(tmp_path / "m.gguf", like)
    rng = random.Random(2)
    asked = [[rng.randrange(90) for _ in range(20 + 30 * i)] for i in range(4)]
    asked.append([*asked[3][:80], 5, 6])  # begins with a block of another one
    jobs = [{"sampling": SAMPLINGS[i % 4], "most": 30 + i} for i in range(5)]
    shape = {"path": tmp_path / "m.gguf", "sequences": 5, "context": 1024, "tokens": (1, 4, 16, 64)}
    alone = tell_all(serve(HeadLoader(**shape)), asked, jobs, "alone", at_once=False)
    loader = HeadLoader(**shape, drafts=DraftSettings(MTP, 3, fixed=True))
    thread = serve(loader)
    assert tell_all(thread, asked, jobs, "company", at_once=True) == alone
    counters = thread.snapshot().counters
    assert counters.drafted[0][1] > 100 and len(counters.drafted) == 3
    assert thread.snapshot().plan.drafter == MTP
    check_blocks(thread, loader)
    chosen = serve(
        HeadLoader(**shape, drafts=DraftSettings(MTP, 3))
    )  # what it takes to draft counts, and these never hold
    assert tell_all(chosen, asked, jobs, "chosen", at_once=True) == alone
    assert chosen.snapshot().counters.drafted[0][1] < counters.drafted[0][1] / 2


def test_states_of_texts_settle_while_a_head_drafts_for_them(serve, tmp_path, monkeypatch):  # noqa: F811
    write_headed(tmp_path / "m.gguf", "dense")
    drafting, settled = [0], []
    draft, settle = SecondProgram.draft, OpenRows.settle

    def note_draft(*asked):
        drafting[0] += 1
        found = draft(*asked)
        drafting[0] -= 1
        return found

    monkeypatch.setattr(SecondProgram, "draft", note_draft)
    monkeypatch.setattr(OpenRows, "settle", lambda *asked: settled.append(drafting[0]) or settle(*asked))
    shape = {"path": tmp_path / "m.gguf", "sequences": 2, "context": 512, "tokens": (1, 4, 16, 64)}
    thread = serve(HeadLoader(**shape, drafts=DraftSettings(MTP, 3, fixed=True)))
    jobs = [{"sampling": SAMPLINGS[0], "most": 12}] * 2
    told = tell_all(thread, [[3, 4, 5, 6], [7, 8, 9]], jobs, "company", at_once=True)
    assert [len(tokens) for tokens, _, _ in told] == [12, 12]
    assert len(settled) > 8 and sum(settled) >= len(settled) - 2, "the last ones wait for no drafts"
