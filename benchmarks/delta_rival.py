"""flash-linear-attention's `chunk_gated_delta_rule` for `delta_net.py`: compiled on all cores, checked, timed."""

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import torch

from pshard.runtime.kernels.plain_delta import L2_EPS, run_chunked
from pshard.units.operations import DeltaNet

TUNING_MS = {"warmup": 5, "rep": 20}  # for each way that the tuner tries; by default 125, in all 10 s for a shape


def is_installed() -> bool:
    """Whether there is something to compare with. Its package `fla-core` is enough."""
    return importlib.util.find_spec("fla") is not None


def time_rule(net: DeltaNet, tokens: int, ours_us: float | None) -> dict[str, Any]:
    """Microseconds of a prompt, its error, and the ratio to ours: above 1 ours is faster."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from triton.runtime.driver import driver
    from triton.testing import do_bench

    rows = make_rows(net, tokens)
    call = partial(chunk_gated_delta_rule, **rows, output_final_state=True, use_qk_l2norm_in_kernel=True)
    with torch.no_grad(), mock.patch.object(driver.active, "get_benchmarker", lambda: partial(do_bench, **TUNING_MS)):
        compile_ahead(call)
        error = check_rule(rows, call)
        us = time_eager(call)
    found = {"us": round(us, 1), "error": round(error, 5)}
    return found | ({"of_fla": round(us / ours_us, 2)} if ours_us else {})


def make_rows(net: DeltaNet, tokens: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Queries and keys of key heads, the others of value heads: what our convolution leaves."""
    keys, values = (1, tokens, net.key_heads, net.head), (1, tokens, net.value_heads, net.head)
    rows = {n: torch.randn(shape, device=device).bfloat16() for n, shape in (("q", keys), ("k", keys), ("v", values))}
    scalars = {"g": -torch.rand(values[:3], device=device), "beta": torch.rand(values[:3], device=device).bfloat16()}
    return rows | scalars


def compile_ahead(call: Callable[[], Any]) -> None:
    """Compiles all that the call's tuners will try, at once: one after another takes a minute. Nothing is launched."""
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    def compile_only(tuner: Autotuner, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        tuner.warmup(*args, grid=grid, **named)

    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        mock.patch.object(Autotuner, "run", compile_only),
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        call()


def check_rule(given: dict[str, torch.Tensor], call: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The error beside plain torch in float64, of the deviation; ValueError for more than 5%: it keeps less in float32
    than ours."""
    rows = {name: x[0].double() for name, x in given.items()}
    each = rows["v"].shape[1] // rows["q"].shape[1]
    unit = {n: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for n, x in rows.items() if n in ("q", "k")}
    q, k = (unit[n].repeat_interleave(each, 1).transpose(0, 1) for n in ("q", "k"))
    v, g, beta = (rows[n].transpose(0, 1) for n in ("v", "g", "beta"))
    state = torch.zeros(len(v), q.shape[-1], v.shape[-1], dtype=torch.float64, device=v.device)
    want = run_chunked(q * q.shape[-1] ** -0.5, k, v, g, beta, state)
    out, last = call()
    pairs = ((out[0].transpose(0, 1), want[0]), (last[0], want[1]))
    errors = [((a.double() - b).square().mean().sqrt() / b.std()).item() for a, b in pairs]
    if not max(errors) < 0.05:
        raise ValueError(f"errors of {errors} of the deviation: the rival computes something else")
    return max(errors)


def time_eager(call: Callable[[], Any]) -> float:
    """Microseconds of one call of many that are queued at once, so that the GPU does not wait for Python."""
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        start.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 100)
    return best
