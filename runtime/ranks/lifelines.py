"""Connections between the ranks of several hosts on which nothing is said: they end with a rank or its host.

A host answers the probes of the other's system whatever its processes do, so that one which is busy, or stopped, is not
taken for a dead one. A rank's beat (`watch.py`) says that of its process.
"""

import json
import select
import socket
import time
from dataclasses import dataclass

import torch.distributed as dist

from pshard.errors import UserError

PROBE_SECONDS = 1  # between probes of a silent connection
GONE_SECONDS = 3  # without an answer
PARTING_SECONDS = 2.0  # that a rank takes longer than another to say the same error of the user
GOODBYE = b"bye"
_NUMBER_BYTES = 4  # of the rank that connects


@dataclass(frozen=True)
class Dead:
    """A rank that is gone and what is known of it. `patience`: seconds that this rank has for an error of its own."""

    rank: int
    why: str
    patience: float = 0.0


class Lifelines:
    """A connection to each other rank, by its number."""

    def __init__(self, lines: dict[int, socket.socket]) -> None:
        self._lines = {_probe(line): rank for rank, line in lines.items()}

    def find_dead(self, seconds: float) -> Dead | None:
        """A rank that ended or whose host is gone; waits for so long."""
        if not self._lines:
            time.sleep(seconds)
            return None
        for line in select.select(list(self._lines), [], [], seconds)[0]:
            rank = self._lines.pop(line)
            try:
                said = line.recv(len(GOODBYE))
            except TimeoutError:
                return Dead(rank, f"its host has not answered for {GONE_SECONDS} s")
            except OSError as error:
                return Dead(rank, f"its connection broke ({error.strerror})")
            finally:
                line.close()
            if not said:
                return Dead(rank, "it ended without a word", PARTING_SECONDS)
        return None

    def close(self) -> None:
        """Say goodbye to all."""
        for line in self._lines:
            with line:
                try:
                    line.sendall(GOODBYE)
                except OSError:  # it is gone too
                    continue
        self._lines.clear()


def open_lifelines(store: dist.Store, rank: int, size: int, address: str | None, seconds: float) -> Lifelines | None:
    """Connect with all ranks, which call this too; None where one of them does not know its own address.

    address: of this host, as the others reach it. Raises UserError that names a rank that cannot be reached, or did not
    come within `seconds`.
    """
    if address is None:
        store.set(f"line/{rank}", "null")
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=size) as server:
        store.set(f"line/{rank}", json.dumps([address, server.getsockname()[1]]))
        places = [json.loads(store.get(f"line/{other}")) for other in range(size)]
        if None in places:
            return None
        lines = {other: _connect(rank, other, places[other], seconds) for other in range(rank)}
        end = time.monotonic() + seconds
        while missing := [other for other in range(rank + 1, size) if other not in lines]:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                line, _ = server.accept()
                line.settimeout(PARTING_SECONDS)
                other = int.from_bytes(line.recv(_NUMBER_BYTES, socket.MSG_WAITALL), "big")
            except OSError:
                if time.monotonic() > end:
                    raise UserError(
                        f"rank {missing[0]} cannot reach rank {rank} at {address}; let firewalls pass it"
                    ) from None
                continue  # some other program's connection
            if other in missing:
                lines[other] = line
            else:
                line.close()
    return Lifelines(lines)


def _connect(rank: int, other: int, place: tuple[str, int], seconds: float) -> socket.socket:
    try:
        line = socket.create_connection((place[0], place[1]), timeout=seconds)
        line.sendall(rank.to_bytes(_NUMBER_BYTES, "big"))
    except OSError as error:
        raise UserError(
            f"rank {rank} cannot reach rank {other} at {place[0]}, port {place[1]}: {error}; let firewalls pass it"
        ) from None
    return line


def _probe(line: socket.socket) -> socket.socket:
    """Have the system find out whether the other host is there."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; elsewhere the system's own times, and the rank's beat before
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * GONE_SECONDS)
    return line
