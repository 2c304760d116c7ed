"""Ports: what units take and leave of the activations that pass between them, by name. No torch.

A model is a program: units in order of execution, each with ports. A port that lies between two units is a buffer of
the same name on either side, and its rows are handed over as they are where these units run on different sides.
"""

from dataclasses import dataclass

IDS, LOGITS = "ids", "logits"  # what goes into a program, and what comes out
HIDDEN = "hidden"  # the residual stream, float32 [M, d_model]
# float32 [M, d_model]: what a parallel layer's units take, the residual stream as normalised; or the stream as a layer
# began with it, where its router takes that: see `Experts.early`
ENTERED = "entered"
ROUTED = "routed"  # what a router leaves to its layer's experts (pshard/units/moe/routed.py)
PRIOR = "prior"  # the state before each token, float32 [M, d_model], where whoever runs a head has put it
DENSE, EXPERTED = "dense", "experted"  # what an FFN and the experts beside it give, float32 [M, d_model]: see BLEND
# what layers take of their tokens' own rows, float32 [M, rows_width]
LAYERED = "layered"
SQUARES = "squares"  # sums of the squares of a rank's q and of its k, float32 [M, 2]
# of a model with several residual streams these, side by side, and behind them which share of a block's result each is
# given, float32 [M, streams_width]; then `hidden` is what blocks add up between two mixes
STREAMS = "streams"
SUMMED = (DENSE, EXPERTED)  # of which ranks sum their parts as a unit has left them there
AS_WIDE = (ENTERED, DENSE, EXPERTED)  # as the residual stream
# those that stand beside the residual stream until a unit of a later layer writes them anew
BESIDE = (*AS_WIDE, ROUTED, LAYERED, SQUARES, STREAMS)


@dataclass(frozen=True)
class Ports:
    """What a unit reads, what it writes, and whether it adds to the residual stream.

    Ranks sum their parts of what is added; what several units add without that one of them reads it between, is summed
    at once: see `goes_on`. between: a port of a unit's own, of which it needs the sum over the ranks halfway.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    adds: bool = False
    between: str = ""


LOOKS_UP = Ports((IDS,), (HIDDEN,))
LOOKS_UP_ROWS = Ports((IDS,), (LAYERED,))
MIXES_ROWS = Ports((HIDDEN, LAYERED), (LAYERED,))
# every rank adds all of it to its own residual stream: nothing is summed
TAKES_ROWS = Ports((HIDDEN, LAYERED), (HIDDEN,))
MAPS = Ports((HIDDEN,), (HIDDEN,))  # likewise
ADDS = Ports((HIDDEN,), adds=True)
NORMS_WIDE = Ports((HIDDEN,), adds=True, between=SQUARES)  # attention whose q and k are normalised over all heads
ENTERS = Ports((HIDDEN,), (ENTERED,), adds=True)  # the first unit of a parallel layer, which normalises for all
FOLLOWS = Ports((ENTERED,), adds=True)  # the others
# of several streams: the first mix makes them of the embedding, others add to them what blocks have given, but for one
# before which a layer's n-grams have done so, and the last one leaves what the output takes
SPREADS = Ports((HIDDEN,), (STREAMS, ENTERED, HIDDEN))
MIXES = Ports((HIDDEN, STREAMS), (STREAMS, ENTERED, HIDDEN))
MIXES_ON = Ports((STREAMS,), (STREAMS, ENTERED, HIDDEN))
MIXES_LAST = Ports((HIDDEN, STREAMS), (STREAMS, HIDDEN))
SPREADS_GRAMS = Ports((HIDDEN, LAYERED), (STREAMS,))
ADDS_GRAMS = Ports((HIDDEN, STREAMS, LAYERED), (STREAMS,))
ROUTES = Ports((HIDDEN,), (ROUTED,))
SCORES_EARLY = Ports((HIDDEN, ENTERED), (ROUTED,))  # routers that take some, or all, of what their layer began with
TAKES_EARLY = Ports((ENTERED,), (ROUTED,))
IS_ROUTED = Ports((ROUTED,), adds=True)
# One hand-off to the CPU takes less than two: so the first of these that it computes takes what the next one needs, and
# only an accelerator blends.
GIVES_DENSE = Ports((HIDDEN, ROUTED), (DENSE,))
GIVES_EXPERTED = Ports((ROUTED, DENSE), (EXPERTED,))
GIVES_SUM = Ports((ROUTED,), (EXPERTED,))  # of experts that others follow, see CHUNKS
FOLLOWS_SUM = Ports((HIDDEN, ROUTED, EXPERTED), (HIDDEN,))  # as of TAKES_ROWS
BLENDS = Ports((HIDDEN, DENSE, EXPERTED), (HIDDEN,))  # as of TAKES_ROWS
GIVES_LOGITS = Ports((HIDDEN,), (LOGITS,))
