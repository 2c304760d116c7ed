"""The demo model behind the engine's thread: the same texts as alone, nothing lost, blocks back where they were."""

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from model_files import OSS, write_gguf
from served import DEMO, DiskLoader, EngineLoader
from test_engine_thread import PATIENCE, Waiter, ready, wait_for
from tiles_in_use import tiles_in_use

from pshard.models import open_model
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.sampling.sampler import NO_NUMBERS, Sampling
from pshard.server.jobs import Ended, Job, Progress
from pshard.server.life.serve_model import name_of
from pshard.server.scheduling.promises import Promises
from pshard.server.thread.engine_thread import EngineThread

pytestmark = pytest.mark.usefixtures("vectors_only")
GREEDY = Sampling(temperature=0.0)
WORDS = (
    "Once upon a time",
    "The king",
    "It was late and",
    "She said that",
    "In the beginning",
    "All the world's a stage",
)


@pytest.fixture
def serve():
    threads = []

    def start(loader=None, **how) -> EngineThread:
        promises = Promises(**how.pop("promises", {}))
        thread = EngineThread(loader or EngineLoader(), promises, **how)
        thread.start()
        threads.append(thread)
        ready(thread)
        return thread

    yield start
    for thread in threads:
        thread.drain(0)
        assert thread.join(PATIENCE) and thread.error is None


def ask(thread, name, prompt, most=24, **job) -> Waiter:
    ear = Waiter()
    thread.submit(Job(name, tuple(prompt), most, **{"sampling": GREEDY, **job}), ear)
    return ear


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    with open_model(DEMO) as file:
        tokenizer = file.tokenizer()
        lines = [" ".join(rng.choice(WORDS) for _ in range(1 + i % 9)) for i in range(count)]
        return [tokenizer.encode(line) for line in lines]


def check_blocks(thread, loader) -> None:
    wait_for(lambda: not thread.snapshot().running)
    counts = loader.machines[-1].pool.counts()
    assert counts.used == 0 and counts.free + counts.cached == counts.total


@pytest.mark.slow
def test_24_answers_at_once_are_those_alone(serve):
    loader = EngineLoader(sequences=24, kv_types=("bf16", "bf16"))
    thread = serve(loader, promises={"gap": 10.0})
    asked = prompts(24)
    alone = []
    for i, prompt in enumerate(asked):
        ear = ask(thread, f"one{i}", prompt, salt="alone")
        ear.wait()
        alone.append(ear.tokens)
    together = [ask(thread, f"all{i}", prompt, salt="together") for i, prompt in enumerate(asked)]
    for ear, expected in zip(together, alone):
        assert ear.wait().reason == "length" and ear.tokens == expected
    check_blocks(thread, loader)


@pytest.mark.parametrize("tiles", ["emulated", "amx"])
def test_deterministic_answers_are_those_alone_beside_long_prompts_too(serve, tiles):
    """Above 64 tokens a step has other kernels, above 16 a matrix unit would have, and a KV cache in bf16 makes other
    words of their last bits."""
    loader = EngineLoader(tokens=(1, 8, 64, 512), kv_types=("bf16", "bf16"), deterministic=True)
    with tiles_in_use(tiles):
        thread = serve(loader, promises={"gap": 10.0})
        asked, alone = prompts(6), []
        for i, prompt in enumerate(asked):
            ear = ask(thread, f"one{i}", prompt, salt="alone")
            ear.wait()
            alone.append(ear.tokens)
        ears = [ask(thread, f"all{i}", prompt, salt="together") for i, prompt in enumerate(asked)]
        long = [ask(thread, f"long{i}", (asked[5] * 40)[i : i + 300], 2) for i in range(2)]
        assert [ear.wait() and ear.tokens for ear in ears] == alone
        assert [ear.wait().reason for ear in long] == ["length"] * 2
        assert {step.tier for step in thread.snapshot().steps} == {64}


@pytest.mark.quick("sampling0")
@pytest.mark.parametrize("sampling", [Sampling(seed=5), Sampling(seed=5, top_k=0, penalties=Penalties(1.2))])
def test_a_seed_draws_the_same_in_company(serve, sampling):
    thread = serve()
    asked = prompts(8)
    alone = ask(thread, "alone", asked[0], sampling=sampling, salt="alone")
    alone.wait()
    crowd = [ask(thread, f"j{i}", prompt, salt="crowd", sampling=sampling) for i, prompt in enumerate(asked)]
    assert [ear.wait().reason for ear in crowd] == ["length"] * 8
    assert crowd[0].tokens == alone.tokens


@pytest.mark.quick("sampling1")
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=5)])
def test_a_schema_is_kept_to_by_masks_on_the_device_as_by_whole_rows(serve, sampling):
    pytest.importorskip("llguidance")
    from pshard.runtime.sampling.grammar import follow_grammar

    with open_model(DEMO) as file:
        tokenizer, vocab = file.tokenizer(), file.spec.config.vocab
    thread = serve()
    job = {"constrain": lambda: follow_grammar("schema", '{"enum": ["king", "queen", "time"]}', tokenizer, vocab)}
    job |= {"sampling": sampling, "stops": tokenizer.eos_ids}
    ears = [ask(thread, f"j{likely}", prompts(1)[0], likely=likely, **job) for likely in (None, 0, 3)]
    assert [ear.wait().reason for ear in ears] == ["stop"] * 3
    words = [b"".join(map(tokenizer.token_bytes, ear.tokens)).strip() for ear in ears]
    assert words[0] == words[1] == words[2] and words[0] in (b'"king"', b'"queen"', b'"time"')


def test_scored_prompts_have_the_sums_that_forward_has(serve):
    from engines import open_engine

    thread = serve()
    prompt = prompts(9)[8]
    ear = ask(thread, "s", prompt, 1, scored=True, likely=3)
    ear.wait()
    (scored,) = [e.scored for _, e in ear.events if isinstance(e, Progress) and e.scored]
    with open_engine(DEMO, kernels="fast", context=512) as engine:
        logits = np.asarray(engine.forward(prompt, all_logits=True)).astype(float)
    totals = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    for at in range(1, len(prompt)):
        assert scored[at].token == prompt[at]
        assert scored[at].logprob == pytest.approx(logits[at - 1, prompt[at]] - totals[at - 1], abs=2e-2)
        assert scored[at].best[0][1] == pytest.approx(logits[at - 1].max() - totals[at - 1], abs=2e-2)
        assert len(scored[at].best) == 3 and scored[at].best == tuple(sorted(scored[at].best, key=lambda b: -b[1]))


def test_an_equal_beginning_is_computed_once(serve):
    thread = serve()
    shared = (prompts(6)[5] * 20)[:300]
    ask(thread, "a", [*shared, 1, 2, 3]).wait()
    ear = ask(thread, "b", [*shared, 4, 5])
    ear.wait()
    (progress,) = [e for _, e in ear.events if isinstance(e, Progress)]
    assert progress.cached == 256 and thread.snapshot().counters.cached_tokens == 256


def test_texts_survive_another_budget_and_sleep(serve):
    loader = EngineLoader(sequences=4)
    thread = serve(loader, sleep_idle=0.3)
    asked = prompts(3)
    before = [ask(thread, f"a{i}", prompt, 60) for i, prompt in enumerate(asked)]
    expected = [ear.wait() and ear.tokens for ear in before]
    moved = [ask(thread, f"b{i}", prompt, 60) for i, prompt in enumerate(asked)]
    assert moved[0].began.wait(PATIENCE)
    thread.move_budget(2).result(PATIENCE)
    assert [ear.wait() and ear.tokens for ear in moved] == expected
    wait_for(lambda: thread.snapshot().state == "sleeping")
    assert ask(thread, "c", asked[0], 60).wait().reason == "length"
    assert loader.asked[0] is None and loader.asked[-2:] == [2, 2]  # it may have slept before, on a busy machine


def test_a_router_that_finds_no_numbers_ends_its_own_request_and_no_other(serve, tmp_path):
    """In the prompt, and in the same steps as others; afterwards the server goes on."""
    spoilt, shape = 7, {"n_layers": 2, "n_experts": 8, "n_used": 2, "d_expert": 64}
    embedding = np.random.default_rng(5).standard_normal((320, 256))
    embedding[spoilt] = np.nan
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", extra={"token_embd.weight": embedding}, **shape)
    loader = EngineLoader(path, context=512)
    thread = serve(loader)
    asked = [[3, 4, 5, 6, 8, 9], [3, 4, spoilt, 6, 8, 9], [11, 12, 13, 14, 15, 3]]
    alone = [ask(thread, f"alone {n}", asked[n], salt="alone") for n in (0, 2)]
    assert [ear.wait().reason for ear in alone] == ["length"] * 2
    ears = [ask(thread, f"together {n}", prompt, salt="together") for n, prompt in enumerate(asked)]
    assert ears[1].wait() == Ended("error", NO_NUMBERS)
    for ear, before in zip((ears[0], ears[2]), alone):
        assert ear.wait().reason == "length" and ear.tokens == before.tokens
    check_blocks(thread, loader)


@pytest.mark.parametrize(
    "jobs", [pytest.param(100, marks=pytest.mark.stand_in), pytest.param(600, marks=pytest.mark.slow)]
)
def test_jobs_with_cancels_and_slow_readers_are_not_mixed_up(serve, jobs):
    loader = EngineLoader(sequences=64, context=8192, tokens=(1, 16, 64, 256))
    thread = serve(loader, promises={"queue": 2000, "gap": 5.0})
    asked = prompts(jobs // 25)
    expected = []
    for i, prompt in enumerate(asked):
        ear = ask(thread, f"alone{i}", prompt, 12, salt="alone")
        ear.wait()
        expected.append(ear.tokens)
    ears: dict[int, Waiter] = {}

    def submit(part: int) -> None:
        rng = random.Random(part)
        for i in range(part, jobs, 4):
            ears[i] = ask(thread, f"j{i}", asked[i % len(asked)], 12, key=str(i % 3), salt=str(i % 7))
            if i % 9 == 0:
                if rng.random() < 0.5:
                    time.sleep(0.01)
                thread.cancel(f"j{i}")

    askers = [threading.Thread(target=submit, args=(part,)) for part in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    for i, ear in ears.items():
        assert ear.over.wait(120), "a job was lost"
        if ear.ended == Ended("cancelled"):
            assert i % 9 == 0 and ear.tokens == expected[i % len(asked)][: len(ear.tokens)]
        else:
            assert ear.ended == Ended("length") and ear.tokens == expected[i % len(asked)]
    check_blocks(thread, loader)


@pytest.mark.parametrize(
    ("clients", "rounds", "longest"),
    [(4, 1, 150), pytest.param(8, 3, 500, marks=pytest.mark.slow)],
    ids=["few", "soak"],
)
def test_clients_with_one_system_prompt_get_answers_longer_than_the_window(serve, tmp_path, clients, rounds, longest):
    """What they share leaves their windows at different times; there is room for a block all the same."""
    path = write_gguf(tmp_path / "windows.gguf", OSS, seed=3, context=1024)  # a window of 64 in every other layer
    loader = EngineLoader(path, sequences=4, context=4096, tokens=(1, 4, 64))
    thread = serve(loader, promises={"gap": 10.0, "queue": 1000})
    rng = random.Random(11)
    common = [rng.randrange(320) for _ in range(300)]
    ask(thread, "first", common, 1).wait()
    for turn in range(rounds):
        asked = [[*common, *(rng.randrange(320) for _ in range(rng.randrange(1, 40)))] for _ in range(clients)]
        lengths = [rng.randrange(longest // 2, longest) for _ in asked]
        ears = [ask(thread, f"{turn}.{i}", p, n) for i, (p, n) in enumerate(zip(asked, lengths))]
        for ear, most in zip(ears, lengths):
            assert ear.over.wait(PATIENCE * 6) and ear.ended == Ended("length") and len(ear.tokens) == most
    check_blocks(thread, loader)
    assert len(loader.machines) == 1, "it was loaded again after an error"


@pytest.mark.slow
def test_prompts_of_a_model_on_disk_read_it_once_and_are_answered_as_from_memory(serve, monkeypatch):
    """Alone, several at once beside a text that is answered, after one that is cancelled in a sweep, and on the way to
    a budget in which all is in memory."""
    monkeypatch.setenv("PSHARD_DISK", "fake:rate=200M")
    asked = [(prompts(9)[i] * 60)[:length] for i, length in enumerate((400, 300, 280, 460))]
    shape = {"sequences": 4, "tokens": (1, 4, 16, 64)}
    loader, memory = DiskLoader(**shape), EngineLoader(**shape)
    at_ease, thread = serve(memory), serve(loader, promises={"gap": 10.0})
    expected = [ask(at_ease, f"one{i}", prompt) for i, prompt in enumerate(asked)]
    expected = [ear.wait() and ear.tokens for ear in expected]

    def read() -> int:
        loader.machines[-1]._engine.device.synchronize()
        return loader.machines[-1]._engine.memory().read

    assert ask(thread, "first", asked[0], 0).wait().reason == "length"  # nothing is drawn: one step
    before = read()
    alone = ask(thread, "alone", [*asked[1], *asked[2][:150]], 0, salt="b")
    assert alone.wait().reason == "length"
    spec = loader.machines[-1]._engine._executor.spec
    tier = loader.machines[-1]._engine.rank_plan.tiers[-1]
    far = [spec.unit(p.unit) for p in tier.placements if p.site.is_beyond_host]
    assert read() - before == sum(t.file_nbytes for u in far for t in u.tensors if len(t.shape) == 2)
    assert thread.snapshot().steps[-1].prompts == 450

    speaker = ask(thread, "speaker", asked[0], salt="c")
    assert speaker.began.wait(PATIENCE)
    others = [ask(thread, f"all{i}", prompt, salt="c") for i, prompt in enumerate(asked[1:])]
    for ear, tokens in zip((speaker, *others), expected):
        assert ear.wait().reason == "length" and ear.tokens == tokens
    assert max(step.prompts for step in thread.snapshot().steps) > 64

    gone = ask(thread, "gone", asked[3], salt="d")
    wait_for(lambda: thread.snapshot().running)
    thread.cancel("gone")
    assert gone.wait().reason == "cancelled"
    again = ask(thread, "again", asked[3], salt="d")
    assert again.wait().reason == "length" and again.tokens == expected[3]
    moving = [ask(thread, f"move{i}", prompt, 24, salt="e") for i, prompt in enumerate(asked)]
    assert thread.move_budget(2).result(PATIENCE)
    for ear, tokens in zip(moving, expected):
        assert ear.wait().reason == "length" and ear.tokens == tokens
    check_blocks(thread, loader)
    assert [machine.facts.swept for machine in loader.machines] == [8, 1]


def test_a_model_is_called_by_its_file() -> None:
    for path, name in (
        ("a/Qwen3-32B-Q4_0.gguf", "Qwen3-32B-Q4_0"), ("a/Big.v1-00001-of-00003.gguf", "Big.v1"),
        ("models/Llama-3.1-8B", "Llama-3.1-8B"),
    ):  # fmt: skip
        assert name_of(Path(path)) == name
