"""Benchmark output: what each format holds, and that JSON is read back as it was."""

import csv
import io
import json
from dataclasses import replace

import pytest
from report_samples import make_bench, make_measurement

from pshard.jsonio import from_json
from pshard.reports.tables.bench_formats import format_measurements
from pshard.times.measurement import BenchedDrafts, Measurement, summarise_samples
from pshard.times.measurement import test_name as name_test


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((512, 0), "pp512"), ((0, 128), "tg128"), ((512, 128), "pp512+tg128"), ((512, 0, 4096), "pp512 @ d4096")],
)
def test_tests_are_named_as_llama_bench_names_them(arguments, name):
    assert name_test(*arguments) == name


def test_rates_are_averaged_per_repetition():
    samples = summarise_samples((10**9, 2 * 10**9), 100)
    assert samples["samples_ts"] == (100.0, 50.0) and samples["avg_ts"] == 75.0
    assert samples["avg_ns"] == 1.5e9 and samples["stddev_ts"] == pytest.approx(35.355, abs=1e-3)
    assert summarise_samples((10**9,), 100)["stddev_ts"] == 0.0
    with pytest.raises(ValueError):
        summarise_samples((), 100)


def test_json_and_jsonl_are_read_back_unchanged():
    bench = make_bench()
    assert [from_json(Measurement, d) for d in json.loads(format_measurements(bench, "json"))] == bench
    lines = format_measurements(bench, "jsonl").splitlines()
    assert [from_json(Measurement, json.loads(line)) for line in lines] == bench


def test_table_has_one_aligned_line_per_measurement():
    lines = format_measurements(make_bench(), "md").splitlines()
    assert len(lines) == 2 + len(make_bench()) and len({len(line) for line in lines}) == 1
    assert " 9832.67 ± 246.63 " in lines[5]
    assert lines[0].split("|")[1].strip() == "model" and " ranks " not in lines[0]


def test_table_shows_what_differs_between_rows():
    both = [make_measurement(0, 8), make_measurement(0, 8, budget_mib=(1, 2), n_ubatch=512, link_bytes=None)]
    head, _, first, second = format_measurements(both, "md").splitlines()
    assert " ranks " in head and " ubatch " in head and " kv " not in head
    assert "12000 |" in first and "1,2 |" in second and second.endswith("- |")


def test_a_row_with_drafts_names_the_rate_that_its_factor_is_against() -> None:
    """The row above it is measured by itself, so the factor is none between rows."""
    drafts = BenchedDrafts("lookup", 7, steps=96, held=(0.25,), without_ts=8.0)
    row = make_measurement(0, 64, 10.0, drafts=drafts)
    said = f"2.00 tokens a step, held 0.25, {row.avg_ts / 8:.2f}x of 8.00 t/s without (in turns)"
    assert said in format_measurements([make_measurement(0, 64, 12.0), row], "md").splitlines()[-1]


def test_a_batched_row_is_a_prefill_and_the_decode_after_it():
    prefill = make_measurement(100, 0, 200.0, predicted=100.0, n_sequences=4)
    decode = make_measurement(0, 10, 20.0, predicted=10.0, n_depth=100, n_sequences=4)
    others = [replace(prefill, n_sequences=1), replace(decode, n_depth=0), replace(decode, strategy="fit")]
    head, _, row = format_measurements([prefill, decode, *others], "batched").splitlines()
    cells = dict(zip([c.strip() for c in head.split("|")][:6], [c.strip() for c in row.split("|")]))
    assert (cells["PP"], cells["TG"], cells["B"], cells["N_KV"]) == ("100", "10", "4", "440")
    total = prefill.seconds + decode.seconds
    assert [c.strip() for c in row.split("|")][-4:-1] == [f"{total:.3f}", f"{440 / total:.2f}", f"{440 / 8:.2f}"]


def test_csv_has_a_column_per_scalar_and_environment_entry():
    other = make_measurement(0, 8, environment=(("driver", "570"),))
    rows = list(csv.DictReader(io.StringIO(format_measurements([make_measurement(0, 8), other], "csv"))))
    assert rows[0]["env_threads"] == "8" and rows[1]["env_threads"] == "" and rows[1]["env_driver"] == "570"
    assert float(rows[0]["avg_ts"]) == make_measurement(0, 8).avg_ts and "samples_ns" not in rows[0]


def test_unknown_format_is_an_error():
    with pytest.raises(ValueError, match="md, batched, csv, json, jsonl"):
        format_measurements([], "xml")
