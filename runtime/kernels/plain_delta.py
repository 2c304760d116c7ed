"""The gated delta net in plain torch (arXiv 2412.06464): the oracle of the fast kernels, on any device.

Arithmetic is in the type of the states: float32, or float64 where a test wants to know what is right. Token by token,
for each value head with its state S [dk, dv]:

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

A chunk of tokens at once, with c = cumsum(g) and D_ij = exp(c_i - c_j) for j <= i:

    A = strictly lower part of beta_i (k_i . k_j) D_ij;   (I + A) U = beta V;   (I + A) W = beta exp(c) K
    N = U - W S;   O = exp(c) Q S + (Q K^T * D) N;   S <- exp(c_last) S + (exp(c_last - c) K)^T N
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pshard.runtime.kernels.api import DeltaWeights, OpenNet
from pshard.runtime.kernels.plain_rows import head_norm

CHUNK = 64  # tokens of a chunk
L2_EPS = 1e-6  # of the keys' and queries' norms


class PlainDelta:
    """What `api.Kernels` has for gated delta nets and short convolutions."""

    def delta_net(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        weights: DeltaWeights,
        states: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        longest: int,
        scratch: torch.Tensor | None = None,
        opened: torch.Tensor | None = None,
    ) -> None:
        """See `Kernels.delta_net`. One token of a sequence is computed as such, and so are open rows; more of them in
        chunks."""
        bounds = offsets.tolist()
        for slot, first, last in zip(slots.tolist(), bounds, bounds[1:]):
            if first == last:
                continue
            rows = slice(first, last)
            tail, before = (kept[slot if slot >= 0 else -1 - slot] for kept in (tails, states))
            q, k, v = _convolve(qkv[rows], tail if slot >= 0 else tail.clone(), weights, states.dtype)
            decay, share = _decay(beta[rows], alpha[rows], weights, states.dtype)
            if slot < 0:
                assert opened is not None
                mixed, u, _ = _recur(q, k, v, decay, share, before)
                net = OpenNet(tails, opened, states, weights.key_heads, weights.tiled)
                uses = key_head_of(weights)
                of_key = [uses.index(i) for i in range(weights.key_heads)]
                found = qkv[rows], k[of_key].transpose(0, 1), u.transpose(0, 1), decay.T.exp()
                for to, value in zip(net.split(rows), found, strict=True):
                    to.copy_(value)
            elif last - first == 1:
                mixed, states[slot] = run_recurrent(q, k, v, decay, share, before)
            else:
                mixed, states[slot] = run_chunked(q, k, v, decay, share, before)
            bend = torch.sigmoid if weights.gate == "sigmoid" else F.silu
            gate = bend(z[rows].to(states.dtype)).unflatten(1, (-1, weights.head))
            normed = head_norm(mixed.transpose(0, 1), weights.norm, weights.eps)
            out[rows] = (normed * gate).flatten(1).to(out.dtype)

    def short_conv(
        self,
        x: torch.Tensor,
        taps: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        longest: int,
        opened: torch.Tensor | None = None,
    ) -> None:
        """See `Kernels.short_conv`."""
        bounds, last = offsets.tolist(), taps.shape[1] - 1
        for slot, first, end in zip(slots.tolist(), bounds, bounds[1:]):
            if first == end:
                continue
            given, gate, by = x[first:end].to(tails.dtype).chunk(3, 1)
            inputs = torch.cat((tails[slot if slot >= 0 else -1 - slot], given * by))
            mixed = sum(inputs[j : j + end - first] * taps[:, j] for j in range(last + 1))
            out[first:end] = (gate * mixed).to(out.dtype)
            if slot >= 0:
                tails[slot] = inputs[end - first :]
            else:
                assert opened is not None
                opened[first:end, : out.shape[1]] = inputs[last:]

    def settle_states(self, nets: Sequence[OpenNet], slot: int, rows: slice) -> None:
        """See `Kernels.settle_states`."""
        for net in nets:
            tail, (raw, keys, added, left) = net.tails[slot], net.split(rows)
            if net.states is not None:
                state, uses = net.states[slot], list_key_heads(*net.heads[:2], net.tiled)
                for k, u, kept in zip(keys.to(state.dtype), added.to(state.dtype), left.to(state.dtype)):
                    state.copy_(state * kept[:, None, None] + k[uses][:, :, None] * u[:, None])
            tail.copy_(torch.cat((tail, raw.to(tail.dtype)))[-tail.shape[0] :])


def key_head_of(weights: DeltaWeights) -> list[int]:
    """The key head that each value head uses."""
    return list_key_heads(weights.key_heads, weights.value_heads, weights.tiled)


def list_key_heads(keys: int, values: int, tiled: bool) -> list[int]:
    """The key head that each of so many value heads uses."""
    return [j % keys if tiled else j // (values // keys) for j in range(values)]


def run_recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, share: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [H, T, dv], the new state [H, dk, dv]) token by token, of q, k [H, T, dk], v [H, T, dv], g and beta [H, T]."""
    out, _, state = _recur(q, k, v, decay, share, state)
    return out, state


def _recur(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, share: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the same also u [H, T, dv], between the two: what each token adds to the state along its key."""
    out, added = torch.empty_like(v), torch.empty_like(v)
    for t in range(v.shape[1]):
        state = state * decay[:, t, None, None].exp()
        u = added[:, t] = share[:, t, None] * (v[:, t] - torch.einsum("hkv,hk->hv", state, k[:, t]))
        state = state + k[:, t, :, None] * u[:, None]
        out[:, t] = torch.einsum("hkv,hk->hv", state, q[:, t])
    return out, added, state


def run_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    share: torch.Tensor,
    state: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, so many tokens at once."""
    parts = []
    for first in range(0, v.shape[1], chunk):
        qs, ks, vs = (x[:, first : first + chunk] for x in (q, k, v))
        c, b = decay[:, first : first + chunk].cumsum(1), share[:, first : first + chunk, None]
        seen = torch.ones(c.shape[1], c.shape[1], dtype=torch.bool, device=c.device).tril()
        between = (c[:, :, None] - c[:, None, :]).masked_fill(~seen, -torch.inf).exp()
        system = torch.tril(b * (ks @ ks.mT) * between, -1)
        both = torch.cat((b * vs, b * c.exp()[..., None] * ks), -1)
        both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        new = both[..., : v.shape[2]] - both[..., v.shape[2] :] @ state
        parts.append(c.exp()[..., None] * (qs @ state) + (qs @ ks.mT * between) @ new)
        left = (c[:, -1:] - c).exp()[..., None] * ks
        state = c[:, -1:, None].exp() * state + left.mT @ new
    return torch.cat(parts, 1), state


def _convolve(
    rows: torch.Tensor, tail: torch.Tensor, weights: DeltaWeights, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of every value head, [Hv, T, head]; the tail becomes the last inputs."""
    raw = torch.cat((tail, rows.to(tail.dtype)))
    tail.copy_(raw[-tail.shape[0] :])
    conv = weights.conv.to(dtype)
    mixed = F.silu((raw.to(dtype).unfold(0, conv.shape[1], 1) * conv).sum(-1))
    keys = weights.key_heads * weights.head
    parts = mixed.split((keys, keys, rows.shape[1] - 2 * keys), 1)
    q, k, v = (x.unflatten(1, (-1, weights.head)).transpose(0, 1) for x in parts)
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    uses = key_head_of(weights)
    return q[uses] * weights.head**-0.5, k[uses], v


def _decay(
    beta: torch.Tensor, alpha: torch.Tensor, weights: DeltaWeights, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """g (the logarithm of what is left of a state) and beta, [Hv, T]."""
    step = F.softplus(alpha.to(dtype) + weights.dt_bias.to(dtype), threshold=40)
    return (weights.decay.to(dtype) * step).T, beta.to(dtype).sigmoid().T
