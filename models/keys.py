"""Typed look-ups in the metadata of a model file: a missing or odd value is a UserError that names the key."""

import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from pshard.errors import UserError
from pshard.model_config import ModelConfig
from pshard.models.architectures import Architecture
from pshard.models.stored import ANOTHER

# What models' settings are within, with much room: beyond it angles and sums are no numbers any more.
ANY_REAL = (1e-30, 1e30)
BASES, FACTORS, EPSILONS = (2.0, 1e18), (1e-3, 1e6), (1e-15, 0.1)
LONGEST = 1 << 16  # of heads, and of latents


@dataclass(frozen=True)
class Keys:
    """Values by key with an optional prefix ("llama."); `where` names the file in errors."""

    values: dict[str, Any]
    where: str
    prefix: str = ""

    def get(self, key: str) -> Any:
        """The value, or None when the key is missing. A list of equal values, one for each layer, counts as one."""
        value = self.values.get(self.prefix + key)
        if isinstance(value, list) and value:
            layers = self.values.get(self.prefix + "block_count", self.values.get("num_hidden_layers"))
            if type(layers) is int and len(value) != layers:
                self.refuse(key, f"has {len(value)} values for {layers} layers")
            if any(v != value[0] for v in value):
                self.refuse(key, "differs from layer to layer, which is not supported yet")
            return value[0]
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, `least` (1 or 0) or above. Raises UserError when it is missing and there is no default."""
        value = self._present(key, default)
        if type(value) is not int or value < least:
            self.refuse(key, f"is {value!r}, not a whole number{' above 0' if least else ''}")
        return value

    def length(self, key: str, default: int | None = None) -> int:
        """How many numbers heads have, or some part of them. Raises UserError as `integer`, and for what no model has:
        angles of so many would take for ever before the shapes of tensors tell."""
        value = self.integer(key, default)
        if value > LONGEST:
            self.refuse(key, f"is {value}, where heads have a few hundred dimensions")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false. Raises UserError when it is missing and there is no default."""
        value = self._present(key, default)
        if type(value) is not bool:
            self.refuse(key, f"is {value!r}, not true or false")
        return value

    def real(self, key: str, default: float | None = None, span: tuple[float, float] = ANY_REAL) -> float:
        """A number above zero that is in a span. Raises UserError when it is missing and there is no default."""
        value = self._present(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            self.refuse(key, f"is {value!r}, not a number above 0")
        if not span[0] <= value <= span[1]:
            shown = f"{value:.4g}" if value <= sys.float_info.max else "beyond all use"
            self.refuse(key, f"is {shown}, where models have {span[0]:g} to {span[1]:g}")
        return float(value)

    def factor(self, key: str) -> float:
        """A factor or bound within FACTORS; 0, which stands for none as llama.cpp reads it, where there is none."""
        return 0.0 if self.get(key) in (None, 0) else self.real(key, span=FACTORS)

    def reals(self, key: str, span: tuple[float, float]) -> tuple[float, ...]:
        """A list of numbers in a span. Raises UserError when it is missing or something else."""
        found = self.values.get(self.prefix + key)
        values = found if isinstance(found, list) else []
        numbers = [v for v in values if type(v) in (int, float)]
        if not numbers or len(numbers) < len(values) or not all(span[0] <= v <= span[1] for v in numbers):
            self.refuse(key, f"is no list of numbers from {span[0]:g} to {span[1]:g}")
        return tuple(map(float, numbers))

    def refuse_unless(self, key: str, *harmless: Any) -> None:
        """Raise UserError when the key is there with another value than the harmless ones."""
        value = self.get(key)
        if value is not None and value not in harmless:
            self.refuse(key, f"is {value!r}, which is not supported yet")

    def kinds(self, key: str, *known: str) -> list[str] | None:
        """What a list says of each layer, one of those known; None when it is missing. Raises UserError for others."""
        found = self.values.get(self.prefix + key)
        if found is not None and not (isinstance(found, list) and all(kind in known for kind in found)):
            self.refuse(key, f"has others than {' and '.join(known)}")
        return found

    def refuse(self, key: str, what: str) -> NoReturn:
        """Raise a UserError that names file and key, and says what to do."""
        raise UserError(f"{self.where}: {self.prefix}{key} {what}; {ANOTHER}")

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            if default is None:
                self.refuse(key, "is missing")
            return default
        return value


def check_config(arch: Architecture, config: ModelConfig, where: str) -> ModelConfig:
    """The same config, when its numbers fit each other and the architecture. Raises UserError."""
    if config.n_heads % config.n_kv_heads and not config.layer_heads:
        what = f"{config.n_heads} query heads are not a multiple of {config.n_kv_heads} KV heads"
        raise UserError(f"{where}: {what}; {ANOTHER}")
    if config.head_dim % 2:
        raise UserError(f"{where}: a head dimension of {config.head_dim} cannot be rotated in pairs; {ANOTHER}")
    if config.latent and config.rope.dims != config.latent.rope:
        raise UserError(
            f"{where}: rotates {config.rope.dims} of the {config.latent.rope} numbers that are to be rotated; {ANOTHER}"
        )
    if not config.latent and config.rope.dims != config.head_dim:
        what = f"{where}: rotates {config.rope.dims} of {config.head_dim} dimensions per head"
        if arch.rotated == 1 and not arch.partial:
            raise UserError(f"{what}; partial rotary embeddings are not supported yet in this architecture; {ANOTHER}")
        if config.rope.dims % 2 or not 0 < config.rope.dims < config.head_dim:
            raise UserError(f"{what}, which are not pairs of them; {ANOTHER}")
    experts = config.experts
    if experts and experts.dense_layers >= config.n_layers:
        what = f"the first {experts.dense_layers} of {config.n_layers} layers have no experts"
        raise UserError(f"{where}: {what}, which leaves none with experts; {ANOTHER}")
    if experts and experts.every > config.n_layers:
        what = f"one of {experts.every} layers has experts, of {config.n_layers}: that leaves none"
        raise UserError(f"{where}: {what}; {ANOTHER}")
    for factors in (config.rope.freq_factors, config.rope.long_factors):
        if factors and len(factors) != config.rope.dims // 2:
            what = f"{len(factors)} RoPE frequency factors for {config.rope.dims // 2} pairs of dimensions"
            raise UserError(f"{where}: {what}; {ANOTHER}")
    if config.window and arch.window_every == 1 and not (arch.full_every or arch.windows or config.windows_in):
        window = f"a window of {config.sliding_window} tokens in a context of {config.context}"
        what = f"sliding-window attention ({window}) is not supported in this architecture"
        raise UserError(f"{where}: {what}; {ANOTHER}")
    return config
