"""Budgets of a server that runs: plans that were made meanwhile, and those that it has made itself."""

import shlex
import threading
from dataclasses import replace

import pytest
from cli_world import World, make_world

from pshard.commands import cli_plan
from pshard.errors import UserError
from pshard.server.life.how_to_run import HowToRun
from pshard.server.life.load_model import ModelLoader, find_budgets, share_budget
from pshard.server.life.plan_beside import plan_beside
from pshard.session.open_plan import open_plan
from pshard.session.run_request import RunRequest


@pytest.fixture
def world(tmp_path) -> World:
    return make_world(tmp_path)


@pytest.fixture
def loader(world: World) -> ModelLoader:
    request = RunRequest(
        world.model, (world.roomy,), context=128, sequences=2, type_k="f32", type_v="f32", concurrency=2, plans=True
    )
    return ModelLoader(open_plan(request), replace(request, plans=False), HowToRun(), 1.0)


def never() -> bool:
    return False


def test_a_plan_that_was_made_after_the_start_is_found_by_the_command_that_is_named(world, loader) -> None:
    assert loader.budgets == (world.roomy,)
    with pytest.raises(UserError, match=f"no plan has a budget of {world.budget} MiB; there are {world.roomy}") as told:
        loader.look_again(world.budget, False, never)
    command = str(told.value).partition("run: ")[2]
    program, *words = shlex.split(command)
    assert program == "pshard-plan" and str(world.model) in words
    assert cli_plan.main(words) == 0
    assert loader.budgets == (world.roomy,)
    loader.look_again(world.budget, False, never)
    assert loader.budgets == (world.budget, world.roomy)


def test_plans_for_more_host_memory_than_the_server_may_take_are_not_moved_to(world, loader) -> None:
    """A server under --ram was offered a plan that was made without it."""
    with pytest.raises(UserError) as told:
        loader.look_again(world.budget, False, never)
    words = shlex.split(str(told.value).partition("run: ")[2])[1:]
    limited = replace(loader._request, ram_mib=2048)
    below = ModelLoader(open_plan(replace(limited, plans=True)), limited, HowToRun(), 1.0)
    for ram, found in ((0, False), (4096, False), (1024, True)):
        assert cli_plan.main([*words, *(["--ram", str(ram)] * (ram > 0))]) == 0
        assert (world.budget in find_budgets(below._opened)) == found
    assert loader.budgets == (world.roomy,)


def test_what_each_budget_promises_is_told_with_the_plan(world, loader) -> None:
    loader.look_again(1, True, never)
    machine = loader.load(None)
    rates = machine.facts.shown.rates
    machine.close()
    assert tuple(rate.vram_mib for rate in rates) == loader.budgets == (1, world.roomy)
    assert rates[0].answer < rates[1].answer and rates[0].first > rates[1].first > 0  # more VRAM is faster


@pytest.mark.parametrize("budget", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_plan_is_made_when_it_is_asked_for(world, loader, budget) -> None:
    loader.look_again(budget, True, never)
    assert loader.budgets == (budget, world.roomy)


def test_a_plan_that_cannot_be_made_is_told_with_its_reason(world, loader) -> None:
    with pytest.raises(UserError, match=r"no plan could be made: .*MiB.*; run: pshard-plan"):
        loader.look_again(10_000_000, True, never)
    assert loader.budgets == (world.roomy,)


def test_planning_ends_with_the_server(world) -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(UserError, match="the server stops"):
        plan_beside(f"pshard-plan -m {shlex.quote(str(world.model))} --vram {world.budget}", stopped.is_set)


def test_a_budget_is_shared_out_as_the_one_before() -> None:
    assert share_budget(100, (30, 10)) == (75, 25) and share_budget(7, (5,)) == (7,)
    assert sum(share_budget(101, (1, 1, 1))) == 101
