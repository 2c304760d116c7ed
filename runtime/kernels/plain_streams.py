"""Several residual streams and n-grams in plain torch: the oracle of the fast kernels, on any device."""

import torch
import torch.nn.functional as F

LEAST_SCORE = 1e-6  # of which a root is taken at least


class PlainStreams:
    """What `api.StreamKernels` has."""

    def spread_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        """See `StreamKernels.spread_stream`."""
        for stream in streams[:, : count * x.shape[1]].chunk(count, 1):
            stream.copy_(x)

    def inject_stream(self, x: torch.Tensor, streams: torch.Tensor, count: int) -> None:
        """See `StreamKernels.inject_stream`."""
        wide = count * x.shape[1]
        shares = 2 * torch.sigmoid(streams[:, wide : wide + count])
        streams[:, :wide].unflatten(1, (count, -1)).add_(shares[..., None] * x[:, None])

    def norm_streams(
        self, streams: torch.Tensor, weight: torch.Tensor, count: int, eps: float, out: torch.Tensor
    ) -> None:
        """See `StreamKernels.norm_streams`."""
        out.copy_(norm_parts(streams[:, : weight.shape[0]], weight, count, eps).flatten(1) / count)

    def enter_streams(
        self,
        x: torch.Tensor,
        streams: torch.Tensor,
        spreads: bool,
        weight: torch.Tensor,
        count: int,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """See `StreamKernels.enter_streams`."""
        (self.spread_stream if spreads else self.inject_stream)(x, streams, count)
        self.norm_streams(streams, weight, count, eps, out)

    def mix_streams(
        self, x: torch.Tensor, gates: torch.Tensor, count: int, out: torch.Tensor, cleared: torch.Tensor | None = None
    ) -> None:
        """See `StreamKernels.mix_streams`."""
        out.copy_((torch.sigmoid(gates.float()) * x.float()).unflatten(1, (count, -1)).sum(1))
        if cleared is not None:
            cleared.zero_()

    def gate_grams(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        streams: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        count: int,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """See `StreamKernels.gate_grams`."""
        own = streams[:, : key.shape[1]]
        both = norm_parts(key.float(), norms[0], count, eps) * norm_parts(own, norms[1], count, eps)
        score = both.sum(-1) * value.shape[1] ** -0.5
        gate = torch.sigmoid(score.sign() * score.abs().clamp(min=LEAST_SCORE).sqrt())
        out.copy_((gate[..., None] * value.float()[:, None]).flatten(1))

    def add_grams(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        taps: torch.Tensor,
        sizes: tuple[int, int],
        eps: float,
        streams: torch.Tensor,
        tails: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        opened: torch.Tensor | None = None,
    ) -> None:
        """See `StreamKernels.add_grams`."""
        (count, apart), (wide, each), rows = sizes, taps.shape, x.shape[0]
        inputs, bounds = norm_parts(x, norm, count, eps).flatten(1), offsets.long()
        here = torch.arange(rows, device=x.device)
        of = (torch.searchsorted(bounds, here, right=True) - 1).clamp(0, slots.shape[0] - 1)
        places, first, reach = torch.where(slots < 0, -1 - slots, slots).long(), bounds[of], tails.shape[1]
        mixed = torch.zeros_like(inputs)
        for tap in range(each):
            at = here - (each - 1 - tap) * apart
            kept = tails[places[of], (reach + at - first).clamp(0, reach - 1)]
            mixed += torch.where((at >= first)[:, None], inputs[at.clamp(min=0)], kept) * taps[:, tap]
        streams[:, :wide].add_(x).add_(F.silu(mixed))
        _keep_tails(inputs, tails, places, slots < 0, bounds)
        if opened is not None:
            most = min(rows, opened.shape[0])
            opened[:most, :wide].copy_(inputs[:most])


def norm_parts(x: torch.Tensor, weight: torch.Tensor, count: int, eps: float) -> torch.Tensor:
    """[M, count, n]: each of so many equal parts of x [M, count n] as RMS-normalised, times its weights."""
    parts = x.unflatten(1, (count, -1))
    return parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps) * weight.view(count, -1)


def _keep_tails(
    inputs: torch.Tensor, tails: torch.Tensor, places: torch.Tensor, is_open: torch.Tensor, bounds: torch.Tensor
) -> None:
    """The last inputs of each sequence, but of those whose rows are open."""
    reach, before = tails.shape[1], tails[places]
    at = (bounds[1:] - bounds[:-1])[:, None] + torch.arange(
        reach, device=inputs.device
    )  # in tail and new ones in a row
    old = before.gather(1, at.clamp(max=reach - 1)[..., None].expand(-1, -1, inputs.shape[1]))
    new = inputs[(bounds[:-1, None] + at - reach).clamp(0, inputs.shape[0] - 1)]
    found = torch.where((at < reach)[..., None], old, new)
    tails.index_copy_(0, places, torch.where(is_open[:, None, None], before, found))
