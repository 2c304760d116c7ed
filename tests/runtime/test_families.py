"""Logits of every family equal a float64 forward written from its recipe, wherever its units are, and transformers'."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import family_files
import numpy as np
import pytest
import torch
from engines import open_engine, pinned_everywhere
from family_files import (
    _OWN_KEYS,
    FAMILIES,
    IN_FOLDERS,
    RECIPES,
    REMOTE,
    hf_settings,
    write_bare_folder,
    write_family,
    write_family_folder,
)
from family_forward import LongRope, Moe, Recipe, Weights, Yarn, family_logits
from model_files import write_gguf
from plan_samples import make_tier

from pshard.errors import UserError
from pshard.models import open_model
from pshard.runtime.engine import Engine
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.recording import CallList, record

pytestmark = pytest.mark.usefixtures("exact_gelu")
RNG = random.Random(0)
IDS = [RNG.randrange(320) for _ in range(140)]
LONG = 512  # a context beyond what phi3's and mistral3's recipes were trained with


def difference(found: np.ndarray | torch.Tensor, expected: np.ndarray) -> float:
    """The largest difference, in standard deviations of the expected logits."""
    return float(np.abs(np.asarray(found) - expected).max() / expected.std())


def note_recordings(monkeypatch: pytest.MonkeyPatch) -> list[CallList | None]:
    """What is written down of the CPU's calls from now on; None: something cannot be replayed."""
    lists = list[CallList | None]()

    def record_too(work: Callable[[], None]) -> CallList | None:
        lists.append(record(work))
        return lists[-1]

    monkeypatch.setattr("pshard.runtime.kernels.cpu.recording.record", record_too)
    return lists


def run(engine: Engine) -> torch.Tensor:
    """Logits of all ids: of a prompt, and of single tokens."""
    parts = [IDS[:135], *([i] for i in IDS[135:])]
    return torch.cat([engine.forward(part, all_logits=True) for part in parts])


@pytest.mark.quick(
    "minicpm",
    "llama-biased",
    "arctic",
    "olmo2",
    "deci",
    "granitemoe",
    "mimo2",
    "apertus",
    "grovemoe",
    "refact",
    "mistral3",
    "stablelm-12b",
    "gemma2",
    "llama4",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_a_float64_forward_wherever_units_are(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fast kernels a token's layers are recorded once and replayed then, whatever the family computes."""
    recipe, weights, path = write_family(tmp_path / "m.gguf", family)
    expected = family_logits(recipe, weights, IDS)
    if family in REMOTE:  # the plain kernels of others run below, beside transformers
        with open_engine(path, context=LONG) as engine:
            assert difference(run(engine), expected) < 1e-5
    lists = note_recordings(monkeypatch)
    with open_engine(path, context=LONG, kernels="fast") as engine:
        logits = [engine.forward(IDS[:135], all_logits=True)]
        lists.clear()
        logits += [engine.forward([token], all_logits=True) for token in IDS[135:]]
    assert difference(torch.cat(logits), expected) < 1e-5
    assert not native.is_available() or (len(lists) == 2 and lists[1] is not None)  # the embedding, then the layers
    with open_model(path) as file:
        spec = file.spec
    for weights_at in ("streamed", "cpu"):
        where = {
            u.name: (weights_at if (weights_at, "host" if u.kind.state else None) in u.kind.places else "pinned",
                     "host" if u.kind.state else None)
            for u in spec.units
        }  # fmt: skip
        tiers = tuple(make_tier(spec, n, where, 2, LONG, 1, batch=64) for n in (1, 64))
        with open_engine(path, tiers, "fast", LONG) as engine:
            got = run(engine)
        assert difference(got, expected) < 1e-5, weights_at


MISTAKES = {
    "smollm3": [{"still": ()}, {"still": (True, False, False, False)}, {"adjacent": False}, {"thetas": (1e4, 1e4)}],
    "granite": [{"embed": 1.0}, {"residual": 1.0}, {"score": 32**-0.5}, {"logits": 1.0}],
    "seed_oss": [{"biases": False}, {"adjacent": True}],
    "llama-biased": [{"ffn_biases": False}, {"out_bias": False}, {"biases": False}, {"adjacent": False}],
    "qwen3vl": [{"head_norms": False}, {"adjacent": True}],
    "qwen3vlmoe": [{"experts": Moe(8, 3)}],
    "mistral3": [
        {"temperature": (0.0, 64)}, {"temperature": (0.1, 65)}, {"yarn": Yarn(4.0, 64, 1 + 0.1 * np.log(4))},
        {"yarn": None},
    ],
    "glm4": [{"after": False}, {"rotated": 32}, {"adjacent": False}, {"biases": False}],
    "phi3": [
        {"rotated": 32, "longrope": None}, {"context": 128},
        {"longrope": LongRope(*RECIPES["phi3"].longrope[:3], 1.0)},
    ],
    "cohere2": [
        {"centred": False}, {"parallel": False}, {"still": ()}, {"windows": ()}, {"windows": (47, 47, 47, 0)},
        {"windows": (0, 48, 48, 48)}, {"logits": 1.0}, {"adjacent": False}, {"thetas": (1e4, 1e4)},
    ],
    "olmo2": [{"before": True}, {"after": False}, {"wide_norms": False}, {"thetas": (1e4, 1e4)}],
    "olmo3": [{"windows": (47, 47, 47, 0)}, {"windows": ()}, {"yarn": None}, {"wide_norms": False}, {"before": True}],
    "minimax-m2": [
        {"wide_norms": False}, {"rotated": 32}, {"adjacent": True},
        *({"experts": RECIPES["minimax-m2"].experts._replace(**wrong)} for wrong in (
            {"sigmoid": False}, {"normed": False}, {"bias": False})),
    ],
    "command-r": [{"centred": False}, {"parallel": False}, {"logits": 1.0}, {"adjacent": False}],
    "exaone4": [
        {"still": ()}, {"windows": ()}, {"windows": (49, 49, 49, 0)}, {"factors": ()}, {"head_norms": False},
        {"after": False},
    ],
    "exaone-moe": [{"still": ()}, {"windows": (49, 49, 49, 0)}, {"head_norms": False}, {"adjacent": True}],
    "smallthinker": [
        {"still": ()}, {"windows": ()}, {"windows": (0, 47, 47, 47, 0)}, {"relu": False},
        {"still": (False, False, False, True, False)},
        *({"experts": RECIPES["smallthinker"].experts._replace(**wrong)} for wrong in (
            {"early": ""}, {"sigmoid": False}, {"normed": False})),
    ],
    "arctic": [
        {"adjacent": False}, {"thetas": (1e4, 1e4)}, {"eps": 1e-2},
        *({"experts": RECIPES["arctic"].experts._replace(**wrong)} for wrong in (
            {"sigmoid": True}, {"normed": False}, {"used": 1})),
    ],
    "grovemoe": [
        {"head_norms": False}, {"adjacent": True}, {"thetas": (1e4, 1e4)},
        *({"experts": RECIPES["grovemoe"].experts._replace(**wrong)} for wrong in (
            {"chunk": 0}, {"chunk": 4}, {"chunk_scale": 0.25}, {"chunk_input": False}, {"chunk_scores": False},
            {"normed": False}, {"used": 2})),
    ],
    "deci": [{"adjacent": False}, {"factors": ()}, {"thetas": (1e4, 1e4)}, {"eps": 1e-2}],
    "llama4": [
        {"chunks": False}, {"windows": (47, 47, 47, 0)}, {"windows": ()}, {"bare_norms": False},
        {"still": (False,) * 4}, {"factors": ()}, {"adjacent": False},
        *({"experts": RECIPES["llama4"].experts._replace(**wrong)} for wrong in (
            {"inner": False}, {"sigmoid": False}, {"shared": 0}, {"normed": True})),
    ],
    "plamo": [{"parallel": False}, {"adjacent": True}],
    "command-r-plus": [{"own_norms": False}, {"parallel": False}, {"logits": 1.0}],
    "olmo": [{"clamp": 0.0}, {"clamp": 0.71}, {"centred": False}, {"adjacent": False}],
    "orion": [{"centred": False}, {"norm_biases": False}, {"adjacent": True}],
    "stablelm": [{"rotated": 32}, {"norm_biases": False}, {"biases": False}, {"centred": False}],
    "stablelm-12b": [{"own_norms": False}, {"centred": False}, {"norm_biases": False}, {"rotated": 16}],
    "starcoder2": [{"act": "relu2"}, {"ffn_biases": False}, {"out_bias": False}, {"biases": False}],
    "jais2": [{"act": "gelu"}, {"ffn_biases": False}, {"norm_biases": False}, {"out_bias": False}],
    "nemotron": [{"rotated": 32}, {"act": "gelu"}, {"norm_biases": False}],
    "arcee": [{"act": "gelu"}, {"yarn": None}, {"adjacent": False}],
    "apertus": [{"act": "relu2"}, {"head_norms": False}, {"factors": ()}],
    "hunyuan-dense": [{"turned": False}, {"head_norms": False, "turned": False}, {"thetas": (1e4, 1e4)}],
    "hunyuan-moe": [{"turned": False}, *({"experts": RECIPES["hunyuan-moe"].experts._replace(**wrong)} for wrong in (
        {"normed": False}, {"shared": 0}))],
    "maincoder": [{"turned": False}, {"adjacent": False}],
    "gemma3": [
        {"windows": (47,) * 5 + (0,)}, {"windows": (49,) * 5 + (0,)}, {"windows": (0,) + (48,) * 5},
        {"thetas": (1e4, 1e6)}, {"thetas": (1e6, 1e6)}, {"slower": 1.0}, {"embed": 1.0}, {"gelu": False},
        {"after": False}, {"head_norms": False}, {"score": 24**-0.5},
    ],
    "gemma2": [
        {"caps": (0.0, 4.0)}, {"caps": (2.5, 0.0)}, {"caps": (2.6, 4.0)}, {"windows": ()}, {"windows": (0, 48, 0, 48)},
        {"windows": (47, 0, 47, 0)}, {"after": False}, {"gelu": False},
    ],
    "refact": [
        {"slopes": ()}, {"slopes": (1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 8, 1 / 32)}, {"still": ()},
    ],
    "baichuan-13b": [{"slopes": ()}, {"still": ()}],
    "lfm2": [{"taps": 2}, {"head_norms": False}, {"thetas": (1e4, 1e4)}],
    "lfm2moe": [{"head_norms": False}, *({"experts": RECIPES["lfm2moe"].experts._replace(**wrong)} for wrong in (
        {"sigmoid": False}, {"bias": False}, {"normed": False}))],
    "dots1": [
        {"head_norms": False}, {"adjacent": True},
        *({"experts": RECIPES["dots1"].experts._replace(**wrong)} for wrong in (
            {"sigmoid": False}, {"normed": False}, {"scale": 1.0}, {"bias": False}, {"shared": 0}, {"used": 2})),
    ],
    "hy_v3": [
        {"head_norms": False}, {"adjacent": True}, {"thetas": (1e4, 1e4)},
        *({"experts": RECIPES["hy_v3"].experts._replace(**wrong)} for wrong in (
            {"sigmoid": False}, {"normed": False}, {"scale": 1.0}, {"bias": False}, {"shared": 0})),
    ],
    "ernie4_5-moe": [
        {"adjacent": False},
        *({"experts": RECIPES["ernie4_5-moe"].experts._replace(**wrong)} for wrong in (
            {"sigmoid": True}, {"normed": False}, {"bias": False}, {"shared": 0})),
    ],
    "deepseek": [
        {"adjacent": False},
        *({"experts": RECIPES["deepseek"].experts._replace(**wrong)} for wrong in (
            {"normed": True}, {"scale": 1.0}, {"shared": 0})),
    ],
    "bailingmoe": [
        {"adjacent": False}, {"thetas": (1e4, 1e4)},
        *({"experts": RECIPES["bailingmoe"].experts._replace(**wrong)} for wrong in ({"normed": False}, {"shared": 0})),
    ],
    "granitemoe": [
        {"embed": 1.0}, {"residual": 1.0}, {"score": 32**-0.5}, {"logits": 1.0}, {"adjacent": False},
        {"experts": Moe(8, 3, normed=False)}, {"experts": Moe(8, 2)},
    ],
    "laguna": [
        {"gate": ""}, {"gate_curve": "sigmoid"}, {"windows": (0, 47, 47, 47, 0)}, {"local_rotated": 16},
        {"thetas": (5e5, 5e5)}, {"yarn": None}, {"head_norms": False},
        *({"experts": RECIPES["laguna"].experts._replace(**wrong)} for wrong in (
            {"sigmoid": False}, {"normed": False}, {"scale": 1.0}, {"bias": False}, {"shared": 0})),
    ],
    "step35": [
        {"limits": ()}, {"gate": ""}, {"gate_curve": "softplus"}, {"rotated": 32}, {"local_rotated": 16},
        {"windows": (0, 47, 47, 0, 47)}, {"thetas": (5e6, 5e6)}, {"head_norms": False},
        *({"experts": RECIPES["step35"].experts._replace(**wrong)} for wrong in (
            {"sigmoid": False}, {"normed": False}, {"scale": 1.0}, {"bias": False}, {"shared": 0})),
    ],
    "mimo2": [
        {"value_scale": 1.0}, {"sinks": False}, {"windows": (0, 47, 47, 0)}, {"thetas": (5e6, 5e6)}, {"rotated": 48},
        {"score": 32**-0.5}, {"windows": ()},
    ],
    "laguna-m": [{"gate": ""}, {"gate_curve": "sigmoid"}, {"rotated": 32}, {"thetas": (1e4, 1e4)}],
    "gemma": [{"gelu": False}, {"embed": 1.0}, {"score": 42**-0.5}, {"adjacent": True}],
    "ernie4_5": [{"adjacent": False}, {"thetas": (1e4, 1e4)}, {"score": 32**-0.5}, {"eps": 1e-2}],
    "paddleocr": [{"adjacent": True}, {"thetas": (1e4, 1e4)}],
    "qwen2vl": [{"biases": False}, {"adjacent": True}],
    "exaone": [{"factors": ()}, {"adjacent": True}, {"eps": 1e-2}],
    "internlm2": [{"adjacent": False}, {"thetas": (1e4, 1e4)}],
    "minicpm": [{"embed": 12.0}, {"residual": 1.0}, {"logits": 1.0}, {"logits": 1 / 0.6}, {"adjacent": False}],
    "xverse": [{"adjacent": False}, {"eps": 1e-2}],
    "baichuan": [{"adjacent": False}, {"eps": 1e-2}],
    "pangu-embedded": [{"biases": False}, {"out_bias": False}, {"adjacent": True}, {"thetas": (1e4, 1e4)}],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_easy_mistake_would_show(family: str, tmp_path: Path) -> None:
    recipe, weights, _ = write_family(tmp_path / "m.gguf", family)
    expected = family_logits(recipe, weights, IDS)
    for mistake in MISTAKES[family]:
        assert difference(family_logits(replace(recipe, **mistake), weights, IDS), expected) > 1e-3, mistake


UNSAID = {  # keys that a file lacks, with what it then means as llama.cpp b11549 reads it
    "dots1": ("expert_weights_norm", {"normed": False}),
    "hy_v3": ("expert_weights_norm", {"normed": False}),
    "exaone-moe": ("expert_weights_norm", {"normed": False}),
    "laguna": ("expert_weights_norm", {"normed": False}),
    "olmo": ("attention.clamp_kqv", {"clamp": 0.0}),
    "mimo2": ("attention.value_scale", {"value_scale": 1.0}),
    "step35": ("rope.freq_base_swa", {"thetas": (5e6, 1e4)}),
}


def test_a_theta_of_windows_is_left_to_models_that_have_some(tmp_path: Path) -> None:
    recipe, weights, path = write_family(tmp_path / "m.gguf", "smollm3", **{"smollm3.rope.freq_base_swa": 7e4})
    with open_engine(path, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), family_logits(recipe, weights, IDS)) < 1e-5
    with pytest.raises(UserError, match=r"gpt-oss.rope.freq_base_swa is 70000.0, which is not supported yet"):
        open_model(write_gguf(tmp_path / "oss.gguf", "gpt-oss", metadata={"gpt-oss.rope.freq_base_swa": 7e4}))


@pytest.mark.quick("step35")
@pytest.mark.parametrize("family", UNSAID)
def test_what_a_file_leaves_out_counts_as_llama_cpp_has_it(family: str, tmp_path: Path) -> None:
    key, means = UNSAID[family]
    recipe, weights, path = write_family(tmp_path / "m.gguf", family, **{f"{family}.{key}": None})
    other = replace(recipe, **({"experts": recipe.experts._replace(**means)} if "normed" in means else means))
    with open_engine(path, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), family_logits(other, weights, IDS)) < 1e-5


@pytest.mark.parametrize("family", ["mimo2", "step35"])
def test_positions_of_layers_with_a_window_are_not_scaled(family: str, tmp_path: Path) -> None:
    recipe, weights, path = write_family(tmp_path / "m.gguf", family, **{f"{family}.rope.scaling.factor": 2.0})
    with open_engine(path, context=LONG) as engine:
        expected = family_logits(replace(recipe, slower=2.0), weights, IDS)
        assert difference(engine.forward(IDS, all_logits=True), expected) < 1e-5


@pytest.mark.parametrize("family", ["hunyuan-moe", "hy_v3", "exaone-moe"])
def test_shared_experts_have_as_many_rows_as_the_file_says(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES[family]
    monkeypatch.setitem(RECIPES, family, replace(recipe, experts=recipe.experts._replace(shared=96)))
    said = {f"{family}.expert_shared_feed_forward_length": 96}
    recipe, weights, path = write_family(tmp_path / "m.gguf", family, **said)
    with open_engine(path, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), family_logits(recipe, weights, IDS)) < 1e-5


@pytest.mark.parametrize("on_cpu", ["attention", "ffn", "turns"])
def test_units_of_a_parallel_layer_hand_over_what_both_take(on_cpu: str, tmp_path: Path) -> None:
    """Wherever the one is that normalises, the other finds it, and adds to the same residual stream."""
    recipe, weights, path = write_family(tmp_path / "m.gguf", "cohere2")
    with open_model(path) as file:
        spec = file.spec
    where = {}
    for unit in spec.units:
        kind = "attention" if unit.kind.state else "ffn"
        cpu = unit.layer >= 0 and on_cpu in (kind, "turns") and (on_cpu != "turns" or unit.layer % 2 == (kind == "ffn"))
        state = ("host" if cpu else "vram") if unit.kind.state else None
        where[unit.name] = ("cpu" if cpu or unit.kind.is_looked_up else "pinned", state)
    tiers = tuple(make_tier(spec, n, where, 2, LONG, 1, batch=64) for n in (1, 64))
    with open_engine(path, tiers, "fast", LONG) as engine:
        assert difference(run(engine), family_logits(recipe, weights, IDS)) < 1e-5


@pytest.mark.parametrize("place", [("pinned", None, 64, 0), ("streamed", None, 0, 64)], ids=["divided", "kept"])
@pytest.mark.parametrize("family", ["jais2", "llama-biased"])
def test_biases_of_an_ffn_go_with_its_rows(family: str, place: tuple, tmp_path: Path) -> None:
    """Of one without a gate, and of one with it."""
    recipe, weights, path = write_family(tmp_path / "m.gguf", family)
    with open_model(path) as file:
        spec = file.spec
    where = {u.name: ("cpu" if u.kind.is_looked_up else "pinned", "vram" if u.kind.state else None) for u in spec.units}
    where |= {u.name: place for u in spec.units if u.name.endswith(".ffn")}
    tiers = tuple(make_tier(spec, n, where, 2, LONG, 1, batch=64) for n in (1, 64))
    with open_engine(path, tiers, "fast", LONG) as engine:
        assert difference(run(engine), family_logits(recipe, weights, IDS)) < 1e-5


@pytest.mark.parametrize("left", [("gate",), ("up",), ("down",)], ids=str)
def test_a_gated_ffn_may_have_biases_of_some_products(
    left: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = family_files._as_stored

    def leave_out(family: str, recipe: Recipe, weights: Weights) -> Weights:
        lacks = tuple(f"ffn_{role}.bias" for role in ("gate", "up", "down") if role not in left)
        return {name: w for name, w in stored(family, recipe, weights).items() if not name.endswith(lacks)}

    monkeypatch.setattr(family_files, "_as_stored", leave_out)
    recipe, weights, path = write_family(tmp_path / "m.gguf", "llama-biased")
    kept = leave_out("llama-biased", recipe, weights)
    expected = family_logits(recipe, {name: w * (name in kept) for name, w in weights.items()}, IDS)
    for kernels in ("plain", "fast"):
        with open_engine(path, context=LONG, kernels=kernels) as engine:
            assert difference(run(engine), expected) < 1e-5


@pytest.mark.parametrize("family", ["mistral3", "deci", "minicpm"])
def test_other_gated_ffns_may_have_biases_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    biased = replace(RECIPES[family], biases=True, out_bias=True, ffn_biases=True)
    monkeypatch.setitem(RECIPES, family, biased)
    recipe, weights, path = write_family(tmp_path / "m.gguf", family)
    expected = family_logits(recipe, weights, IDS)
    for kernels in ("plain", "fast"):
        with open_engine(path, context=LONG, kernels=kernels) as engine:
            assert difference(run(engine), expected) < 1e-5
    lacks = ({"biases": False}, {"out_bias": False}, {"ffn_biases": False})
    assert all(difference(family_logits(replace(recipe, **one), weights, IDS), expected) > 1e-3 for one in lacks)


def test_a_product_in_place_of_attention_has_no_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp loads one, and leaves it out."""
    stored = family_files._as_stored

    def add(family: str, recipe: Recipe, weights: Weights) -> Weights:
        return stored(family, recipe, weights) | {"blk.1.attn_output.bias": np.ones(recipe.d)}

    monkeypatch.setattr(family_files, "_as_stored", add)
    monkeypatch.setitem(RECIPES, "deci", replace(RECIPES["deci"], out_bias=True))
    with pytest.raises(UserError, match=r"blk.1.attn_output.bias has no place in architecture nemotron-nas"):
        open_model(write_family(tmp_path / "m.gguf", "deci").path)


@pytest.mark.parametrize("family", ["minimax-m2", "exaone4", "plamo", "maincoder", "step35", "lfm2", "paddleocr"])
def test_files_may_have_biases_of_attention_that_folders_lack(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    biased = replace(RECIPES[family], biases=True, out_bias=family == "paddleocr")
    monkeypatch.setitem(RECIPES, family, biased)
    recipe, weights, path = write_family(tmp_path / "m.gguf", family)
    expected = family_logits(recipe, weights, IDS)
    with open_engine(path, context=LONG, kernels="fast") as engine:
        assert difference(run(engine), expected) < 1e-5
    assert difference(family_logits(replace(recipe, biases=False), weights, IDS), expected) > 1e-3


@pytest.mark.parametrize("parts", ["self_attn", "mlp"])
def test_a_folder_without_a_place_for_biases_is_refused(
    parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPES["mistral3"], biases=parts == "self_attn", ffn_biases=parts == "mlp")
    monkeypatch.setitem(RECIPES, "mistral3", recipe)
    folder = write_bare_folder(tmp_path / "m", "mistral3", hf_settings("mistral3") | {"model_type": "ministral3"})
    with pytest.raises(UserError, match=rf"layers.0.{parts}.\w+.bias has no place in architecture ministral3"):
        open_model(folder)


def test_phi3_takes_its_short_factors_in_a_short_context(tmp_path: Path) -> None:
    recipe, weights, path = write_family(tmp_path / "m.gguf", "phi3")
    assert recipe.longrope is not None
    short, original = replace(recipe, context=recipe.longrope.original), recipe.longrope.original
    with open_model(path) as file:
        tiers = pinned_everywhere(file.spec, context=original)
    with open_engine(path, tiers, context=original) as engine:
        got = engine.forward(IDS[:100], all_logits=True)
    assert difference(got, family_logits(short, weights, IDS[:100])) < 1e-5


@pytest.mark.parametrize("rows", [64, 128], ids=["gate and up", "down"])
def test_square_experts_of_a_folder_lie_as_the_others_do(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers saves them, where the shape of one kind does not say which way round they are."""
    monkeypatch.setitem(RECIPES, "qwen3vlmoe", replace(RECIPES["qwen3vlmoe"], ffn=rows))
    (recipe, weights, folder), _ = write_family_folder(tmp_path / "hf", "qwen3vlmoe")
    with open_engine(folder, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), family_logits(recipe, weights, IDS)) < 1e-5


@pytest.mark.parametrize("weights_at", ["pinned", "streamed", "cpu"])
def test_phi3_4k_sees_a_window_in_every_layer(weights_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "phi3", replace(RECIPES["phi3"], windows=(48, 48)))
    recipe, weights, path = write_family(tmp_path / "m.gguf", "phi3")
    expected = family_logits(recipe, weights, IDS)
    for other in (47, 49, 0):
        assert difference(family_logits(replace(recipe, windows=(other,) * 2), weights, IDS), expected) > 1e-3
    with open_model(path) as file:
        spec = file.spec
    assert {u.kind.name for u in spec.units} == {"embedding", "windowed attention", "ffn", "output"}
    state = "vram" if weights_at == "pinned" else "host"
    where = {u.name: (weights_at if u.kind.position == "layer" else "pinned", state if u.kind.state else None)
             for u in spec.units}  # fmt: skip
    tiers = tuple(make_tier(spec, n, where, 2, LONG, 1, batch=64) for n in (1, 64))
    with open_engine(path, tiers, "fast", LONG) as engine:
        assert difference(run(engine), expected) < 1e-5
        engine.reset(0, 60)  # what the next token sees is gone: computed again
        assert difference(engine.forward(IDS[60:], all_logits=True), expected[60:]) < 1e-5
        engine.save(tmp_path / "cache")
        assert engine.load(tmp_path / "cache") == tuple(IDS)


def test_phi3_4k_gives_the_logits_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "phi3", replace(RECIPES["phi3"], windows=(48, 48)))
    (recipe, weights, folder), model = write_family_folder(tmp_path / "hf", "phi3")
    with torch.no_grad():
        expected = model.double()(torch.tensor([IDS])).logits[0].numpy()
    assert difference(family_logits(recipe, weights, IDS), expected) < 1e-5
    with open_engine(folder, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), expected) < 1e-4


LLAMA4 = RECIPES["llama4"]
UNUSUAL = {  # recipes, and settings that the configuration is given beside theirs
    "near temperature": (replace(LLAMA4, temperature=(0.3, 40)), {}),
    "no norms": (
        replace(
            LLAMA4, layers=5, temperature=(0.3, 47), windows=(40, 0, 40, 40, 0), bare_norms=False, tied=True,
            still=(False, True, False, False, True), biases=True, out_bias=True,
            experts=LLAMA4.experts._replace(every=1),
        ),
        {"no_rope_layers": [1, 0, 1, 1, 0], "use_qk_norm": False, "attention_bias": True},
    ),
    "no temperature": (
        replace(LLAMA4, temperature=(0.0, 1), windows=(0, 0, 48, 0), still=(False, True, False, False)),
        {
            "no_rope_layers": [1, 0, 1, 1], "attn_temperature_tuning": False, "attn_scale": 0.5, "floor_scale": 3,
            "layer_types": ["full_attention", "full_attention", "chunked_attention", "full_attention"],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("unusual", [pytest.param(n, marks=pytest.mark.slow) if "no" in n else n for n in UNUSUAL])
def test_llama4_folders_say_which_layers_are_what(
    unusual: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe, settings), own = UNUSUAL[unusual], family_files._HF_OWN["llama4"]
    monkeypatch.setitem(RECIPES, "llama4", recipe)
    monkeypatch.setitem(family_files._HF_OWN, "llama4", lambda r: own(r) | settings)
    (recipe, weights, folder), model = write_family_folder(tmp_path / "hf", "llama4")
    with torch.no_grad():
        expected = model.double()(torch.tensor([IDS])).logits[0].numpy()
    assert difference(family_logits(recipe, weights, IDS), expected) < 1e-5
    with open_engine(folder, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), expected) < 1e-5


@pytest.mark.quick("8-keys1")
@pytest.mark.parametrize(("count", "keys"), [(128, {}), (8, {"llama4.attention.sliding_window": 0})])
def test_llama4_files_say_by_experts_and_window_what_is_normalised_and_rotated(
    count: int, keys: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp reads them: 128 experts are Maverick's, and without a window all layers are alike."""
    recipe = replace(LLAMA4, experts=LLAMA4.experts._replace(count=count), bare_norms=count != 128)
    if keys:
        recipe = replace(recipe, windows=(0,) * 4, still=(False,) * 4, temperature=(0.0, 1))
    monkeypatch.setitem(RECIPES, "llama4", recipe)
    _, weights, path = write_family(tmp_path / "m.gguf", "llama4", **keys)
    with open_engine(path, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), family_logits(recipe, weights, IDS)) < 1e-5


def test_smallthinker_of_four_layers_rotates_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp does; other settings are read whatever they are: scores, the base of windows' angles."""
    shape = replace(RECIPES["smallthinker"], layers=4, windows=(0, 48, 48, 48), still=())
    soft = replace(RECIPES["smallthinker"], experts=Moe(8, 3, 64, early="scores"), thetas=(1.5e6, 3e5))
    for recipe, keys in ((shape, {}), (soft, {"smallthinker.rope.freq_base_swa": 3e5})):
        monkeypatch.setitem(RECIPES, "smallthinker", recipe)
        _, weights, path = write_family(tmp_path / "m.gguf", "smallthinker", **keys)
        with open_engine(path, context=LONG) as engine:
            assert difference(engine.forward(IDS, all_logits=True), family_logits(recipe, weights, IDS)) < 1e-5


def test_fewer_chunks_than_a_token_has_experts_are_those_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(RECIPES["grovemoe"], experts=Moe(8, 5, 96, chunk=4, chunk_rows=32, chunk_scale=0.5))
    monkeypatch.setitem(RECIPES, "grovemoe", few)
    _, weights, path = write_family(tmp_path / "m.gguf", "grovemoe")
    with open_engine(path, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), family_logits(few, weights, IDS)) < 1e-5


@pytest.mark.parametrize(("key", "value", "says"), [
    ("experts_per_group", 3, "experts_per_group is 3, which does not divide 8 experts"),
    ("experts_per_group", 0, "experts_per_group is 0, not a whole number above 0"),
    ("experts_per_group", 4, r"ffn_gate_chexps.weight has shape \[4, 64, 128\], not the \[2, 64, 128\]"),
    ("expert_chunk_feed_forward_length", 32, r"has shape \[4, 64, 128\], not the \[4, 32, 128\]"),
    ("expert_group_scale", -0.5, "expert_group_scale is -0.5, not a number above 0"),
    ("expert_gating_func", 2, "expert_gating_func is 2, which is not supported yet"),
])  # fmt: skip
def test_what_a_file_says_of_chunks_must_fit(key: str, value: float, says: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", "grovemoe", **{f"grovemoe.{key}": value}).path
    with pytest.raises(UserError, match=says):
        open_model(path)


@pytest.mark.parametrize("family", ["exaone4", "olmo3", "smallthinker"])
def test_without_a_window_all_layers_are_alike(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(RECIPES[family], windows=(), still=(), yarn=None)
    monkeypatch.setitem(RECIPES, family, plain)
    monkeypatch.setitem(_OWN_KEYS, family, lambda _: {})
    _, weights, path = write_family(tmp_path / "m.gguf", family)
    with open_engine(path, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), family_logits(plain, weights, IDS)) < 1e-5


def test_keys_of_a_short_context_are_not_loaded_into_a_long_one(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", "phi3").path
    with open_engine(path, context=128) as engine:
        engine.forward(IDS[:20])
        engine.save(tmp_path / "cache")
        engine.load(tmp_path / "cache")
    with open_engine(path, context=LONG) as engine, pytest.raises(UserError, match="has angles short"):
        engine.load(tmp_path / "cache")


@pytest.mark.parametrize("family", IN_FOLDERS)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (recipe, weights, folder), model = write_family_folder(tmp_path / "hf", family)
    with torch.no_grad():
        expected = model.double()(torch.tensor([IDS])).logits[0].numpy()
    assert difference(family_logits(recipe, weights, IDS), expected) < 1e-5
    with open_engine(folder, context=LONG) as engine:
        got = engine.forward(IDS, all_logits=True)
    assert difference(got, expected) < 1e-4


@pytest.mark.slow
def test_a_mimo_folder_may_have_biases_and_a_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which llama.cpp does not read, so GGUF files that have them are refused."""
    more = replace(RECIPES["mimo2"], biases=True, experts=RECIPES["mimo2"].experts._replace(scale=1.5))
    monkeypatch.setitem(RECIPES, "mimo2", more)
    (recipe, weights, folder), model = write_family_folder(tmp_path / "hf", "mimo2")
    with torch.no_grad():
        expected = model.double()(torch.tensor([IDS])).logits[0].numpy()
    assert difference(family_logits(recipe, weights, IDS), expected) < 1e-5
    with open_engine(folder, context=LONG) as engine:
        assert difference(engine.forward(IDS, all_logits=True), expected) < 1e-5
    with pytest.raises(UserError, match=r"mimo2.expert_weights_scale is 1.5"):
        open_model(write_family(tmp_path / "m.gguf", "mimo2").path)
    monkeypatch.setitem(RECIPES, "mimo2", replace(more, experts=RECIPES["mimo2"].experts._replace(scale=1.0)))
    with pytest.raises(UserError, match=r"blk.0.attn_q.bias has no place"):
        open_model(write_family(tmp_path / "m.gguf", "mimo2").path)


MIXED = {  # as published Q4_K_M, UD-Q4_K_XL and IQ4_XS files mix them
    "attn_q.weight": "IQ4_XS", "attn_k.weight": "Q5_K", "attn_v.weight": "Q8_0", "attn_output.weight": "IQ4_NL",
    "ffn_gate.weight": "IQ4_XS", "ffn_up.weight": "IQ4_NL", "ffn_down.weight": "Q6_K", "output.weight": "Q8_0",
    "token_embd.weight": "IQ4_NL",
}  # fmt: skip


@pytest.mark.parametrize("where", ["pinned", "streamed", "cpu"])
def test_a_file_of_many_types_gives_the_logits_of_its_weights(where: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", qtypes=MIXED)
    with open_engine(path, context=256) as engine:
        expected = run(engine)
    with open_model(path) as file:
        spec = file.spec
    assert {"IQ4_XS", "IQ4_NL", "Q5_K", "Q8_0", "Q6_K"} <= {t.qtype for u in spec.units for t in u.matrices}
    places = {u.name: ("cpu" if u.kind.is_looked_up else where, "host" if u.kind.state else None) for u in spec.units}
    tiers = tuple(make_tier(spec, n, places, 2, 256, 1, batch=64) for n in (1, 64))
    with open_engine(path, tiers, "fast", 256) as engine:
        found = run(engine)
    assert (found - expected).abs().max() < 0.1 * expected.std()  # activations are rounded to int8
