"""What files say about a gated delta net -> Delta: keys of GGUF metadata, and of config.json."""

from pshard.errors import UserError
from pshard.model_config import Delta
from pshard.models.architectures import Architecture
from pshard.models.keys import Keys
from pshard.models.stored import FETCH_AGAIN

MOST_LAYERS = 1 << 14
_KV_HEADS = "attention.head_count_kv"
KERNEL = 4  # inputs that the convolution sees: the kernels know no other number


def gguf_delta(arch: Architecture, keys: Keys, n_layers: int) -> Delta:
    """From metadata with the architecture's prefix. Raises UserError that names the key."""
    keys.refuse_unless("ssm.conv_kernel", KERNEL)
    key_heads, value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
    head = keys.integer("ssm.state_size")
    if keys.integer("ssm.inner_size") != value_heads * head:
        keys.refuse("ssm.inner_size", f"is {keys.get('ssm.inner_size')}, not {value_heads} value heads of {head}")
    _check_sections(keys)
    keys.refuse_unless("norm_top_k_prob", True)  # Ollama's word for it
    full = list_full(keys, n_layers, *name_recurrent(keys))
    tiled = keys.flag("ssm.v_head_reordered", arch.delta == "tiled")
    return _check(keys, Delta(key_heads, value_heads, head, tiled, full), "ssm.group_count")


def count_kv_heads(keys: Keys, n_heads: int) -> int:
    """KV heads of the layers with attention: Ollama's files count them by layer, 0 for one without."""
    counts = keys.values.get(f"{keys.prefix}{_KV_HEADS}")
    if not isinstance(counts, list):
        return keys.integer(_KV_HEADS, n_heads)
    numbers = {n for n in counts if type(n) is int and n > 0}
    if len(numbers) != 1 or not all(type(n) is int and n in (0, *numbers) for n in counts):
        keys.refuse(_KV_HEADS, "has others than 0 and one number of heads")
    return numbers.pop()


def name_recurrent(keys: Keys) -> tuple[str, object]:
    """Which key says of each layer whether it has no attention, and what; None where none does."""
    key = "attention.recurrent_layers"
    said, counts = keys.values.get(f"{keys.prefix}{key}"), keys.values.get(f"{keys.prefix}{_KV_HEADS}")
    if said is None and isinstance(counts, list) and 0 in counts:
        return _KV_HEADS, [n == 0 for n in counts]
    return key, said


def hf_delta(keys: Keys, n_layers: int) -> Delta:
    """From config.json, whose value heads stand by the key heads that they use. Raises UserError that names the key."""
    keys.refuse_unless("linear_conv_kernel_dim", KERNEL)
    keys.refuse_unless("attn_output_gate", True)
    head = keys.integer("linear_key_head_dim")
    keys.refuse_unless("linear_value_head_dim", head)
    kinds = keys.kinds("layer_types", "linear_attention", "full_attention")
    recurrent = None if kinds is None else [kind == "linear_attention" for kind in kinds]
    full = list_full(keys, n_layers, "layer_types", recurrent)
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


def check_layers(keys: Keys, n_layers: int) -> None:
    """Raise UserError for so many layers that listing them takes for ever, before the tensors tell."""
    if n_layers > MOST_LAYERS:
        raise UserError(
            f"{keys.where}: {n_layers} layers, where models have a few hundred: the file is damaged; {FETCH_AGAIN}"
        )


def list_full(keys: Keys, n_layers: int, key: str, recurrent: object) -> tuple[int, ...]:
    """The layers that have attention: those that `key` says are not recurrent, or else the last of every so many."""
    check_layers(keys, n_layers)
    if recurrent is None:
        every = keys.integer("full_attention_interval", 4)
        return tuple(i for i in range(n_layers) if (i + 1) % every == 0)
    drafting = keys.integer("nextn_predict_layers", 0, least=0) if keys.prefix else 0  # counted as layers there
    if not isinstance(recurrent, list) or len(recurrent) not in (n_layers, n_layers + drafting):
        keys.refuse(key, f"does not say of each of {n_layers} layers what it is")
    assert isinstance(recurrent, list)
    return tuple(i for i in range(n_layers) if not recurrent[i])


def _check(keys: Keys, delta: Delta, key: str) -> Delta:
    if delta.value_heads % delta.key_heads:
        keys.refuse(key, f"is {delta.key_heads}, which does not divide {delta.value_heads} value heads")
    return delta
