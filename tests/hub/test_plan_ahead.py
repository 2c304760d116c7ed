"""What a model of the Hub will do here is known before it is fetched, from headers alone."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from cli_world import made_up_profile, tokenizer_metadata, write_profile
from head_files import write_headed
from hub_server import Faults, HubServer
from model_files import write_gguf

from pshard.commands.cli_plan import main as plan
from pshard.errors import UserError
from pshard.hub.compare_quants import QuantOutlook, compare_quants
from pshard.hub.fetch_headers import FIRST, fetch_headers
from pshard.hub.fetch_model import fetch_model
from pshard.hub.repository import HubFile, HubModel, list_repository
from pshard.hub.show_quants import print_quants
from pshard.machine import DiskTiming
from pshard.models import open_model
from pshard.planner.make_plan import plan_roughly
from pshard.planner.price import host_limits
from pshard.predicted_times import decode_rate
from pshard.registries.profile_store import default_profile_path
from pshard.workload import Workload

REPO = "someone/small-GGUF"
QUANTS = ("Q4_0", "Q8_0", "F16")


def vocabulary(n: int = 1500) -> dict:
    """A tokenizer whose lists are long enough to be shared."""
    tokens = [f"token{i:05d}" for i in range(n)]
    kept = {k: v for k, v in tokenizer_metadata().items() if not isinstance(v, list)}
    return kept | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * n}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model of 2 layers in three quantisations and with factors of RoPE."""
    found, path = {}, tmp_path_factory.mktemp("quants") / "made.gguf"
    for qtype in QUANTS:
        write_gguf(
            path, qtype=qtype, n_layers=2, vocab=1500, metadata=vocabulary(),
            extra={"rope_freqs.weight": np.linspace(1, 4, 32)},
        )  # fmt: skip
        found[f"small-{qtype}.gguf"] = path.read_bytes()
    return found


@pytest.fixture
def files(hub: HubServer, made: dict[str, bytes]) -> dict[str, bytes]:
    """A repository with them, and a profile here."""
    hub.repositories[REPO] = dict(made)
    write_profile(default_profile_path())
    return made


def write_folder(folder: Path) -> dict[str, bytes]:
    """A llama model of one layer as Hugging Face has them."""
    from safetensors.numpy import save_file

    folder.mkdir()
    shapes = {"model.embed_tokens": (64, 256), "lm_head": (64, 256), "model.norm": (256,)}
    shapes |= {f"model.layers.0.self_attn.{role}_proj": (256, 256) for role in "qkvo"}
    shapes |= {f"model.layers.0.mlp.{role}_proj": (512, 256) for role in ("gate", "up")}
    shapes |= {"model.layers.0.mlp.down_proj": (256, 512), "model.layers.0.input_layernorm": (256,)}
    shapes |= {"model.layers.0.post_attention_layernorm": (256,)}
    save_file({f"{n}.weight": np.ones(s, np.float16) for n, s in shapes.items()}, folder / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    config |= {"intermediate_size": 512, "vocab_size": 64, "rms_norm_eps": 1e-6, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e4, "tie_word_embeddings": False}))
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_headers_open_as_the_files_would_and_share_one_vocabulary(hub, files, tmp_path) -> None:
    repository = list_repository(REPO)
    headers = fetch_headers(repository, repository.models, tmp_path / "headers")
    for qtype in QUANTS:
        true = tmp_path / f"small-{qtype}.gguf"
        true.write_bytes(files[true.name])
        with open_model(headers[qtype]) as here, open_model(true) as there:
            assert here.spec.units == there.spec.units and here.spec.config == there.spec.config
            assert here.fingerprint_inputs() == there.fingerprint_inputs()
            assert len(here.metadata["tokenizer.ggml.tokens"]) == 1500
    (first, *_) = repository.models
    long = [r for r in hub.of_files() if r[2] == f"bytes=0-{min(FIRST, first.nbytes) - 1}"]
    assert len(long) == 1  # the others were asked for what is before and behind the vocabulary
    on_disk = sum(p.stat().st_blocks * 512 for p in (tmp_path / "headers").rglob("*.gguf"))
    assert on_disk < sum(map(len, files.values())) / 4


def test_a_quantisation_with_another_vocabulary_is_read_whole(hub, files, tmp_path) -> None:
    path = write_gguf(tmp_path / "made.gguf", qtype="Q5_0", n_layers=2, vocab=1200, metadata=vocabulary(1200))
    hub.repositories[REPO]["small-Q5_0.gguf"] = path.read_bytes()
    repository = list_repository(REPO)
    headers = fetch_headers(repository, repository.models, tmp_path / "headers")
    with open_model(headers["Q5_0"]) as model:
        assert model.spec.config.vocab == 1200


def test_plan_tells_of_every_quantisation_and_fetches_none(hub, files, capsys, tmp_path) -> None:
    assert plan(["-m", f"{REPO}:Q8_0", "--vram", "8", "-c", "512"]) == 0
    said = capsys.readouterr()
    rows = {
        line.split()[0]: line.split() for line in said.out.splitlines() if line.split()[:1] in ([q] for q in QUANTS)
    }
    assert set(rows) == set(QUANTS)
    assert "asked" in rows["Q8_0"][1] and said.out.startswith("Predicted ") and "time to first token" in said.out
    assert "We would take Q8_0" in said.out and f"pshard run {REPO}:Q8_0" in said.out
    assert "not written, as the model is not here" in said.err
    assert hub.sent < sum(map(len, files.values())) / 2
    assert not list((tmp_path / "hf").rglob("*.gguf"))


def test_a_head_beside_the_model_is_planned_before_it_is_fetched(hub, files, capsys, tmp_path) -> None:
    write_headed(tmp_path / "whole.gguf", "llama")
    write_gguf(tmp_path / "alone.gguf", "llama", n_layers=2, qtype="F32")
    hub.repositories[REPO] = {
        "x-F32.gguf": (tmp_path / "alone.gguf").read_bytes(), "mtp-x.gguf": (tmp_path / "whole.gguf").read_bytes(),
    }  # fmt: skip
    words = ["-m", REPO, "--vram", "64", "-c", "256", "--spec", "mtp", "--spec-n", "2", "--spec-rates", ".9", "--json"]
    assert plan(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["drafts"][0]["kind"] == "mtp" and said["drafts"][0]["chosen"] == 2
    assert not list((tmp_path / "hf").rglob("*.gguf"))


def test_each_row_is_printed_as_soon_as_it_is_planned(capsys) -> None:
    models = [HubModel(name, ()) for name in ("Q2_K", "Q4_K_M", "Q8_0")]
    seen = []

    def plan_slowly() -> Iterator[QuantOutlook]:
        for i, model in enumerate(models):
            seen.append(capsys.readouterr().out)
            yield QuantOutlook(model.label, 2**30, 4.5 + i, 1234.5, 0.5, 20.0 - i, 8000, 0, 0)

    print_quants(("org/repo", "Q4_K_M"), models, plan_slowly(), "8000 MiB", lambda _: nullcontext())
    assert "org/repo offers" in seen[0] and seen[0].splitlines()[-1].split()[:2] == ["file", "GiB"]
    rows = [text.split() for text in seen[1:]]
    assert rows[0] == ["Q2_K", "1.00", "4.5", "1234", "0.5", "20", "8000", "0", "0"]
    assert rows[1][:4] == ["Q4_K_M", "(asked", "for)", "1.00"]
    assert len({len(text) for text in seen[1:]}) == 1, "columns stand below each other"
    assert "We would take Q8_0" in capsys.readouterr().out


def test_the_plan_from_a_header_is_the_plan_of_the_file(hub, files, capsys) -> None:
    arguments = ["-m", f"{REPO}:Q4_0", "--vram", "6", "-c", "512", "--json"]
    assert plan(arguments) == 0
    before = json.loads(capsys.readouterr().out)
    fetch_model(f"{REPO}:Q4_0")
    assert plan(arguments) == 0
    after = json.loads(capsys.readouterr().out)
    (offered,) = [o for o in before["offered"] if o["label"] == "Q4_0"]
    tiers = [
        [t["placements"] for t in r["registry"]["sets"][0]["variants"][0]["ranks"][0]["tiers"]] for r in (before, after)
    ]
    assert tiers[0] == tiers[1]
    assert before["registry"]["sets"][0]["fingerprint"] == after["registry"]["sets"][0]["fingerprint"]
    assert offered["decode_rate"] > 0 and offered["vram_mib"] <= 6
    assert "offered" not in after


def test_a_type_that_is_not_supported_is_a_row_that_says_so(hub, files, capsys) -> None:
    data = bytearray(files["small-Q8_0.gguf"])
    kind = gguf.GGMLQuantizationType.Q8_K.to_bytes(4, "little")
    for name in (b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"):
        at = data.index(name) + len(name) + 4 + 2 * 8
        data[at : at + 4] = kind
    hub.repositories[REPO]["small-Q8_K.gguf"] = bytes(data)
    assert plan(["-m", f"{REPO}:Q4_0", "--vram", "8", "-c", "512"]) == 0
    out = capsys.readouterr().out
    assert "Q8_K does not run here: tensor blk.0.attn_q.weight has type Q8_K" in out


def test_a_folder_of_safetensors_is_planned_from_its_headers(hub, files, capsys, tmp_path) -> None:
    hub.repositories["someone/plain"] = write_folder(tmp_path / "made")
    assert plan(["-m", "someone/plain", "--vram", "8", "-c", "256"]) == 0
    assert "safetensors (asked for)" in capsys.readouterr().out
    path = fetch_model("someone/plain")
    with open_model(path) as model:
        assert model.spec.name == "plain"


@pytest.mark.parametrize(
    "refused, says",
    [((401, "RepoNotFound"), "no repository or file"), ((403, "GatedRepo"), "gated"), ((429, ""), "429")],
)
def test_planning_ahead_ends_with_what_to_do_when_the_hub_refuses(hub, files, capsys, refused, says) -> None:
    hub.faults = Faults(refused=refused)
    assert plan(["-m", f"{REPO}:Q4_0", "--vram", "8"]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_header_that_is_cut_is_taken_up_again_and_an_error_when_it_stays_so(hub, files, capsys) -> None:
    hub.faults = Faults(cut_after=3000, cuts=2)
    assert plan(["-m", f"{REPO}:Q4_0", "--vram", "8", "-c", "512"]) == 0
    hub.faults = Faults(cut_after=0, cuts=1000)
    capsys.readouterr()
    assert plan(["-m", f"{REPO}:Q4_0", "--vram", "8"]) == 2
    error = capsys.readouterr().err
    assert "small-Q4_0.gguf was cut after 0 of" in error and error.count("\n") == 1


def test_flags_that_need_the_file_are_refused_before_anything_is_asked(hub, files, capsys) -> None:
    asked = len(hub.requests)
    assert plan(["-m", f"{REPO}:Q4_0", "--vram", "8", "--validate"]) == 2
    assert "--validate needs the model here" in capsys.readouterr().err
    assert len(hub.requests) == asked


def test_registries_of_cached_models_lie_in_pshards_own_cache(hub, files, capsys, tmp_path) -> None:
    path = fetch_model(f"{REPO}:Q4_0")
    assert plan(["-m", str(path), "--vram", "8", "-c", "512"]) == 0
    written = tmp_path / "cache/registries/someone--small-GGUF--small-Q4_0.gguf.pshard.json"
    assert written.is_file()
    assert not list((tmp_path / "hf").rglob("*.pshard.json"))


@pytest.fixture
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes nothing beside what is planned: models are tiny here."""
    monkeypatch.setattr(host_limits, "PROCESS", {"cpu": 0, "cuda": 0})


@pytest.mark.usefixtures("small_process")
def test_a_forecast_under_ram_plans_for_the_disk_that_is_made_up(hub, files, capsys, monkeypatch, tmp_path) -> None:
    deep = {q: write_gguf(tmp_path / f"{q}.gguf", qtype=q, n_layers=5, vocab=1500) for q in ("Q4_0", "Q8_0")}
    hub.repositories[REPO] = {f"small-{path.name}": path.read_bytes() for path in deep.values()}
    asked = ["-m", f"{REPO}:Q8_0", "--ram", "3", "-c", "128", "--json"]
    rates = []
    for rate in ("1G", "4G"):
        monkeypatch.setenv("PSHARD_DISK", f"fake:rate={rate}")
        assert plan(asked) == 0
        said = capsys.readouterr()
        found = json.loads(said.out)
        rates.append({o["label"]: o["decode_rate"] for o in found["offered"]})
        assert f"planned for fake disk of {rate[0]}000 MB/s" in said.err and found["memory"][0]["disk_bytes"] > 0
        assert [o["disk_mib"] > 0 for o in found["offered"]] == [o["label"] != "Q4_0" for o in found["offered"]]
    assert rates[0]["Q8_0"] < rates[1]["Q8_0"] and rates[0]["Q4_0"] == rates[1]["Q4_0"]


@pytest.mark.usefixtures("small_process")
def test_the_disk_under_a_header_without_weights_is_not_timed(hub, files, capsys, monkeypatch, tmp_path) -> None:
    header = tmp_path / "small.gguf"
    whole = write_gguf(tmp_path / "whole.gguf", qtype="Q8_0", n_layers=5).read_bytes()
    with open(header, "wb") as out:
        out.write(whole[: 1 << 16])
        out.truncate(len(whole))
    monkeypatch.setattr("pshard.profile.timed.time_disk.time_disk", lambda _: pytest.fail("a hole was timed"))
    monkeypatch.setenv("PSHARD_DISK", "fake:rate=2G")
    assert plan(["-m", str(header), "--ram", "3", "-c", "128"]) == 0
    said = capsys.readouterr()
    assert "Disk         " in said.out and "planned for fake disk of 2000 MB/s" in said.err


def write_quants(folder: Path, *qtypes: str) -> None:
    folder.mkdir()
    for qtype in qtypes:
        write_gguf(folder / f"small-{qtype}.gguf", qtype=qtype, n_layers=1)
    write_profile(default_profile_path())


def test_a_folder_of_several_quantisations_is_compared(hub, capsys, tmp_path) -> None:
    write_quants(tmp_path / "q", "IQ3_S", "Q4_0", "Q8_0")
    (tmp_path / "q/small-Q6_K.gguf").write_bytes(b"GGUF")
    assert plan([str(tmp_path / "q"), "--vram", "8", "-c", "512"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines() if line.split()[1:2] and line.split()[1][0].isdigit()]
    assert rows == ["Q6_K", "IQ3_S", "Q4_0", "Q8_0"] and "Q6_K does not run here: " in out
    assert "Quality by bits a weight" in out and f"Plan it: pshard plan {tmp_path}/q/small-Q8_0.gguf" in out
    assert not list((tmp_path / "q").glob("*.json"))
    assert plan([str(tmp_path / "q"), "--vram", "8", "-c", "512", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["we_would_take"] == "Q8_0" and len(said["offered"]) == 4
    assert plan([str(tmp_path / "q"), "--vram", "8", "--explain"]) == 2
    assert "--explain needs one model, and" in capsys.readouterr().err


def test_a_folder_of_one_gguf_file_is_planned_as_the_file(hub, capsys, tmp_path) -> None:
    write_quants(tmp_path / "q", "Q4_0")
    assert plan([str(tmp_path / "q"), "--vram", "8", "-c", "512"]) == 0
    assert "small-Q4_0.gguf.pshard.json" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"a folder of GGUF files; give one of them: small-Q4_0.gguf"):
        open_model(tmp_path / "q")


def test_the_outlook_of_a_mixture_beyond_ram_has_slots_for_experts_on_disk(tmp_path: Path) -> None:
    """Whole layers of experts would take several times as long to decode."""
    path, mib = write_gguf(tmp_path / "m.gguf", "qwen3moe", n_layers=4, n_experts=16, d_expert=128), 1 << 20
    disk = tuple(DiskTiming("drive", True, 0, 0, n, 1e-4 + n / 1e9) for n in (1 << 16, 1 << 26))
    profile = replace(made_up_profile(), disks=disk, ram_bytes=host_limits.PROCESS["cpu"] + 22 * mib)
    asked = Workload((22,), 128, type_k="f32", type_v="f32", max_ubatch=32, prompt=40, generated=60, ram_mib=470)
    model = HubModel("m", (HubFile("m.gguf", path.stat().st_size),))
    whole = plan_roughly(open_model(path).spec, profile, asked).variant
    (outlook,) = compare_quants([model], {"m": path}, lambda _: (profile, asked), {})
    assert not outlook.why_not and outlook.disk_mib and outlook.decode_rate > 2 * decode_rate(whole)
