"""Flags of llama.cpp that people type out of habit: those that change nothing here, and those that the plan decides."""

from collections.abc import Callable, Container, Sequence

from pshard.errors import UserError

SWITCH = ("on", "off", "auto", "0", "1")  # what may follow a harmless flag

_MAPPED = "weights are copied out of the mapped file once, in the layout of the kernels"
_SLOTS = "texts share one cache, and equal beginnings are computed once"
_LOGS = "notes come on stderr, and --json and pshard plan --explain say more"
_ALWAYS = {
    ("-fa", "--flash-attn"): "attention is always computed in one pass over the cache",
    ("--mlock",): "weights stay in memory once they are loaded",
    ("--mmap", "--no-mmap", "-mmp", "-dio", "--direct-io", "-ndio", "--no-direct-io"): _MAPPED,
    ("--repack", "-nr", "--no-repack"): "weights always lie in the layout of the kernels",
    ("-cb", "--cont-batching", "-nocb", "--no-cont-batching"): "a server's steps always hold whatever runs",
    ("-kvu", "--kv-unified", "--swa-full", "--context-shift", "--no-context-shift"): _SLOTS,
    ("--metrics", "--props", "--slots", "--no-slots"): "a server always tells it",
    ("-v", "--verbose", "--log-verbose", "--log-colors", "--log-prefix", "--log-timestamps"): _LOGS,
    ("--op-offload", "--no-op-offload", "--no-host"): "the plan says where each operation runs",
    ("--offline",): "nothing is fetched that is here",
    ("--jinja", "--no-jinja"): "a chat template is always rendered as Jinja",
    ("--no-warmup", "--warmup"): "the first step needs no rehearsal",
    ("--no-display-prompt",): "the prompt is never repeated",
    ("--simple-io", "--color", "-co", "--log-disable", "--no-perf", "--perf"): "output follows the terminal",
}
_VALUED = {  # the same, with a value that follows
    ("-lv", "--verbosity", "--log-verbosity", "--log-file"): _LOGS,
    ("-dt", "--defrag-thold", "--cache-reuse", "-cram", "--cache-ram", "-ctxcp", "--ctx-checkpoints"): _SLOTS,
    ("--poll", "--poll-batch", "--prio", "--prio-batch"): "threads wait as it is fastest",
}
_PLANNED = "pshard decides this; use --vram"
_DECIDED = {
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): _PLANNED,
    ("-ot", "--override-tensor"): _PLANNED,
    ("-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn"): _PLANNED,
    ("-nkvo", "--no-kv-offload", "-kvo", "--kv-offload"): _PLANNED,
    ("-fit", "--fit", "-fitt", "--fit-target"): _PLANNED,
    ("-mg", "--main-gpu", "-dev", "--device"): "pshard takes the GPUs that it sees; set CUDA_VISIBLE_DEVICES",
    ("-t", "--threads", "-tb", "--threads-batch"): (
        "the profile knows how many threads are fastest here; `pshard profile -t N` sets another number"
    ),
}
HARMLESS = {flag: why for flags, why in (_ALWAYS | _VALUED).items() for flag in flags}
VALUED = {flag for flags in _VALUED for flag in flags}
DECIDED = {flag: why for flags, why in _DECIDED.items() for flag in flags}


def drop_harmless(
    words: Sequence[str], own: Container[str], say: Callable[[str], None] = lambda line: None
) -> list[str]:
    """The command line without flags that change nothing here; `say` hears one line for each.

    own: the flags that the command has itself, which stay. Raises UserError for a flag of something that the plan
    decides, by its name.
    """
    kept: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, _ = word.partition("=")
        if word == "--":
            return [*kept, word, *left]
        if flag not in own and flag in DECIDED:
            raise UserError(f"{flag}: {DECIDED[flag]}")
        if flag in own or flag not in HARMLESS:
            kept.append(word)
            continue
        if not equals and left and (flag in VALUED or left[0] in SWITCH):
            left.pop(0)
        say(f"note: {flag} changes nothing: {HARMLESS[flag]}")
    return kept
