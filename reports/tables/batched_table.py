"""Batches of sequences as a table in the manner of llama.cpp's batched bench, with what was predicted beside it."""

from collections.abc import Iterator, Sequence

from pshard.reports.tables.markdown_table import draw_table
from pshard.times.measurement import Measurement

HEADINGS = ("plan", "PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "predicted", "T_TG s", "S_TG t/s", "predicted",
            "T s", "S t/s", "predicted")  # fmt: skip


def format_batched(measurements: Sequence[Measurement]) -> str:
    """One row for each prompt that was prefilled (PP tokens of each of B sequences) and then decoded from (TG tokens).

    T are seconds, S tokens per second over all sequences; N_KV = B (depth + PP + TG) cells at the end. T and S without
    more are of both phases. Measurements without a partner have no row.
    """
    rows = [_row(prefill, decode) for prefill, decode in _pair(measurements)]
    return draw_table(HEADINGS, rows, [heading != "plan" for heading in HEADINGS])


def _pair(measurements: Sequence[Measurement]) -> Iterator[tuple[Measurement, Measurement]]:
    """Prefills, each with the decodes that begin where it ends."""
    for prefill in (m for m in measurements if m.n_prompt and not m.n_gen):
        for decode in (m for m in measurements if m.n_gen and not m.n_prompt):
            same = (decode.strategy, decode.n_sequences) == (prefill.strategy, prefill.n_sequences)
            if same and decode.n_depth == prefill.n_depth + prefill.n_prompt:
                yield prefill, decode


def _row(prefill: Measurement, decode: Measurement) -> list[str]:
    b = prefill.n_sequences
    tokens = prefill.tokens, decode.tokens
    seconds = prefill.seconds, decode.seconds
    expected = "-"
    if prefill.predicted_ts and decode.predicted_ts:
        expected = f"{sum(tokens) / (tokens[0] / prefill.predicted_ts + tokens[1] / decode.predicted_ts):.2f}"
    cells = b * (decode.n_depth + decode.n_gen)
    row = [prefill.strategy, str(prefill.n_prompt), str(decode.n_gen), str(b), str(cells)]
    for m, s in ((prefill, seconds[0]), (decode, seconds[1])):
        row += [f"{s:.3f}", f"{m.avg_ts:.2f}", "-" if m.predicted_ts is None else f"{m.predicted_ts:.2f}"]
    return [*row, f"{sum(seconds):.3f}", f"{sum(tokens) / sum(seconds):.2f}", expected]
