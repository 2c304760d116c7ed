"""pshard-plan of a folder that holds several GGUF files: what each quantisation would do on this machine."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.commands.plan_flags import make_workloads
from pshard.errors import UserError
from pshard.jsonio import to_json
from pshard.machine import MachineProfile
from pshard.session.packed_models import Tell, use_packed
from pshard.session.planning_bar import planning_bar
from pshard.session.use_disk import assume_disk, limit_ram
from pshard.workload import Workload

if TYPE_CHECKING:
    from pshard.hub.repository import HubModel
    from pshard.models import ModelFile

_FOR_ONE = ("registry", "validate", "routing", "emit", "explain", "why", "steps", "write_lp", "sweep")


def see_machine(
    args: argparse.Namespace, file: "ModelFile", profile: MachineProfile, elsewhere: bool, tell: Tell, later: Tell
) -> tuple[MachineProfile, list[Workload]]:
    """The machine as a model's plans may use it, under --ram and with the timings of a disk where they may need it; and
    what plans are for. later: takes what is worth a line where a plan is made."""
    profile = replace(limit_ram(profile, args.ram), prompt_math=args.prompt_math)
    first, *_ = make_workloads(args, file.spec, profile)
    if not elsewhere:
        use_packed(file, args.disk_cache, False, tell)
    profile = assume_disk(file, profile, first, args.profile, elsewhere, tell, later)
    return profile, make_workloads(args, file.spec, profile)  # a disk may hold tables that memory need not


def ask_outlook(
    args: argparse.Namespace,
    profile: MachineProfile,
    elsewhere: bool,
    file: "ModelFile",
    tell: Tell = lambda _: None,
) -> tuple[MachineProfile, Workload]:
    """The machine as `see_machine` has it, and what the first plan is for."""
    machine, workloads = see_machine(args, file, profile, elsewhere, tell, tell)
    return machine, workloads[0]


def compare_folder(
    args: argparse.Namespace,
    folder: Path,
    models: Sequence["HubModel"],
    profile: MachineProfile,
    elsewhere: bool,
    tell: Tell,
) -> None:
    """Print an outlook for each model of the folder, and which one we would take. No plan is written.

    Raises UserError for flags that need one model.
    """
    from pshard.hub.compare_quants import choose_quant, compare_quants
    from pshard.hub.show_quants import print_quants

    files = {model.label: folder / model.files[0].name for model in models}
    for flag in _FOR_ONE:
        if getattr(args, flag, None):
            named = f"--{flag.replace('_', '-')}"
            raise UserError(
                f"{named} needs one model, and {folder} holds {len(files)}; give {next(iter(files.values()))}"
            )
    asked: list[Workload] = []
    tell_once = cache(tell)

    def ask(file: "ModelFile") -> tuple[MachineProfile, Workload]:
        nonlocal profile
        machine, workload = ask_outlook(args, profile, elsewhere, file, tell_once)
        profile = replace(profile, disks=machine.disks or profile.disks)  # what was timed for one is known for all
        asked.append(workload)
        return machine, workload

    outlooks = compare_quants(models, files, ask, {})
    with planning_bar(f"planning what {folder} has"):
        found = tuple(outlooks)
    if args.json:
        chosen, why = choose_quant(found)
        label = chosen.label if chosen else None
        print(json.dumps({"offered": to_json(found), "we_would_take": label, "because": why}, indent=1))
        return
    terms = asked[0].terms if asked else "none of them can be read"
    print_quants(
        (str(folder), ""),
        models,
        iter(found),
        terms,
        planning_bar,
        lambda label: f"Plan it: pshard plan {files[label]}",
    )
