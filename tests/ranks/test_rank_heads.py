"""Heads and draft models over ranks: texts are those without drafts, whoever has which part of what drafts."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from head_engines import add_head, open_headed
from head_files import write_headed
from model_files import write_gguf
from plan_samples import with_workload
from thread_ranks import Tiers, random_tiers, run_variant, split_variant

from pshard.batch import VERIFY
from pshard.models import open_model
from pshard.models.attach_draft import open_drafted
from pshard.plan import Variant
from pshard.runtime.engine import Engine
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.sampling import Sampling
from pshard.runtime.sampling.chain import Penalties
from pshard.runtime.speculation.draft_length import DraftLength
from pshard.runtime.speculation.second_program import Ask
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.runtime.texts.text import Piece
from pshard.runtime.walks.chain import Chain
from pshard.speculation import DRAFT, LOOKUP_DRAFT, LOOKUP_MTP, MTP, AcceptanceRecord
from pshard.workload import Limits, Split

CONTEXT, TOKENS = 128, 24
EXAMPLES = Path(__file__).parents[2] / "examples"
RNG = random.Random(3)
IDS = [RNG.randrange(90) for _ in range(100)]
GREEDY, DRAWN = Sampling(temperature=0), Sampling(seed=5, temperature=0.8, penalties=Penalties(1.2, 0.3, 0.1, 16))
DENSE, HYBRID, MIXTURE, LATENT = "llama", "dense", "glm", "latent"
CASES = [  # how ranks cut a head depends on its kind; a pipeline's last rank has it whole
    *((like, "tensor") for like in (DENSE, HYBRID, MIXTURE)),
    *((like, "layer") for like in ("moe", MIXTURE, LATENT)),
]


def write(folder: Path, like: str) -> Path:
    """A model with a head; that of the mixture has a table and an output of its own."""
    write_headed(folder / "m.gguf", like, own=like == MIXTURE)
    return folder / "m.gguf"


def plan(
    path: Path,
    mode: str,
    shares: tuple[float, ...] = (1.0, 2.0),
    on_acc: bool = True,
    tiers: Tiers | None = None,
    limits: Limits = (),
) -> Variant:
    """A plan over ranks with the model's head."""
    variant = split_variant(path, Split(mode, shares, limits), CONTEXT, tiers, keeps_states=True)
    return add_head(with_workload(variant, type_k="f32", type_v="f32"), open_model(path).spec, on_acc)


def run(path: Path, variant: Variant, talk: Callable[[Engine], Any]) -> list[Any]:
    return run_variant(path, variant, talk, kernels="fast", checkpoint_bytes=1 << 24)


def tell(engine: Engine, sampling: Sampling, drafts: int = 0, kind: str = MTP, **more: Any) -> tuple[list[int], Any]:
    record = AcceptanceRecord(kind)
    engine.reset()
    wanted = DraftSettings(kind, drafts, record=record, **more) if drafts else None
    told = list(engine.generate(IDS[:40], TOKENS, sampling, False, None, wanted))
    assert list(engine.generate([9], 3, sampling, False)), "behind what was told"
    return told, record


def tell_all(engine: Engine) -> list[Any]:
    """Texts, and what became of drafts; whether these were had or not says nothing of the texts."""
    found = list[Any]()
    for sampling, most in ((GREEDY, 1), (DRAWN, 3)):
        alone, _ = tell(engine, sampling)
        drafted, record = tell(engine, sampling, most, fixed=True)
        assert drafted == alone and record.tried
        found.append((alone, record.steps, record.tried, record.held))
    return found


def tell_drawn(engine: Engine) -> Any:
    """One text of `tell_all`."""
    drafted, record = tell(engine, DRAWN, 3, fixed=True)
    assert drafted == tell(engine, DRAWN)[0] and record.tried
    return drafted, record.steps, record.tried, record.held


@pytest.mark.quick("latent-layer")
@pytest.mark.parametrize(("like", "mode"), CASES)
def test_texts_with_drafts_are_those_without_on_every_rank(tmp_path: Path, like: str, mode: str) -> None:
    """A pipeline computes what one device does, drafts too."""
    path, on_acc = write(tmp_path, like), CASES.index((like, mode)) % 2 == 0
    first, second = run(path, plan(path, mode, on_acc=on_acc), tell_all)
    assert first == second
    if mode == "layer":
        with open_headed(path, on_acc=on_acc, context=CONTEXT, tokens=(4, 16)) as engine:
            assert tell_all(engine) == first


@pytest.mark.quick("1-layer", "0-tensor")
@pytest.mark.parametrize(("seed", "mode"), [(0, "tensor"), (1, "layer"), (2, "tensor")])
def test_it_does_not_matter_where_units_are_or_what_each_ranks_clock_says(
    tmp_path: Path, seed: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, (DENSE, HYBRID, MIXTURE)[seed])
    turns = itertools.cycle(range(4))
    monkeypatch.setattr(DraftLength, "choose", lambda length: next(turns))

    def talk(engine: Engine) -> list[Any]:
        found = [tell(engine, sampling)[0] for sampling in (GREEDY, DRAWN)]
        for kind, p_min in ((MTP, 0.0), (MTP, 0.02), (LOOKUP_MTP, 0.0)):
            drafted = [tell(engine, sampling, 3, kind, p_min=p_min) for sampling in (GREEDY, DRAWN)]
            assert [told for told, _ in drafted] == found[:2]
            found.append([record.tried for _, record in drafted])
        return found

    first, *others = run(path, plan(path, mode, (1.0, 2.0), seed % 2 == 0, random_tiers(seed, CONTEXT)), talk)
    assert all(other == first for other in others)


@pytest.mark.quick("shares1-limits1")
@pytest.mark.parametrize(
    ("shares", "limits"), [((1.0, 0.0, 1.0), ()), ((1.0, 1.0), (("output", 1),)), ((1.0, 2.0), (("attention", 1),))]
)
def test_ranks_may_have_nothing_of_some_units(tmp_path: Path, shares: tuple[float, ...], limits: Limits) -> None:
    """Without a column of the logits they have the model's states all the same."""
    path = write(tmp_path, DENSE)
    for mode in ("tensor",) if limits else ("tensor", "layer"):
        first, *others = run(path, plan(path, mode, shares, limits=limits), tell_drawn)
        assert all(other == first for other in others)


def drafts_behind(engine: Engine, text: Any, token: int, most: int = 7) -> tuple[int, ...]:
    return engine.drafter.draft([Ask(text, (token,), most)])[0]


@pytest.mark.parametrize(
    ("like", "shares", "limits"),
    [(DENSE, (1.0, 2.0), ()), (MIXTURE, (1.0, 2.0), ()), (DENSE, (1.0, 1.0), (("output", 1),))],
)
def test_drafts_of_a_cut_head_are_launched_at_once_on_all_ranks(
    tmp_path: Path, like: str, shares: tuple[float, ...], limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, whose graphs repeat: also where a rank has no column of the logits. They are those that come one by
    one."""
    path, chained, run_chain = write(tmp_path, like), list[int](), Chain.run

    def count(chain: Chain, *asked: Any) -> Any:
        chained.append(chain._context.group.rank)
        return run_chain(chain, *asked)

    def talk(engine: Engine) -> list[Any]:
        text = engine.texts.begin()
        engine.texts.extend([(text, IDS[:70])])
        found: list[Any] = [drafts_behind(engine, text, IDS[70], most) for most in (1, 2, 7)]
        engine.texts.close(text)
        return [*found, tell(engine, GREEDY, 3, fixed=True)[0]]

    monkeypatch.setattr(Chain, "run", count)
    variant, found = plan(path, "tensor", shares, limits=limits), list[Any]()
    for repeats in (False, True):
        monkeypatch.setattr(PlainKernels, "repeatable", repeats)
        assert not chained
        found += run_variant(path, variant, talk, checkpoint_bytes=1 << 24)
    assert found == [found[0]] * 4 and len(found[0][2]) == 7
    assert chained.count(0) == chained.count(1) > 2


def test_ranks_chain_no_drafts_where_one_of_them_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a part of the head on the CPU."""
    path = write(tmp_path, DENSE)
    near, far = (plan(path, "tensor", on_acc=on_acc) for on_acc in (True, False))
    mixed = replace(near, drafter_parts=far.drafter_parts)
    monkeypatch.setattr(Chain, "run", lambda *_: pytest.fail("the other rank would wait for ever"))
    monkeypatch.setattr(PlainKernels, "repeatable", True)

    def talk(engine: Engine) -> list[int]:
        return tell(engine, GREEDY, 3, fixed=True)[0]

    first, second = run_variant(path, mixed, talk, checkpoint_bytes=1 << 24)
    assert first == second


@pytest.mark.quick("glm-layer", "moe-layer", "latent-layer")
@pytest.mark.parametrize(("like", "mode"), CASES)
def test_drafts_do_not_depend_on_how_a_text_came(tmp_path: Path, like: str, mode: str) -> None:
    """In one micro-batch or several, after drafts that did not hold, and after cuts, on every rank."""
    path = write(tmp_path, like)

    def talk(engine: Engine) -> tuple[int, ...]:
        texts = engine.texts
        text = texts.begin()
        texts.extend([(text, IDS[:70])])
        right = drafts_behind(engine, text, IDS[70])
        assert len(right) == 7
        texts.close(text)
        text = texts.begin()
        for start in range(0, 66, 11):
            texts.extend([(text, IDS[start : start + 11])])
        drafts_behind(engine, text, IDS[66])
        texts.step([Piece(text, (IDS[66], 5, 6), "all", best=1, kind=VERIFY)])
        assert texts.commit(text, 67) == []
        texts.step([Piece(text, (*IDS[67:70], 8), "all", best=1, kind=VERIFY)])
        assert texts.commit(text, 70) == []
        assert drafts_behind(engine, text, IDS[70]) == right
        texts.extend([(text, [1, 2, 3])])
        for length in () if like in (HYBRID, "moe") else (70, 33):  # where a checkpoint is the model's state is not
            again = texts.cut(text, length)
            texts.extend([(text, [*again, *IDS[length:70]])] if again or length < 70 else [])
            assert drafts_behind(engine, text, IDS[70]) == right
        return right

    assert len(set(run(path, plan(path, mode), talk))) == 1


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_a_saved_text_is_drafted_behind_where_a_rank_has_the_whole_head(tmp_path: Path, mode: str) -> None:
    """Slices of a head are in no file: drafts behind such a text may be others, what is told is not."""
    path, files = write(tmp_path, DENSE), (tmp_path / "one", tmp_path / "ranks")
    with open_headed(path, context=CONTEXT, tokens=(4, 16)) as engine:
        text = engine.texts.begin()
        engine.texts.extend([(text, IDS[:70])])
        engine.texts.save(text, files[0])
        right = drafts_behind(engine, text, IDS[70])

    def talk(engine: Engine) -> tuple[int, ...]:
        text = engine.texts.load(files[0])
        engine.texts.save(text, files[1])
        found = drafts_behind(engine, text, IDS[70])
        engine.texts.close(text)
        assert engine.load(files[0]) == tuple(IDS[:70])
        assert len(list(engine.generate([5], 9, GREEDY, False, None, DraftSettings(MTP, 3)))) == 9
        return found

    found = run(path, plan(path, mode), talk)
    with open_headed(path, context=CONTEXT, tokens=(4, 16)) as engine:
        again = drafts_behind(engine, engine.texts.load(files[1]), IDS[70])
    assert found[0] == found[1]
    assert mode == "tensor" or found[0] == again == right


@pytest.mark.quick("layer-True")
@pytest.mark.parametrize(("mode", "on_acc"), [("layer", True), ("tensor", False)])
def test_a_draft_model_is_whole_on_rank_0(tmp_path: Path, mode: str, on_acc: bool) -> None:
    """The model itself drafts what it tells: nearly all of it, as sums over ranks are rounded otherwise."""
    model = write_gguf(tmp_path / "m.gguf", "qwen3", qtype="Q8_0", n_layers=3, vocab=320)
    small = write_gguf(tmp_path / "s.gguf", "llama", qtype="Q8_0", n_layers=1, vocab=320)
    for draft in (model, small):

        def open_both(draft: Path = draft) -> Any:
            return open_drafted(model, draft)

        variant = with_workload(split_variant(open_both, Split(mode, (1.0, 2.0)), CONTEXT), type_k="f32", type_v="f32")
        variant = add_head(variant, open_both().spec, on_acc)
        assert [p.rank for p in variant.drafters] == [0]

        def talk(engine: Engine) -> list[Any]:
            found = list[Any]()
            for sampling in (GREEDY, DRAWN):
                alone, _ = tell(engine, sampling)
                drafted = [tell(engine, sampling, 3, kind, fixed=True) for kind in (DRAFT, LOOKUP_DRAFT)]
                assert [told for told, _ in drafted] == [alone, alone]
                found.append((alone, *(record.held for _, record in drafted)))
            return found

        first, second = run_variant(open_both, variant, talk, kernels="fast")
        assert first == second and (draft == small or sum(first[0][1]) > 12)


@pytest.mark.parametrize(("mode", "kind"), [("layer", DRAFT), ("tensor", MTP)])
def test_bundled_drafters_bring_as_many_tokens_a_step_over_ranks(mode: str, kind: str) -> None:
    """At least those of one device (tests/runtime/test_bundled_drafters.py)."""

    def open_both() -> Any:
        return open_drafted(EXAMPLES / "demo.gguf", EXAMPLES / "demo-draft.gguf" if kind == DRAFT else None)

    variant = split_variant(open_both, Split(mode, (1.0, 1.0)), CONTEXT, keeps_states=kind == MTP)
    variant = add_head(with_workload(variant, type_k="f32", type_v="f32"), open_both().spec, True)

    def talk(engine: Engine) -> tuple[list[int], float]:
        ids, told, record = engine.tokenizer.encode("First Citizen:\n"), [], AcceptanceRecord(kind)
        for wanted in (None, DraftSettings(kind, 3, fixed=True, record=record)):
            engine.reset()
            told.append(list(engine.generate(ids, 80, GREEDY, False, None, wanted)))
        assert told[0] == told[1]
        return told[0], 80 / record.steps

    first, second = run_variant(open_both, variant, talk, kernels="fast")
    assert first == second and first[1] > 2.0


def test_a_plan_says_of_each_rank_whether_it_has_some_of_what_drafts(tmp_path: Path) -> None:
    path = write(tmp_path, DENSE)
    assert [p.rank for p in plan(path, "layer").drafters] == [1]
    both = plan(path, "tensor")
    assert [p.rank for p in both.drafters] == [0, 1] and both.drafter_on(1) == both.drafter_parts[0]
    assert replace(both, drafter=None).drafters == ()
