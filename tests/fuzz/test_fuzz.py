"""A file that was changed anywhere gives the right numbers or one line that says so; `scripts/fuzz` tries far more."""

import struct
from pathlib import Path

import pytest
from fuzz.mutate_bytes import Mutant
from fuzz.run import MutantFailed, count_outcomes, try_mutant
from fuzz.targets import REFUSED, RIGHT, Target, make_targets


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Targets by name, with a cache of their own."""

    def made(name: str) -> Target:
        monkeypatch.setenv("PSHARD_CACHE", str(tmp_path / name / "cache"))
        return make_targets(tmp_path)[name]()

    return made


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *[("gguf", 1000), ("safetensors", 1000), ("folder", 250), ("experts", 400), ("experts-folder", 150)],
        *[pytest.param(name, 60, marks=pytest.mark.slow) for name in ("families", "hybrids", "caches")],
        *[
            ("registry", 80),
            ("profile", 50),
            ("page-locks", 150),
            ("routing", 300),
            ("kv-files", 1000),
            ("blocks", 2000),
            ("packed-files", 400),
        ],
    ],
)
def test_a_changed_file_gives_the_right_numbers_or_one_line(
    make, capfd: pytest.CaptureFixture[str], name: str, count: int, share: float
) -> None:
    count = int(share * count)
    outcomes = count_outcomes(make(name), seed=1, numbers=range(count))
    assert outcomes[RIGHT] > 0 and outcomes.total() == count
    assert outcomes[REFUSED] > count // 3 or name == "page-locks"  # what cannot be read there is not known
    assert "panicked" not in capfd.readouterr().err


def test_a_target_opens_what_was_not_changed(make) -> None:
    target = make("gguf")
    whole = Path(target.folder / "a.gguf").read_bytes()
    assert target.judge(Mutant("a.gguf: nothing", whole)) == RIGHT


def test_wrong_numbers_and_errors_of_programs_are_found(make) -> None:
    gguf = make("gguf")
    changed = bytearray((gguf.folder / "a.gguf").read_bytes())
    changed[-100] ^= 64  # a weight of the head

    def fail(_: Mutant) -> str:
        raise struct.error("ends too early")

    for judge, says in ((gguf.judge, "WrongOutcome: logits differ"), (fail, "error: ends too early")):
        target = Target("gguf", gguf.folder, lambda rng: Mutant("a.gguf: a weight", bytes(changed)), judge)
        with pytest.raises(MutantFailed, match=rf"{says}.*a weight; again by: scripts/fuzz gguf --seed 3 --first 7"):
            try_mutant(target, 3, 7)
