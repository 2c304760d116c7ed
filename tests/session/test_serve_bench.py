"""Loads on a server whose tokens come at known times: what is measured is what happened."""

import asyncio
import json
import random
import socket
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any

import pytest
from fake_openai_server import FakeServer, fake_server

from pshard.errors import UserError
from pshard.session.serve_bench import drive
from pshard.session.serve_bench.arrivals import Pattern, draw_arrivals
from pshard.session.serve_bench.drive import Bounds
from pshard.session.serve_bench.lengths import Lengths, parse_lengths, read_lengths
from pshard.session.serve_bench.read_reply import read_events, read_reply
from pshard.session.serve_bench.run_loads import LoadSetting, run_loads
from pshard.session.serve_bench.target import parse_address
from pshard.session.serve_bench.timed_exchange import POLITE, Exchange, Reply
from pshard.session.serve_bench.write_prompts import Misbehaviour, SharedPrefix
from pshard.times.server_load import LoadPoint, ServerLoad, spread_of

pytestmark = pytest.mark.usefixtures("few_to_collect")

DEMO = Path(__file__).parents[2] / "examples" / "demo.gguf"


def setting_of(url: str, **what: Any) -> LoadSetting:
    """Prompts of 20, answers of 6 tokens."""
    setting = LoadSetting(
        parse_address(url), name="", key="", model=None, api="completions",
        prompts=Lengths("fixed", 20), answers=Lengths("fixed", 6), lines=[], prefix=SharedPrefix(),
        odd=Misbehaviour(), requests=6, warm_up=0, bounds=Bounds(60.0, 20.0), promise={}, seed=1, command="",
    )  # fmt: skip
    return replace(setting, **what)


def run_load(fake: FakeServer, pattern: Pattern, notes: list[str] | None = None, **what: Any) -> LoadPoint:
    return run_whole(fake, pattern, notes, **what).points[0]


def run_whole(fake: FakeServer, pattern: Pattern, notes: list[str] | None = None, **what: Any) -> ServerLoad:
    tell = (notes if notes is not None else []).append
    return run_loads(setting_of(fake.url, **what), [pattern], tell, lambda point: None)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_times_and_counts_are_those_of_the_server(api: str) -> None:
    with fake_server(first=0.06, gap=0.02) as fake:
        point = run_load(fake, Pattern(clients=2), api=api)
    assert fake.most == 2 and len(fake.seen) == 6
    assert point.requests == point.whole == 6 and not point.errors
    assert point.answer_tokens == 36 and point.prompt_tokens == 6 * (20 if api == "completions" else 7)
    assert point.cached_tokens == 18 and point.counted == "usage"
    assert point.first_token and point.gap and point.end
    # upper bounds are wide: other programs take their turns on the cores
    assert 60 <= point.first_token.p50 < 300 and point.first_token.count == 6
    assert 18 <= point.gap.p50 < 100 and point.gap.count == 30
    assert 160 <= point.end.p50 < 900 and point.end.p50 <= point.end.p95 <= point.end.most
    assert point.answer_rate == pytest.approx(36 / point.seconds)
    assert point.steady_rate and 10 < point.steady_rate < 2 * 6 / 0.15


def test_pieces_that_are_cut_anywhere_are_the_same_events() -> None:
    with fake_server(chunk_bytes=3) as fake:
        point = run_load(fake, Pattern(clients=1), requests=2)
    assert point.answer_tokens == 12 and point.gap and point.gap.count == 10 and not point.errors
    whole = b'data: {"a": 1}\r\n\r\n: ping\n\ndata: x\ndata: y\n\ndata: [DONE]\n\n'
    expected = ['{"a": 1}', "x\ny", "[DONE]"]
    for cut in range(1, 9):
        pieces = [(i, whole[i : i + cut]) for i in range(0, len(whole), cut)]
        assert [data for _, data in read_events(pieces)] == expected


def test_requests_of_a_rate_do_not_wait_for_answers() -> None:
    with fake_server(first=1.0) as fake:
        point = run_load(fake, Pattern(rate=100.0), requests=20)
    assert fake.most >= 12 and point.whole == 20 and point.pattern == "rate"
    assert point.steady_rate is None and point.late_ms >= 0


def test_arrivals_are_poisson_and_come_in_bursts() -> None:
    times = draw_arrivals(Pattern(rate=4.0), 4000, "1")
    gaps = [b - a for a, b in pairwise(times)]
    assert times == sorted(times) and fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert fmean(g * g for g in gaps) == pytest.approx(2 * 0.25**2, rel=0.15)  # of an exponential law
    assert times == draw_arrivals(Pattern(rate=4.0), 4000, "1") != draw_arrivals(Pattern(rate=4.0), 4000, "2")
    bursts = draw_arrivals(Pattern(rate=4.0, burst=8), 4000, "1")
    assert len(bursts) == 4000 and len(set(bursts)) == 500
    assert bursts[-1] == pytest.approx(1000, rel=0.15)


def test_lengths_are_drawn_as_their_names_say() -> None:
    rng = random.Random(1)
    assert {parse_lengths("512").draw(rng) for _ in range(9)} == {512}
    drawn = [parse_lengths("10-20").draw(rng) for _ in range(500)]
    assert set(drawn) == set(range(10, 21))
    drawn = sorted(parse_lengths("lognormal:512:0.8:2000").draw(rng) for _ in range(2000))
    assert drawn[1000] == pytest.approx(512, rel=0.1) and drawn[-1] == 2000
    for text in ("0", "-3", "20-10", "lognormal:512", "lognormal:512:x", "normal:3:4", "", "1.5"):
        with pytest.raises(ValueError, match="is no length"):
            parse_lengths(text)


def test_lengths_of_a_file_are_sent_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt": 9, "answer": 2}\n\n{"prompt": "tell me", "answer": 3}\n')
    with fake_server(first=0.0, gap=0.0) as fake:
        run_load(fake, Pattern(clients=1), requests=3, lines=read_lengths(file))
    assert [body["max_tokens"] for body in fake.seen] == [2, 3, 2]
    assert len(fake.seen[0]["prompt"]) == 9 and fake.seen[1]["prompt"] == "tell me"
    for line, said in (("5", "line 1"), ('{"prompt": 0, "answer": 2}', "prompt"), ('{"prompt": 2}', "line 1")):
        file.write_text(line)
        with pytest.raises(UserError, match=said):
            read_lengths(file)


def test_prompts_share_what_they_are_to_share_and_nothing_else() -> None:
    with fake_server(first=0.0, gap=0.0) as fake:
        run_load(fake, Pattern(clients=1), requests=8, prefix=SharedPrefix(12, 2))
        first = [body["prompt"] for body in fake.seen]
        run_load(fake, Pattern(clients=1), requests=8, prefix=SharedPrefix(12, 2))
        assert [body["prompt"] for body in fake.seen[8:]] == first
        run_load(fake, Pattern(clients=1), requests=8, prefix=SharedPrefix(12, 2), seed=2)
    assert all(len(ids) == 20 for ids in first)
    assert len({tuple(ids[:12]) for ids in first}) == 2 and len({tuple(ids[12:]) for ids in first}) == 8
    assert not {tuple(body["prompt"][:12]) for body in fake.seen[16:]} & {tuple(ids[:12]) for ids in first}


def test_texts_are_sent_where_ids_are_not_taken() -> None:
    notes: list[str] = []
    with fake_server(takes_ids=False, takes_ignore_eos=False, counts=False) as fake:
        point = run_load(fake, Pattern(clients=1), notes, requests=2)
    assert all(len(body["prompt"].split()) == 20 and "ignore_eos" not in body for body in fake.seen)
    assert point.counted == "events" and point.answer_tokens == 12
    assert "texts" in notes[0] and "may end early" in notes[1]


def test_errors_are_counted_by_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "AFTER_ERROR", 0.0)
    notes: list[str] = []
    with fake_server(refuse=[429, 503, 429]) as fake:
        point = run_load(fake, Pattern(clients=3), notes)
    assert dict(point.errors) == {"429": 2, "503": 1} and point.whole == 3
    assert "2 x 429: not this way" in notes
    with fake_server(cut_after=2) as fake:
        point = run_load(fake, Pattern(clients=3), requests=3)
    assert dict(point.errors) == {"cut": 3} and point.answer_tokens == 6 and point.end is None
    with fake_server(fail_after=1) as fake:
        point = run_load(fake, Pattern(clients=3), notes, requests=3)
    assert dict(point.errors) == {"error event": 3} and "3 x error event: the engine is gone" in notes
    with fake_server(first=5.0) as fake:
        point = run_load(fake, Pattern(clients=3), requests=3, bounds=Bounds(60.0, 0.2))
    assert dict(point.errors) == {"timeout": 3} and point.first_token is None


def test_an_answer_that_is_no_stream_is_none() -> None:
    html = Reply(0, 200, {}, [(5, b"<html>")], 9)
    assert read_reply(html).failure == "no stream"
    assert read_reply(replace(html, pieces=[(5, b"data: [1]\n\n")])).failure == "no stream"
    assert read_reply(replace(html, pieces=[(5, b'data: {"choices":[{"text":"a"}]}\n\n')])).failure == "cut"


def test_usage_may_come_as_llama_cpp_times_it() -> None:
    last = {"choices": [{"text": "", "finish_reason": "length"}], "timings": {"prompt_n": 8, "cache_n": 2}}
    last["timings"]["predicted_n"] = 3
    answer = read_reply(Reply(0, 200, {}, [(5, b"data: " + json.dumps(last).encode() + b"\n\n")], 9))
    assert (answer.prompt, answer.cached, answer.made, answer.failure) == (10, 2, 3, "")


def test_clients_that_leave_are_gone_for_the_server_and_count_apart() -> None:
    with fake_server(gap=0.03) as fake:
        point = run_load(fake, Pattern(clients=2), odd=Misbehaviour(leave=1.0), promise={"gap": 1000.0})
    assert point.cancelled == 6 and point.whole == 0 and not point.errors and point.end is None
    assert fake.gone >= 4 and 0 < point.answer_tokens < 36
    assert point.kept == 0 and point.goodput == 0


def test_slow_readers_say_nothing_of_gaps() -> None:
    with fake_server(gap=0.01) as fake:
        point = run_load(fake, Pattern(clients=6), odd=Misbehaviour(slow=0.5))
    assert point.whole == 6 and 0 < point.slow < 6
    assert point.gap and point.gap.count == 5 * (6 - point.slow) and point.gap.most < 100
    assert point.seconds > 0.5


def test_goodput_is_of_requests_that_keep_the_promise() -> None:
    with fake_server(first=0.1, gap=0.02) as fake:
        kept = run_load(fake, Pattern(clients=2), promise={"ttft": 500.0, "gap": 200.0, "end": 2000.0})
        lost = run_load(fake, Pattern(clients=2), promise={"gap": 5.0})
    assert kept.kept == 6 and kept.goodput == pytest.approx(6 / kept.seconds)
    assert lost.kept == 0 and lost.goodput == 0


def test_percentiles_are_values_that_occurred() -> None:
    spread = spread_of([float(n) for n in range(1, 201)])
    assert spread and (spread.p50, spread.p95, spread.p99, spread.most, spread.count) == (100, 190, 198, 200, 200)
    assert spread_of([]) is None


def test_a_server_that_cannot_be_driven_is_said_in_a_line() -> None:
    with fake_server(key="k") as fake:
        with pytest.raises(UserError, match=r"401.*a key is missing; give --api-key"):
            run_load(fake, Pattern(clients=1))
        assert run_load(fake, Pattern(clients=1), requests=1, key="k").whole == 1
    with pytest.raises(UserError, match="nobody listens"):
        run_loads(setting_of("http://127.0.0.1:9"), [Pattern(clients=1)], print, print)
    for url in ("ftp://x", "http://", "http://x:port", "http://x:70000"):
        with pytest.raises(UserError, match="--serve"):
            parse_address(url)
    assert parse_address("localhost:80/v1/").geturl() == "http://localhost:80"


def test_64_pieces_that_arrive_at_once_are_stamped_within_a_millisecond() -> None:
    """From the moment at which all are there; the median of some bursts, as other programs take turns on the core."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = b'data: {"choices": [{"index": 0, "text": "a piece of text"}]}\n\n'
    event = b"%x\r\n%s\r\n" % (len(data), data)

    async def measure() -> list[float]:
        loop, pairs = asyncio.get_running_loop(), [socket.socketpair() for _ in range(64)]
        made = [Exchange(b"", POLITE) for _ in pairs]
        for (ours, theirs), each in zip(pairs, made):
            await loop.create_connection(lambda each=each: each, sock=ours)  # type: ignore[misc]
            theirs.send(head)
        lates = []
        for n in range(1, 21):
            await asyncio.sleep(0.002)
            for _, theirs in pairs:
                theirs.send(event)
            there = perf_counter_ns()
            while any(len(each.raw) < n for each in made):
                await asyncio.sleep(0)
            lates.append(max(each.raw[-1][0] for each in made) - there)
        for (_, theirs), each in zip(pairs, made):
            theirs.send(b"0\r\n\r\n")
            theirs.close()
            await each.done
            assert not each.reply.failure and len(each.reply.pieces) == 20
        return [ns / 1e6 for ns in lates]

    assert any(median(asyncio.run(measure())) < 1.0 for _ in range(10))  # in one that no other program disturbs


@pytest.mark.slow
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_llama_cpps_server_is_driven_and_its_counts_are_read(api: str) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="brings llama.cpp's server")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_gpu_layers = str(DEMO), 1024, 0
    params.cpuparams.n_threads, params.n_parallel = 1, 2
    server = xllamacpp.Server(params)
    notes: list[str] = []
    setting = setting_of(server.listening_address, requests=4, api=api, bounds=Bounds(120.0, 120.0))
    point = run_loads(setting, [Pattern(clients=2)], notes.append, lambda point: None).points[0]
    assert point.whole == 4 and not point.errors and point.counted == "usage" and point.answer_tokens == 4 * 6
    assert point.first_token and point.gap and point.gap.count > 0
    assert (point.prompt_tokens == 4 * 20 and not notes) if api == "completions" else point.prompt_tokens > 4 * 20
