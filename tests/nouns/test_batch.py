"""A batch says what a step computes, whoever asks: planner, executor or server."""

from pshard.batch import DECODE, PROMPT, VERIFY, Batch, Span


def test_tokens_are_spread_evenly_and_logits_are_those_of_the_kind() -> None:
    prompt = Batch.even(17, 3, 100)
    assert prompt.spans == (Span(6, 100, 1, PROMPT, 2), Span(5, 100, 1, PROMPT, 1))
    assert (prompt.tokens, prompt.texts, prompt.rows, prompt.cells, prompt.is_decode) == (17, 3, 3, 300, False)
    decode = Batch.even(4, 4, 9)
    assert decode.spans == (Span(1, 9, 1, DECODE, 4),) and decode.is_decode and decode.rows == 4
    verify = Batch.even(12, 3, 9, VERIFY)
    assert verify.spans == (Span(4, 9, 4, VERIFY, 3),) and verify.rows == 12 and not verify.is_decode


def test_wanted_rows_are_the_last_of_each_text_in_order() -> None:
    batch = Batch((Span(3, 5, 3, VERIFY), Span(4, 0, 0), Span(1, 7, 1, DECODE, 2), Span(5, 2, 1)))
    assert batch.tokens == 14 and batch.wanted == (0, 1, 2, 7, 8, 13) and batch.rows == 6


def test_texts_that_decode_are_told_from_others_beside_them() -> None:
    batch = Batch((Span(1, 10, 1, DECODE), Span(1, 31, 1, DECODE), Span(300, 50), Span(4, 200, 4, VERIFY)))
    assert (batch.decoding.texts, batch.decoding.cells, batch.others.tokens) == (3, 241, 300)
    assert batch.others.mean_past == 50
    full = batch.with_prompt(6, 20)
    assert full.decoding == batch.decoding and full.others == Batch((Span(6, 20),))
    assert batch.with_prompt(0, 20) == batch.decoding
