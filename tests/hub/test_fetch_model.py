"""Models of the Hub arrive whole, or not at all; every fault is a line that says what to do."""

import hashlib
import shutil
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import pytest
from filelock import FileLock
from head_files import write_headed
from hub_server import COMMIT, Faults, HubServer
from model_files import write_gguf

from pshard import file_lock
from pshard.commands.program import one_program
from pshard.errors import UserError
from pshard.hub.fetch_model import fetch_model
from pshard.models import open_model

REPO = "someone/tiny-GGUF"


@pytest.fixture
def files(hub: HubServer, tmp_path: Path) -> dict[str, bytes]:
    """A repository with a small model in two quantisations."""
    made = {}
    for qtype in ("Q4_0", "Q8_0"):
        path = write_gguf(tmp_path / "made.gguf", qtype=qtype)
        made[f"tiny-{qtype}.gguf"] = path.read_bytes()
        path.unlink()
    hub.repositories[REPO] = made | {"README.md": b"# tiny"}
    return made


def list_cache(tmp_path: Path) -> list[str]:
    """Files that the cache calls whole."""
    folder = tmp_path / "hf" / "hub"
    return [p.name for p in folder.rglob("*") if p.is_file() and p.suffix in ("", ".gguf") and "blobs" in p.parts]


def test_a_model_is_pulled_and_its_place_is_printed(hub, files, tmp_path, capsys) -> None:
    assert one_program.main(["pull", f"{REPO}:Q8_0"]) == 0
    assert Path(capsys.readouterr().out.strip()).read_bytes() == files["tiny-Q8_0.gguf"]
    assert one_program.main(["pull", str(tmp_path)]) == 2 and "org/repo" in capsys.readouterr().err


def test_a_quantisation_is_fetched_once_and_opened_from_the_hubs_own_cache(hub, files, tmp_path) -> None:
    path = fetch_model(f"{REPO}:q4_0")
    assert path.read_bytes() == files["tiny-Q4_0.gguf"]
    assert path == tmp_path / "hf/hub/models--someone--tiny-GGUF/snapshots" / COMMIT / "tiny-Q4_0.gguf"
    asked = len(hub.requests)
    assert fetch_model(f"hf.co/{REPO}:Q4_0") == path
    assert len(hub.requests) == asked  # the second time nobody was asked
    with open_model(path) as model:
        assert model.spec.units


def test_a_head_that_lies_beside_a_model_is_fetched_before_it(hub, tmp_path, capsys) -> None:
    write_headed(tmp_path / "whole.gguf", "llama")
    write_gguf(tmp_path / "alone.gguf", "llama", n_layers=2, qtype="F32")
    made = {"x-F32.gguf": "alone.gguf", "mtp-x.gguf": "whole.gguf"}
    hub.repositories[REPO] = {name: (tmp_path / source).read_bytes() for name, source in made.items()}
    path = fetch_model(REPO)
    assert "with its multi-token head" in capsys.readouterr().err
    assert (path.parent / "mtp-x.gguf").read_bytes() == hub.repositories[REPO]["mtp-x.gguf"]
    names = [request[1].rpartition("/")[2] for request in hub.of_files()]
    assert names == sorted(names) and set(names) == set(made)  # who is cut off finds no model without its head
    with open_model(path) as model:
        assert model.spec.head is not None


def test_who_waits_for_another_fetch_of_a_file_is_told(hub, files, tmp_path, monkeypatch, capsys) -> None:
    held, told, name_holder = Event(), Event(), file_lock._name_holder

    def name_and_go_on(place: Path) -> str:
        named = name_holder(place)
        told.set()
        return named

    monkeypatch.setattr(file_lock, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(file_lock, "_name_holder", name_and_go_on)
    etag = hashlib.sha256(files["tiny-Q4_0.gguf"]).hexdigest()
    place = tmp_path / f"hf/hub/.locks/models--someone--tiny-GGUF/{etag}.lock"
    place.parent.mkdir(parents=True)

    def fetch_slowly() -> None:
        with FileLock(place):
            held.set()
            told.wait(60)

    other = Thread(target=fetch_slowly)
    other.start()
    held.wait()
    assert fetch_model(f"{REPO}:Q4_0").exists()
    other.join()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(said) == 1 and f"holds the lock of {REPO}/tiny-Q4_0.gguf; waiting for it" in said[0]


def test_the_hubs_library_finds_what_was_fetched(hub, files) -> None:
    from huggingface_hub import hf_hub_download

    path = fetch_model(f"{REPO}:Q8_0")
    assert hf_hub_download(REPO, "tiny-Q8_0.gguf", local_files_only=True) == str(path)


def test_a_model_in_parts_arrives_with_all_of_them(hub, tmp_path) -> None:
    parts = {f"Q4_K_M/big-Q4_K_M-0000{i}-of-00003.gguf": bytes([i]) * 9000 for i in (1, 2, 3)}
    hub.repositories[REPO] = parts
    path = fetch_model(f"{REPO}:Q4_K_M")
    assert path.name == "big-Q4_K_M-00001-of-00003.gguf"
    assert [p.read_bytes()[0] for p in sorted(path.parent.iterdir())] == [1, 2, 3]


def test_a_connection_that_is_cut_is_taken_up_where_it_ended(hub, files) -> None:
    whole = files["tiny-Q8_0.gguf"]
    hub.faults = Faults(cut_after=len(whole) // 3, cuts=2)
    assert fetch_model(f"{REPO}:Q8_0").read_bytes() == whole
    assert [r[2].split("-")[0] for r in hub.of_files()] == [f"bytes={n * (len(whole) // 3)}" for n in (0, 1, 2)]


def test_a_download_that_was_cut_for_good_goes_on_in_the_next_run(hub, files, tmp_path) -> None:
    whole = files["tiny-Q8_0.gguf"]
    hub.faults = Faults(cut_after=5000, cuts=1)
    real = hub.repositories[REPO]["tiny-Q8_0.gguf"]

    def lose_it(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("pshard.hub.read_range.time", SimpleNamespace(sleep=lose_it))
        fetch_model(f"{REPO}:Q8_0")
    assert not list_cache(tmp_path)
    hub.sent = 0
    assert fetch_model(f"{REPO}:Q8_0").read_bytes() == real
    assert hub.sent < len(whole)


def test_a_file_that_stays_cut_is_absent_and_the_command_can_be_repeated(hub, files, tmp_path) -> None:
    hub.faults = Faults(cut_after=0, cuts=100)
    with pytest.raises(UserError, match=r"tiny-Q4_0.gguf was cut after 0 of \d+ bytes .*run it again: it goes"):
        fetch_model(f"{REPO}:Q4_0")
    assert not list_cache(tmp_path)


def test_a_file_of_another_length_than_the_hub_says_is_absent(hub, files, tmp_path) -> None:
    hub.faults = Faults(short=100)
    with pytest.raises(UserError, match=r"tiny-Q4_0.gguf ends after \d+ bytes, before the Hub.s list says"):
        fetch_model(f"{REPO}:Q4_0")
    assert not list_cache(tmp_path)


def test_a_file_with_other_bytes_than_its_checksum_says_is_absent(hub, files, tmp_path) -> None:
    hub.faults = Faults(spoilt=True)
    with pytest.raises(UserError, match="came with other bytes than the Hub's checksum says"):
        fetch_model(f"{REPO}:Q4_0")
    assert not list_cache(tmp_path)
    hub.faults = Faults()
    assert fetch_model(f"{REPO}:Q4_0").read_bytes() == files["tiny-Q4_0.gguf"]


def test_a_server_that_knows_no_ranges_is_read_from_the_beginning(hub, files) -> None:
    whole = files["tiny-Q4_0.gguf"]
    hub.faults = Faults(cut_after=len(whole) // 2, cuts=1, no_ranges=True)
    assert fetch_model(f"{REPO}:Q4_0").read_bytes() == whole


@pytest.mark.parametrize(
    "status, code, says",
    [
        (401, "RepoNotFound", "no repository or file at .*no such path here.*check the name.*HF_TOKEN"),
        (404, "RepoNotFound", "no repository or file at .*check the name"),
        (401, "BadToken", "does not accept the token; .*HF_TOKEN"),
        (403, "GatedRepo", "is gated: accept its terms at http.*someone/tiny-GGUF.*HF_TOKEN"),
        (429, "", "no more requests from here for now .*try again in 7 s"),
        (503, "", "answered 503 .*try again later"),
    ],
)
def test_what_the_hub_refuses_is_said_with_what_to_do(hub, files, tmp_path, status, code, says) -> None:
    hub.faults = Faults(refused=(status, code))
    with pytest.raises(UserError, match=says):
        fetch_model(f"{REPO}:Q4_0")
    assert not list_cache(tmp_path)


def test_a_hub_that_cannot_be_reached_is_said(hub, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 cannot be reached .*check the network and HF_ENDPOINT"):
        fetch_model(f"{REPO}:Q4_0")


def test_offline_mode_takes_what_is_cached_and_says_what_is_not(hub, files, monkeypatch) -> None:
    from huggingface_hub import close_session, constants

    path = fetch_model(f"{REPO}:Q4_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    assert fetch_model(f"{REPO}:Q4_0") == path
    assert fetch_model(REPO) == path  # the only one that is here
    with pytest.raises(UserError, match=r"not in the Hub's cache .*offline mode is on; unset HF_HUB_OFFLINE"):
        fetch_model(f"{REPO}:Q8_0")


def test_a_quantisation_that_is_not_there_names_those_that_are(hub, files) -> None:
    with pytest.raises(UserError, match=f"{REPO} has no Q6_K; .*one of Q4_0, Q8_0"):
        fetch_model(f"{REPO}:Q6_K")


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(hub, files, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(UserError, match=r"GiB more, and .* GiB free .*HF_HOME"):
        fetch_model(f"{REPO}:Q4_0")
    assert not hub.of_files()
