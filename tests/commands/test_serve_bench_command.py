"""pshard bench --serve: a table, JSON, a figure and a report; bad flags before anything is asked of a server."""

import json
from pathlib import Path

import pytest
from fake_openai_server import fake_server

from pshard.commands.cli_bench import main
from pshard.commands.cli_report import main as report
from pshard.jsonio import from_json
from pshard.times.server_load import ServerLoad

pytestmark = pytest.mark.usefixtures("few_to_collect")

SMALL = ("-p", "20", "-n", "4", "--requests", "4", "--warm-up", "1")


def test_a_table_json_and_a_figure_of_two_servers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    theirs, ours, figure = (tmp_path / name for name in ("theirs.json", "ours.json", "load.png"))
    with fake_server(first=0.02, gap=0.002, key="secret-word") as fake:
        words = ["--serve", fake.url, *SMALL, "--clients", "1,2", "--promise", "ttft=900,gap=500"]
        words += ["--api-key", "secret-word"]
        assert main([*words, "--name", "theirs", "-of", str(theirs)]) == 0
        capsys.readouterr()
        assert main([*words, "-of", str(ours), "--figure", str(figure), "--beside", str(theirs)]) == 0
        out = capsys.readouterr()
        assert len(fake.seen) == 2 * 2 * (4 + 1)
    assert "first token ms, p50 / 95 / 99" in out.out
    rows = [line.split("|")[1:3] for line in out.out.splitlines()[2:]]
    named = [[cell.strip() for cell in row] for row in rows]
    address = fake.url.removeprefix("http://")
    assert named == [[s, load] for s in (address, "theirs") for load in ("1 client", "2 clients")]
    assert "4/4" in out.out and "2 clients: 4 requests in" in out.err
    load = from_json(ServerLoad, json.loads(ours.read_text()))
    assert [p.load for p in load.points] == [1, 2] and load.promise == (("ttft", 900.0), ("gap", 500.0))
    assert "secret" not in ours.read_text() and "--api-key KEY" in load.command
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert report([str(ours), str(theirs), "-o", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "A server under load" in page and "theirs" in page and "2 clients" in page
    assert (tmp_path / "report" / "server-load.svg").exists()


def test_a_figure_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    theirs, figure = tmp_path / "theirs.json", tmp_path / "load.png"
    with fake_server(first=0.0, gap=0.0) as fake:
        words = ["--serve", fake.url, *SMALL]
        assert main([*words, "--rate", "200", "-of", str(theirs)]) == 0
        assert main([*words, "--clients", "1", "--figure", str(figure), "--beside", str(theirs)]) == 0
    assert f"note: {figure} is without the run of " in capsys.readouterr().err and figure.exists()


def test_json_on_stdout_is_what_the_file_has(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with fake_server(first=0.0, gap=0.0) as fake:
        words = ["--serve", fake.url, *SMALL, "--rate", "200", "--burst", "2", "-of", str(tmp_path / "a.json")]
        assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((tmp_path / "a.json").read_text())
    assert said["points"][0]["pattern"] == "rate" and said["points"][0]["burst"] == 2


def test_a_load_without_one_answer_ends_with_1(capsys: pytest.CaptureFixture) -> None:
    with fake_server(cut_after=1) as fake:
        assert main(["--serve", fake.url, *SMALL, "--requests", "1"]) == 1
    assert "1 (1 x cut)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--clients", "2", "--rate", "1"), "give one"),
        (("--clients", "0"), "has a 0"),
        (("--burst", "4"), "--rate"),
        (("-p", "many"), "is no length"),
        (("--shared-prefix", "-4"), "no number of tokens"),
        (("--cancel", "2"), "no share"),
        (("--cancel", "0.6", "--slow", "0.6"), "give 1 at most together"),
        (("--promise", "speed=9"), "ttft, gap, end"),
        (("--promise", "gap=fast"), "ttft, gap, end"),
        (("--figure", "load.pdf"), ".png or .svg"),
        (("-of", "/"), "folder"),
        (("--lengths", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--beside", "nowhere.json"), "nowhere.json"),
        (("--warm-up", "-1"), "--warm-up"),
        (("--rates", "1"), "did you mean --rate"),
        (("-m", "x.gguf"), "there is no flag -m"),
    ],
)
def test_bad_flags_are_told_in_a_line(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["--serve", "http://127.0.0.1:9", *flags]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_help_of_bench_leads_to_that_of_serve(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--serve URL" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--serve", "x", "--help"])
    assert "--shared-prefix" in capsys.readouterr().out
