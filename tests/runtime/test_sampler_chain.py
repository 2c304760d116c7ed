"""The chain of samplers against one written out token by token, from what llama.cpp's documentation says of each."""

import json
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pshard.errors import StepFailed, UserError
from pshard.runtime.sampling import Sampler, Sampling
from pshard.runtime.sampling.chain import SAMPLERS, Candidates, Penalties, keep_mass, keep_near_best, keep_usual

DEMO = Path(__file__).parents[2] / "examples" / "demo.gguf"


def chances_of(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values())
    weights = {token: math.exp(value - top) for token, value in logits.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def draw_slowly(values: list[float], sampling: Sampling, before: list[int]) -> dict[int, float]:
    """Chances of the tokens that are left, by dictionaries and loops."""
    left = dict(enumerate(values))
    for token, more in sampling.logit_bias:
        left[token] += more
    left = {token: value for token, value in left.items() if value > -math.inf}
    for name in sampling.samplers:
        ranked = sorted(left, key=lambda token: (-left[token], token))
        chances = chances_of(left)
        if name == "penalties":
            p = sampling.penalties
            recent = before[-p.last :] if p.last > 0 else before if p.last == -1 else []
            for token in left:
                if times := recent.count(token):
                    left[token] = left[token] / p.repeat if left[token] > 0 else left[token] * p.repeat
                    left[token] -= times * p.frequency + p.presence
        elif name == "top_k" and sampling.top_k:
            left = {token: left[token] for token in ranked[: sampling.top_k]}
        elif name == "top_p" and sampling.top_p < 1:  # rounded sums may reach 1 before the last token
            reached, kept = 0.0, []
            for token in ranked:
                kept.append(token)
                reached += chances[token]
                if reached >= sampling.top_p:
                    break
            left = {token: left[token] for token in kept}
        elif name == "min_p":
            best = chances[ranked[0]]
            left = {token: left[token] for token in ranked if chances[token] >= sampling.min_p * best}
        elif name == "temperature" and sampling.temperature > 0:
            left = {token: value / sampling.temperature for token, value in left.items()}
        elif name == "temperature":
            left = {ranked[0]: 0.0}
    return chances_of(left)


ORDERS = st.lists(st.sampled_from(SAMPLERS), min_size=1, max_size=5, unique=True).map(tuple)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6), n=st.integers(2, 700), order=st.one_of(st.just(SAMPLERS), ORDERS),
    temperature=st.sampled_from((0, 0.5, 0.8, 2.0)), k=st.sampled_from((0, 1, 5, 40)),
    mass=st.sampled_from((0.1, 0.9, 1.0)), share=st.sampled_from((0.0, 0.07, 0.9)),
    repeat=st.sampled_from((1.0, 1.3, 0.7)), frequency=st.sampled_from((0.0, 0.4)),
    last=st.sampled_from((-1, 0, 3, 64)),
)  # fmt: skip
def test_samplers_in_any_order_leave_the_chances_of_one_written_out(
    seed, n, order, temperature, k, mass, share, repeat, frequency, last
) -> None:
    random = np.random.default_rng(seed)
    values = (3 * random.standard_normal(n)).astype(np.float32)
    before = random.integers(0, n, 20).tolist()
    bias = ((int(random.integers(n)), -math.inf), (int(random.integers(n)), 2.5)) if seed % 2 and n > 4 else ()
    sampling = Sampling(
        temperature, k, mass, share, 1, Penalties(repeat, frequency, frequency / 2, last), bias, order
    )  # fmt: skip
    sampler = Sampler(sampling)
    sampler.see(before)
    found = sampler.filter(values)
    wanted = draw_slowly(values.tolist(), sampling, before)
    mine = dict(zip(found.ids.tolist(), found.chances().tolist()))
    assert mine.keys() == wanted.keys()
    assert mine == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("mass", [0.3, 0.95, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
def test_the_usual_chain_leaves_the_same_bits_as_its_samplers_one_by_one(mass, share, scale) -> None:
    random = np.random.default_rng(4)
    for n in (1, 2, 40, 300):
        logits = -np.sort(-(scale * random.standard_normal(n)).astype(np.float32).astype(np.float64))
        found = Candidates(random.permutation(n), logits, True)
        mine, wanted = keep_usual(found, mass, share), keep_near_best(keep_mass(found, mass), share)
        assert mine.ids.tolist() == wanted.ids.tolist() and mine.logits.tobytes() == wanted.logits.tobytes()
        powers = np.exp(wanted.logits - wanted.logits.max())
        assert mine.chances().tobytes() == (powers / powers.sum()).tobytes()


def test_a_greedy_draw_sees_penalties_and_bias() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0])
    greedy = Sampling(temperature=0)
    assert Sampler(greedy).choose(logits) == 0
    assert Sampler(replace(greedy, logit_bias=((2, 9.0),))).choose(logits) == 2
    penal = Sampler(replace(greedy, penalties=Penalties(presence=1.0)))
    assert [penal.choose(logits) for _ in range(2)] == [0, 1]  # what was drawn counts


def test_no_token_left_is_said() -> None:
    with pytest.raises(StepFailed, match="no token is left"):
        Sampler(Sampling(logit_bias=((0, -math.inf), (1, -math.inf)))).choose(torch.tensor([1.0, 2.0]))


def test_a_bias_on_a_token_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match="there is no token 7; give 0 to 4"):
        Sampler(Sampling(logit_bias=((7, 1.0),)), vocab=5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"penalties": Penalties(repeat=0)}, "--repeat-penalty is 0"),
        ({"penalties": Penalties(presence=math.nan)}, "--presence-penalty is nan"),
        ({"penalties": Penalties(last=-2)}, "--repeat-last-n is -2"),
        ({"samplers": ("top_k", "dry")}, "there is no 'dry'; there are penalties;top_k"),
        ({"top_p": 7}, "--top-p is 7"),
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Sampling(**wrong)


def test_a_draw_from_the_best_that_a_constraint_allows_is_that_from_all() -> None:
    class Low:
        """Allows every third token."""

        def mask(self, logits):
            return np.where(np.arange(len(logits)) % 3, np.float32(-np.inf), logits)

        def accept(self, token) -> None:
            assert token % 3 == 0

    random = np.random.default_rng(3)
    for sampling in (Sampling(seed=5), Sampling(seed=5, top_k=7, samplers=SAMPLERS[:2]), Sampling(temperature=0)):
        best, whole = Sampler(sampling, Low()), Sampler(sampling, Low())
        assert best.enough == 0 and best.enough_allowed == (1 if sampling.greedy else sampling.top_k)
        for _ in range(50):
            logits = (3 * random.standard_normal(100)).astype(np.float32)
            masked = Low().mask(logits)
            ids = np.argsort(-masked, kind="stable")[: best.enough_allowed]
            assert best.choose_among(ids, masked[ids]) == whole.choose(torch.from_numpy(logits))


def test_a_grammar_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from pshard.runtime.sampling.grammar import follow_grammar

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match="pip install llguidance"):
        follow_grammar("grammar", 'root ::= "a"', None, 5)


def test_words_of_a_grammar_allow_what_its_mask_allows() -> None:
    pytest.importorskip("llguidance")
    from pshard.models import open_model
    from pshard.runtime.sampling.grammar import follow_grammar

    with open_model(DEMO) as file:
        tokenizer, vocab = file.tokenizer(), file.spec.config.vocab
    grammar = follow_grammar("schema", '{"type": "boolean"}', tokenizer, vocab)
    words, masked = grammar.words(), grammar.mask(np.zeros(vocab, np.float32))
    assert words.dtype == np.uint32 and words.shape == (-(-vocab // 32),)
    allowed = [token for token in range(vocab) if words[token // 32] >> np.uint32(token % 32) & np.uint32(1)]
    assert allowed == np.flatnonzero(masked == 0).tolist()
    assert 0 < len(allowed) < vocab / 2
    assert all(tokenizer.token_bytes(token)[:1] in (b"t", b"f") for token in allowed)


def test_a_schema_that_grows_too_large_is_an_error_of_who_gave_it_and_tells_nothing_of_the_answer() -> None:
    pytest.importorskip("llguidance")
    from pshard.models import open_model
    from pshard.runtime.sampling.grammar import follow_grammar

    letters = {"type": "string", "pattern": "^(([a-z]{1,100}){1,100}){1,100}$"}
    schema = {"type": "object", "properties": {"a": letters}, "required": ["a"]}
    with open_model(DEMO) as file:
        tokenizer, vocab = file.tokenizer(), file.spec.config.vocab
    grammar = follow_grammar("schema", json.dumps(schema), tokenizer, vocab)
    with pytest.raises(UserError, match=r"cannot be followed: .*; give a simpler one") as caught:
        for token in tokenizer.encode('{"a":"' + "inglyinglyses" * 20, add_special=False):
            grammar.words()
            grammar.accept(token)
    assert "ingly" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("samplers", [SAMPLERS, ("temperature", "top_k", "top_p", "min_p")])
def test_next_to_no_temperature_draws_the_likeliest_without_a_warning(samplers) -> None:
    logits = torch.tensor([1.0, 30.0, -3e38, 30.0, 29.999])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for temperature in (5e-324, 1e-320, 1e-200, 1e-90):
            sampler = Sampler(Sampling(temperature=temperature, top_k=0, min_p=0.0, seed=3, samplers=samplers))
            assert {sampler.choose(logits) for _ in range(40)} == {1, 3}, temperature


def test_a_penalty_next_to_nothing_warns_of_nothing() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for temperature in (0.0, 1e-320, 1e-90, 1.0):
            sampler = Sampler(Sampling(temperature=temperature, penalties=Penalties(repeat=1e-320), seed=1))
            sampler.see([2])
            assert sampler.choose(logits) == 2
