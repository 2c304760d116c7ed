"""What a repository of the Hub offers: its files, sorted into models that can be fetched by themselves."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pshard.errors import UserError
from pshard.hub.tell_errors import tell_errors

USUAL = ("Q4_K_M", "Q4_0", "MXFP4", "Q8_0")  # what a repository's name alone stands for: the first of these it has
HEAD = "mtp-"  # what the names of files begin with that have a multi-token head alone
FOLDER = "safetensors"  # the label of a model that is a folder
LISTING_SECONDS = 10.0
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_LABEL = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d|TQ\d|BF16|F16|F32|FP16|FP32|MXFP4|NVFP4)(?:_\w+)?)(?=$|[-./])", re.IGNORECASE
)
_ASIDE = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix|mtp|draft|vocab)(?=$|[-._/])", re.IGNORECASE)  # no models
_TEXTS = re.compile(r"(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.json")
_SHARDS = re.compile(r"model(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. name: its path there. sha256: of its bytes; "" for small files, of which the Hub says
    none. etag: what the Hub's cache calls it."""

    name: str
    nbytes: int
    etag: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class HubModel:
    """A model of a repository: one GGUF file, all parts of one, or the files of a safetensors folder. head: the file
    that has its multi-token head alone."""

    label: str
    files: tuple[HubFile, ...]
    head: HubFile | None = None

    @property
    def fetched(self) -> tuple[HubFile, ...]:
        """All that is fetched, the head first: where the cache has the model, it has that too."""
        return (self.head, *self.files) if self.head else self.files

    @property
    def nbytes(self) -> int:
        """Bytes of the model's files; its head is beside them."""
        return sum(file.nbytes for file in self.files)

    @property
    def is_folder(self) -> bool:
        """Whether the model is opened by its folder and not by its first file."""
        return self.label == FOLDER


@dataclass(frozen=True)
class Repository:
    """A repository at one commit, with its models from small to large."""

    name: str
    commit: str
    models: tuple[HubModel, ...]


def list_repository(name: str) -> Repository:
    """Ask the Hub what a repository has. Raises UserError: no such repository, gated, offline, nothing to run."""
    with tell_errors(name):
        from huggingface_hub import HfApi

        info = HfApi().model_info(name, files_metadata=True, timeout=LISTING_SECONDS)
    files = [
        HubFile(s.rfilename, s.size or 0, (s.lfs.sha256 if s.lfs else s.blob_id) or "", s.lfs.sha256 if s.lfs else "")
        for s in info.siblings or ()
    ]
    models = sort_files(files)
    if not models:
        raise UserError(
            f"{name} has neither GGUF files nor model.safetensors with a config.json; look for a repository that has, "
            "often one with GGUF in its name"
        )
    return Repository(name, info.sha or "main", models)


def sort_files(files: Iterable[HubFile]) -> tuple[HubModel, ...]:
    """The models among a repository's files, from small to large; a split one only if all of its parts are there.

    Models of one label have their files' names as labels: `Q4_K_M` would leave open which is meant.
    """
    files = list(files)
    groups: dict[str, list[HubFile]] = {}
    for file in files:
        stem, dot, suffix = file.name.rpartition(".")
        if suffix.lower() == "gguf" and dot and not _ASIDE.search(stem):
            part = _PART.fullmatch(stem)
            groups.setdefault(f"{part[1]}-of-{part[3]}" if part else stem, []).append(file)
    found = [(_label(parts[0].name), tuple(sorted(parts, key=lambda f: f.name))) for parts in groups.values()]
    found = [(label, parts) for label, parts in found if _is_whole(parts)]
    labels = [label for label, _ in found]
    models = [
        HubModel(
            label if label and labels.count(label) == 1 else parts[0].name, parts, _find_head(files, parts[0].name)
        )
        for label, parts in found
    ]
    if not models:
        models = _find_folder(files)
    return tuple(sorted(models, key=lambda model: (model.nbytes, model.label)))


def _find_head(files: Iterable[HubFile], model: str) -> HubFile | None:
    """The file that has a model's head alone, by the rule by which it is opened: `mtp-` before the model's name, or the
    only such file of its folder."""
    folder, slash, name = model.rpartition("/")
    heads = [f for f in files if is_head(f.name) and f.name.rpartition("/")[0] == folder]
    named = [f for f in heads if f.name == f"{folder}{slash}{HEAD}{name}"] or heads
    return named[0] if len(named) == 1 else None


def is_head(name: str) -> bool:
    """Whether a file has a multi-token head alone, by its path."""
    base = name.rpartition("/")[2]
    return base.startswith(HEAD) and base.endswith(".gguf")


def _is_whole(parts: tuple[HubFile, ...]) -> bool:
    match = _PART.fullmatch(parts[0].name.rpartition(".")[0])
    return not match or len(parts) == int(match[3])


def _label(name: str) -> str:
    """The quantisation that a file's name ends with, or else its folder's; "" when neither says one."""
    stem = name.rpartition(".")[0]
    part = _PART.fullmatch(stem)
    folder, _, base = (part[1] if part else stem).rpartition("/")
    for text in (base, folder):
        labels = _LABEL.findall(text)
        if labels:
            return labels[-1].upper()
    return ""


def _find_folder(files: list[HubFile]) -> list[HubModel]:
    """The model of a repository of safetensors files: those that a folder of it needs."""
    wanted = [f for f in files if _TEXTS.fullmatch(f.name) or _SHARDS.fullmatch(f.name) or f.name.endswith(".jinja")]
    has_weights = any(f.name.endswith(".safetensors") for f in wanted)
    if not has_weights or not any(f.name == "config.json" for f in wanted):
        return []
    own = (f for f in wanted if "/" not in f.name)
    # weights last: where they lie whole in the cache, all else does
    return [HubModel(FOLDER, tuple(sorted(own, key=lambda f: (f.name.endswith(".safetensors"), f.name))))]


def pick_model(name: str, models: tuple[HubModel, ...], wanted: str) -> HubModel:
    """The model that a user means by a quantisation, a file's name, or nothing. Raises UserError that lists what there
    is."""
    asked = wanted.upper()
    for model in models:
        names = {file.name.upper() for file in model.files}
        if asked and (asked == model.label.upper() or asked in names or f"{asked}.GGUF" in names):
            return model
    if not wanted and len(models) == 1:
        return models[0]
    by_label = {model.label: model for model in models}
    usual = next((label for label in USUAL if label in by_label), None)
    if not wanted and usual:
        return by_label[usual]
    there = ", ".join(by_label)
    what = f"has no {wanted}" if wanted else "has several models"
    raise UserError(f"{name} {what}; choose one of its models with {name}:NAME, where NAME is one of {there}")
