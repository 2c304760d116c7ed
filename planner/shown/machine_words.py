"""What things are called: on a machine without a GPU there is no VRAM and no link."""

from dataclasses import dataclass

from pshard.machine import MachineProfile


@dataclass(frozen=True)
class Words:
    """`arena`: the memory that a budget is of. `lanes`: of `Prediction.busy` and `binds`, where they are called
    otherwise. `binds`: what limits a tier, in a few words."""

    arena: str
    lanes: dict[str, str]
    binds: dict[str, str]

    @property
    def has_gpu(self) -> bool:
        """Whether they are those of a machine with a GPU."""
        return self.arena == "VRAM"

    def say(self, text: str) -> str:
        """A text about a machine with a GPU, in words for this one."""
        return text if self.has_gpu else _without_gpu(text)


def _without_gpu(text: str) -> str:
    for word, instead in (
        ("VRAM", "the budget"),
        ("read over the link", "read in place"),
        ("over the link", "copied into the budget"),
        ("the accelerator's part", "the other part"),
    ):
        text = text.replace(word, instead)
    return text


WITH_GPU = Words(
    "VRAM",
    {},
    {
        "acc": "compute-bound on the accelerator",
        "cpu": "bound by the CPU",
        "link": "link-bound",
        "disk": "bound by reads from disk",
        "vram": "VRAM-bound: link and CPU are both busy",
    },
)
WITHOUT_GPU = Words(
    "the budget",
    {"link": "copies", "d2h": "copies back", "vram": "budget"},
    {
        "acc": "bound by computing in the budget",
        "cpu": "bound by computing beside the budget",
        "link": "bound by copies into the budget",
        "disk": "bound by reads from disk",
        "vram": "bound by the budget: copies and computing beside it are both busy",
    },
)


def words_for(profile: MachineProfile) -> Words:
    """Those that fit the machine."""
    return WITHOUT_GPU if profile.accelerators[0].kind == "cpu" else WITH_GPU
