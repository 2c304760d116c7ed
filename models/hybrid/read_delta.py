"""What files say about a gated delta net -> Delta: keys of GGUF metadata, and of config.json."""

from pshard.errors import UserError
from pshard.model_config import Delta
from pshard.models.architectures import Architecture
from pshard.models.keys import Keys
from pshard.models.stored import FETCH_AGAIN

MOST_LAYERS = 1 << 14
KERNEL = 4  # inputs that the convolution sees: the kernels know no other number


def gguf_delta(arch: Architecture, keys: Keys, n_layers: int) -> Delta:
    """From metadata with the architecture's prefix. Raises UserError that names the key."""
    keys.refuse_unless("ssm.conv_kernel", KERNEL)
    key_heads, value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    head = keys.integer("ssm.state_size")
    if keys.integer("ssm.inner_size") != value_heads * head:
        keys.refuse("ssm.inner_size", f"is {keys.get('ssm.inner_size')}, not {value_heads} value heads of {head}")
    _check_sections(keys)
    full = _list_full(keys, n_layers, keys.values.get(f"{keys.prefix}attention.recurrent_layers"))
    return _check(keys, Delta(key_heads, value_heads, head, arch.delta == "tiled", full), "ssm.group_count")


def hf_delta(keys: Keys, n_layers: int) -> Delta:
    """From config.json, whose value heads stand by the key heads that they use. Raises UserError that names the key."""
    keys.refuse_unless("linear_conv_kernel_dim", KERNEL)
    keys.refuse_unless("attn_output_gate", True)
    head = keys.integer("linear_key_head_dim")
    keys.refuse_unless("linear_value_head_dim", head)
    kinds = keys.values.get("layer_types")
    recurrent = None
    if kinds is not None:
        if not isinstance(kinds, list) or not set(kinds) <= {"linear_attention", "full_attention"}:
            keys.refuse("layer_types", "has others than linear_attention and full_attention")
        recurrent = [kind == "linear_attention" for kind in kinds]
    full = _list_full(keys, n_layers, recurrent)
    heads = keys.integer("linear_num_key_heads"), keys.integer("linear_num_value_heads")
    return _check(keys, Delta(*heads, head, False, full), "linear_num_key_heads")


def _check_sections(keys: Keys) -> None:
    """Parts of a position in time and in a picture: of text all are equal, and so the pairs turn as others do."""
    sections = keys.values.get(f"{keys.prefix}rope.dimension_sections")
    if sections is None:
        return
    pairs = keys.integer("rope.dimension_count") // 2
    if not isinstance(sections, list) or sum(n for n in sections if isinstance(n, int)) != pairs:
        total = sum(sections) if isinstance(sections, list) else sections
        keys.refuse("rope.dimension_sections", f"has {total} pairs, not the {pairs} that are rotated")


def _list_full(keys: Keys, n_layers: int, recurrent: object) -> tuple[int, ...]:
    """The layers that have attention: those that are said not to be recurrent, or else the last of every so many."""
    if n_layers > MOST_LAYERS:  # else listing them takes for ever, before the tensors tell
        raise UserError(
            f"{keys.where}: {n_layers} layers, where models have a few hundred: the file is damaged; {FETCH_AGAIN}"
        )
    if recurrent is None:
        every = keys.integer("full_attention_interval", 4)
        return tuple(i for i in range(n_layers) if (i + 1) % every == 0)
    if not isinstance(recurrent, list) or len(recurrent) < n_layers:
        keys.refuse("layer_types", f"does not say of each of {n_layers} layers what it is")
    assert isinstance(recurrent, list)
    return tuple(i for i in range(n_layers) if not recurrent[i])


def _check(keys: Keys, delta: Delta, key: str) -> Delta:
    if delta.value_heads % delta.key_heads:
        keys.refuse(key, f"is {delta.key_heads}, which does not divide {delta.value_heads} value heads")
    return delta
