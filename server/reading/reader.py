"""What it takes to read requests: the model's words, the tables of fields, the limits. No service, no connection."""

from typing import TYPE_CHECKING, Any

from pshard.server.api.faults import Fault
from pshard.server.api.limits import Limits
from pshard.server.api.openapi import request_tables
from pshard.server.text.prompts import Prompts
from pshard.server.text.token_words import TokenWords

if TYPE_CHECKING:
    from pshard.runtime.sampling import Sampling
    from pshard.server.snapshot import ServedModel


class Reader:
    """Can be pickled, for a process that reads large requests.

    Attributes: `model`, `limits`, `usual` (how tokens are drawn where a request does not say), `names` (of the model,
    the first one is told), `tables` (of fields, by path), `prompts`, `words`.
    """

    def __init__(self, model: "ServedModel", limits: Limits, usual: "Sampling", names: tuple[str, ...]) -> None:
        self.model, self.limits, self.usual, self.names = model, limits, usual, names
        self.tables = request_tables(limits, model.vocab)
        self.prompts, self.words = Prompts(model, limits.template_steps), TokenWords(model.tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, (self.model, self.limits, self.usual, self.names)

    def check_model(self, name: str) -> None:
        """Raises Fault 404 for the name of another model; none is this one."""
        if name and name not in self.names:
            told = f"there is no model {name[:100]!r} here; there is {self.model.name!r}"
            raise Fault(404, told, param="model", code="model_not_found")
