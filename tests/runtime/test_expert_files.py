"""Logits of model files with routed experts equal the float64 forward, for each architecture and type of weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import moe_forward
import numpy as np
import pytest
from engines import open_engine
from model_files import MOE, OSS, write_gguf
from moe_forward import Weights, moe_logits, read_weights
from thread_ranks import run_ranks

from pshard.model_config import Experts, ModelConfig
from pshard.models import open_model
from pshard.runtime.engine import Engine

IDS = [int(i) for i in np.random.default_rng(0).integers(0, 320, 24)]


def compare_logits(path: Path, most: float) -> None:
    """The largest difference in deviations of the logits, of a prompt and of tokens after it."""
    with open_model(path) as file:
        expected = moe_logits(file.spec.config, read_weights(file), IDS)
    with open_engine(path, context=64) as engine:
        prompt = engine.forward(IDS[:-2], all_logits=True).numpy()
        tokens = [engine.forward([token], all_logits=True).numpy() for token in IDS[-2:]]
    assert np.abs(np.concatenate([prompt, *tokens]) - expected).max() < most * expected.std()


@pytest.mark.quick("glm4moe")
@pytest.mark.parametrize("arch", MOE)
def test_logits_equal_the_float64_forward(tmp_path: Path, arch: str) -> None:
    compare_logits(write_gguf(tmp_path / "m.gguf", arch, n_used=3), 1e-5)


@pytest.mark.parametrize("qtypes", [("Q4_0", "Q4_K", "Q5_K"), ("Q6_K", "Q8_0", "MXFP4"), ("IQ4_NL", "IQ4_XS", "BF16")])
def test_every_type_of_experts_gives_the_float64_forwards_logits(tmp_path: Path, qtypes: tuple[str, ...]) -> None:
    mixed = {f"ffn_{role}_exps.weight": qtype for role, qtype in zip(("gate", "up", "down"), qtypes)}
    compare_logits(write_gguf(tmp_path / "m.gguf", "qwen3moe", qtypes=mixed, n_layers=1), 1e-5)


# --- gpt-oss: a window of 32 in every second layer, sinks, biases of everything, experts that are clamped ------------

LONG = [int(i) for i in np.random.default_rng(1).integers(0, 320, 150)]
STACKS = tuple(f"ffn_{role}_exps" for role in ("gate", "up", "down"))


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases of experts reach what is clamped."""
    rng, biases = np.random.default_rng(3), {}
    for layer in range(4):
        for stack in STACKS[:2]:
            biases[f"blk.{layer}.{stack}.bias"] = 6 * rng.standard_normal((8, 256))
    path = tmp_path_factory.mktemp("oss") / "m.gguf"
    return write_gguf(path, OSS, qtypes={f"{s}.weight": "MXFP4" for s in STACKS}, extra=biases, n_layers=4, n_used=3)


@pytest.fixture(scope="module")
def expected(oss: Path) -> np.ndarray:
    with open_model(oss) as file:
        return moe_logits(file.spec.config, read_weights(file), LONG)


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [((1, 16), 140), pytest.param((1, 3), 120, marks=pytest.mark.slow)],
)
def test_gpt_oss_in_micro_batches_of_any_size(
    oss: Path, expected: np.ndarray, tokens: tuple[int, ...], prompt: int
) -> None:
    with open_engine(oss, context=192, tokens=tokens) as engine:
        found = [engine.forward(LONG[:prompt], all_logits=True).numpy()]
        found += [engine.forward([token], all_logits=True).numpy() for token in LONG[prompt:]]
    assert np.abs(np.concatenate(found) - expected).max() < 1e-5 * expected.std()


@pytest.mark.quick("tensor")
@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_ranks_share_gpt_oss(oss: Path, expected: np.ndarray, mode: str) -> None:
    def talk(engine: Engine) -> np.ndarray:
        engine.forward(LONG[:120])
        engine.reset(0, 60)
        return engine.forward(LONG[60:140], all_logits=True).numpy()

    for found in run_ranks(oss, (1.0, 1.0), talk, 192, mode=mode):
        assert np.abs(found - expected[60:140]).max() < 1e-5 * expected.std()


def without_sinks(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    return config, {name: values for name, values in weights.items() if "sinks" not in name}


def with_gate_and_up_swapped(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    names = {name: name.replace("gate_exps", "x").replace("up_exps", "gate_exps").replace("x.", "up_exps.")
             for name in weights if "gate_exps" in name or "up_exps" in name}  # fmt: skip
    return config, weights | {names[name]: weights[name] for name in names}


def with_config(**fields: int) -> Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]]:
    return lambda config, weights: (replace(config, **fields), weights)


def with_rounded_positions(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    return replace(config, rope=replace(config.rope, rounded=True)), weights


def without(part: str) -> Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]]:
    return lambda config, weights: (config, {name: v for name, v in weights.items() if part not in name})


def with_scaled_sinks(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    return config, {n: v / config.head_dim**0.5 if "sinks" in n else v for n, v in weights.items()}


def with_rule(**fields: object) -> Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]]:
    return lambda config, weights: (replace(config, experts=replace(config.experts, **fields)), weights)


def with_rope(**fields: object) -> Callable[[ModelConfig, Weights], tuple[ModelConfig, Weights]]:
    return lambda config, weights: (replace(config, rope=replace(config.rope, **fields)), weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        with_scaled_sinks,
        without("gate_inp.bias"),
        without("attn_output.bias"),
        without("attn_q.bias"),
        with_rule(scores="softmax", normed=False),  # of all experts, not of the chosen
        with_rule(scores="sigmoid", normed=True),
        with_rule(used=2),
        with_rope(scaling="none"),
        with_rope(pairing="adjacent"),
        with_rope(original_context=2048),
        without_sinks,
        with_gate_and_up_swapped,
        with_config(sliding_window=31),
        with_config(sliding_window=33),
        with_config(sliding_window=0),
        with_config(window_every=1),
        with_config(window_every=3),
        with_rounded_positions,
        "unclamped",
    ],
    ids=lambda mistake: mistake if isinstance(mistake, str) else mistake.__name__,
)
def test_each_mistake_would_show(oss: Path, expected: np.ndarray, mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of the test above is a hundredth of what any of these would do to the logits."""
    with open_model(oss) as file:
        config, weights = file.spec.config, read_weights(file)
    if mistake == "unclamped":
        monkeypatch.setattr(moe_forward, "CLAMP", np.inf)
    else:
        config, weights = mistake(config, weights)
    wrong = moe_logits(config, weights, LONG)
    assert np.abs(wrong - expected).max() > 1e-3 * expected.std()


def wrong_expert(least: float, most: float, slope: float, plus: float, of_down: float) -> Callable:
    """An expert of gpt-oss by other numbers: the least of gate, the most of up, the steepness of the sigmoid, what is
    added to up, and how often the bias of down is."""

    def expert(rule: Experts, own: Weights, number: int, x: np.ndarray) -> np.ndarray:
        gate, up, down = (own[f"ffn_{role}_exps.weight"][number] for role in ("gate", "up", "down"))
        biases = [own[f"ffn_{role}_exps.bias"].reshape(rule.count, -1)[number] for role in ("gate", "up", "down")]
        g, u = np.clip(x @ gate.T + biases[0], least, 7), np.clip(x @ up.T + biases[1], -most, most)
        return (g / (1 + np.exp(-slope * g)) * (u + plus)) @ down.T + of_down * biases[2]

    return expert


RIGHT = {"least": -np.inf, "most": 7.0, "slope": 1.702, "plus": 1.0, "of_down": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [{"least": -7.0}, {"most": np.inf}, {"slope": 1.0}, {"plus": 0.0}, {"of_down": 0.0}]
)
def test_each_mistake_in_an_expert_of_gpt_oss_would_show(
    oss: Path, expected: np.ndarray, mistake: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_model(oss) as file:
        config, weights = file.spec.config, read_weights(file)
    for numbers, shows in ((RIGHT, False), (RIGHT | mistake, True)):
        monkeypatch.setattr(moe_forward, "_expert", wrong_expert(**numbers))
        far = np.abs(moe_logits(config, weights, LONG) - expected).max() / expected.std()
        assert far > 2e-5 if shows else far < 1e-9  # twice the bound: a gate clamped below moves logits least
