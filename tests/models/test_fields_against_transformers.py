"""Keys of config.json with other values, without one, and of other families: logits of transformers, or a line.

Of random float32 folders as transformers saves them. What no class of a family names is tried all at once there: it
must change nothing, and so must each of it here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_engine
from folder_fields import (
    FOLDERS,
    VOCAB,
    Family,
    Keys,
    find_family,
    list_fields,
    list_missing,
    list_pairs,
    list_positions,
    save_folder,
    write_config,
)

from pshard.errors import UserError
from pshard.models import open_model
from pshard.models.architectures import find_hf_architecture
from pshard.models.families.text_part import take_text_settings
from pshard.models.hf_config import hf_config

pytest.importorskip("transformers")

PART = 16  # so much of the settings is tried, another part in each family: 1 tries all, which takes five minutes
IDS = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(100)]


def theirs(family: Family, config: Keys) -> tuple[Any, torch.Tensor] | None:
    """The model and its logits; None where transformers does not make one of such a config.json."""
    try:
        model = family.build(config)
        with torch.no_grad():
            logits = model(torch.tensor([IDS])).logits[0].double()
    except Exception:  # what it raises for settings that it does not take is of any kind
        return None
    return (model, logits) if logits.isfinite().all() else None


def ours(folder: Path) -> torch.Tensor:
    with open_engine(folder, context=128) as engine:
        return engine.forward(IDS, all_logits=True).double()


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of log-probabilities, in standard deviations."""
    return float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max() / expected.std())


def read(folder: Path) -> Any:
    with open_model(folder) as file:
        return file.spec.config, [unit.likeness for unit in file.spec.units]


def read_settings(config: Keys) -> Any:
    settings = take_text_settings(config)
    arch = find_hf_architecture(settings["model_type"], "config.json", settings.get("enable_moe_block") is True)
    return hf_config(arch.of_settings(settings), settings, "config.json")


class Compared:
    """A family's folder, and folders like it with other keys."""

    def __init__(self, family: Family, folder: Path, within: float) -> None:
        self.family, self.folder, self.within = family, folder, within
        self.model, self.logits = theirs(family, family.config) or pytest.fail("transformers does not take the folder")
        save_folder(folder, self.model, family.config)
        self.shapes = {name: values.shape for name, values in self.model.state_dict().items()}
        self.tied = family.text.get("tie_word_embeddings")
        self.read = read(folder)
        assert apart(ours(folder), self.logits) < within

    def differs(self, keys: Keys) -> bool:
        """Whether logits are others than transformers', of a folder with these keys that both take."""
        config = self.family.with_keys(keys)
        found = theirs(self.family, config)
        if found is None:
            return False
        model, expected = found
        shapes = {name: values.shape for name, values in model.state_dict().items()}
        alike = shapes == self.shapes and config.get("text_config", config).get("tie_word_embeddings") == self.tied
        folder = self.folder if alike else self.folder.parent / "other"
        if not alike:
            save_folder(folder, model, config)
        write_config(folder, config)
        try:
            same = alike and read(folder) == self.read
            got = self.logits if same else ours(folder)
        except UserError:
            return False
        return apart(got, expected) > self.within


@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_key_counts_as_transformers_reads_it_or_is_named(name: str, tmp_path: Path) -> None:
    family = find_family(name)
    within = 1e-3 if "gemma" in name or "hybrid" in name else 1e-4
    compared = Compared(family, tmp_path / "hf", within)
    fields = {key: values for key, values in list_fields(family.text).items() if family.text.get(key, "") not in values}
    named = {key for key in fields if family.reads(key)}
    known = [{key: value} for key, values in fields.items() if key in named for value in values]
    tried = (*known, *list_missing(family.text), *list_pairs(family.text), *list_positions(family.text))
    wrong = [keys for keys in tried[list(FOLDERS).index(name) % PART :: PART] if compared.differs(keys)]

    strange = {key: values[0] for key, values in fields.items() if key not in named}
    found = theirs(family, family.with_keys(strange))
    assert found and torch.equal(found[1], compared.logits)
    expected = read_settings(family.config)
    for key, value in strange.items():
        try:
            wrong += [{key: value}] if read_settings(family.with_keys({key: value})) != expected else []
        except UserError:
            continue
    assert not wrong
