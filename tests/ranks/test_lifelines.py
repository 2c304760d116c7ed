"""Connections between ranks: who leaves with a word, who without, and who never came."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from pshard.errors import UserError
from pshard.runtime.ranks.lifelines import Lifelines, open_lifelines


def connect(size: int, unknown: int | None = None) -> list[Any]:
    """The lifelines of so many ranks, which are threads; the address of one may be unknown."""
    store, made = dist.HashStore(), dict[int, Lifelines | None]()

    def join(rank: int) -> None:
        made[rank] = open_lifelines(store, rank, size, None if rank == unknown else "127.0.0.1", 20.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [made[rank] for rank in range(size)]


def test_a_rank_that_ends_without_a_word_is_named_to_all_and_one_that_says_goodbye_is_not() -> None:
    lines = connect(4)
    lines[3].close()
    assert [lines[rank].find_dead(0.5) for rank in range(3)] == [None, None, None]
    for line in list(lines[1]._lines):  # as the system does when a process ends
        line.close()
    for rank in (0, 2):
        dead = lines[rank].find_dead(5.0)
        assert dead is not None and (dead.rank, dead.why) == (1, "it ended without a word")
        assert dead.patience > 0  # it may have had a reason that this rank is about to find too
        assert lines[rank].find_dead(0.05) is None  # once
        lines[rank].close()


def test_a_rank_that_does_not_connect_is_named() -> None:
    with pytest.raises(UserError, match="rank 1 cannot reach rank 0"):
        store = dist.HashStore()
        store.set("line/1", '["127.0.0.1", 9]')
        open_lifelines(store, 0, 2, "127.0.0.1", 0.2)
    store = dist.HashStore()
    store.set("line/0", '["127.0.0.1", 9]')
    with pytest.raises(UserError, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1, port 9"):
        open_lifelines(store, 1, 2, "127.0.0.1", 5.0)


def test_ranks_of_which_one_does_not_know_its_address_do_without() -> None:
    assert connect(3, unknown=1) == [None, None, None]
