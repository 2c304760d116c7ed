"""A server from its start to its end."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import StepFailed, UserError
from pshard.server.life.how_to_run import HowToRun
from pshard.server.life.late_app import LateApp, PreparedApp
from pshard.server.life.web_server import LEAVE_SECONDS, WebServer, open_port
from pshard.server.scheduling.promises import Promises
from pshard.server.snapshot import ServedModel, Snapshot
from pshard.session.run_request import RunRequest

if TYPE_CHECKING:
    from pshard.server.jobs import Service
    from pshard.server.thread.engine_thread import EngineThread
    from pshard.session.open_plan import Opened

MakeApp = Callable[["Service", ServedModel], PreparedApp]


@dataclass(frozen=True)
class ServeRequest:
    """What is to be served, where, and under which promises.

    name: of the model, as clients name it; None: the file's. drain: seconds that requests have to end when the server
    stops. sleep_idle: seconds without a request after which VRAM is given back; None: never.
    """

    run: RunRequest
    host: str = "127.0.0.1"
    port: int = 8080
    name: str | None = None
    drain: float = 30.0
    sleep_idle: float | None = None
    promises: Promises = field(default_factory=Promises)
    how: HowToRun = field(default_factory=HowToRun)


def serve_model(request: ServeRequest, make_app: MakeApp) -> int:
    """Serve until a signal comes; returns the exit code. Listens at once and says 503 until the model is loaded.

    Raises UserError for a port that is taken, and for a model or plan that is not there; StepFailed when the engine
    failed too often.
    """
    with open_port(request.host, request.port) as listener:
        host, port = listener.getsockname()[:2]
        life = _Life(request, make_app, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        life.starter.start()
        life.web.run(sockets=[listener])
    life.finish()
    if isinstance(life.error, UserError):
        raise life.error
    if life.error is not None:
        raise StepFailed(str(life.error)) from life.error
    return 0


class _Life:
    """The parts of a running server. The starter plans on a thread of its own, then the engine's thread loads and
    runs. What takes seconds to import is imported there, when the port is open already."""

    def __init__(self, request: ServeRequest, make_app: MakeApp, url: str) -> None:
        self._request, self._make_app, self._url = request, make_app, url
        self.error: BaseException | None = None
        self._app = LateApp()
        self.web = WebServer(self._app, request.drain, self._stop_jobs)
        self.starter = threading.Thread(target=self._start, name="starter", daemon=True)
        self._engine: EngineThread | None = None
        self._stopped = threading.Event()
        self._told = False

    def _start(self) -> None:
        try:
            from pshard.server.life.load_model import ModelLoader
            from pshard.server.thread.engine_thread import EngineThread

            opened, run = _open(self._request.run)
            if self._stopped.is_set():
                return
            loader = ModelLoader(opened, run, self._request.how, self._request.promises.gap)
            self._engine = EngineThread(
                loader, self._request.promises, self._request.sleep_idle, self._tell_state
            )  # fmt: skip
            app = self._make_app(self._engine, describe_model(opened, run.model, self._request.name))
            prepared = threading.Thread(target=app.prepare, name="prepare", daemon=True)
            prepared.start()  # while the weights are read
            self._app.inner = app
            self._engine.start(prepared.join)
            if self._stopped.is_set():  # meanwhile
                self._engine.drain(0.0)
        except BaseException as error:
            self.error = error
            self.web.stop()

    def _tell_state(self, now: Snapshot) -> None:
        """A line on what the server is at, for whoever started it."""
        if now.state == "ready" and now.plan is not None:
            word = "ready" if not self._told else "ready again"
            self._told = True
            _say(f"{word}: {self._url} serves {now.plan.sequences} texts at once under {now.plan.way}")
            if now.plan.drafts:
                _say(f"drafts: up to {now.plan.drafts} a step of {now.plan.drafter}, where they pay")
            if now.plan.promise:
                from pshard.planner.serving.show_promise import describe_promise  # with what plans take to import

                _say(describe_promise(now.plan.promise))
            for note in now.plan.notes if word == "ready" else ():
                _say(f"note: {note}")
        elif now.state == "failed":
            self.error = self._engine.error if self._engine else None
            self.web.stop()
        elif self._told:
            _say(f"{now.state}: {now.reason}")

    def _stop_jobs(self) -> None:
        """Running requests have some seconds."""
        self._stopped.set()
        if self._engine is not None:
            self._engine.drain(self._request.drain)

    def finish(self) -> None:
        """Wait for the threads; a process in which one hangs in the loading of a model ends without them."""
        self.starter.join(LEAVE_SECONDS)
        if self._engine is not None:
            self._engine.drain(0.0)  # nobody is left who waits
        ended = not self.starter.is_alive() and (self._engine is None or self._engine.join(LEAVE_SECONDS))
        if not ended:
            _say("the server ends while a model is being loaded")
            sys.stderr.flush()
            os._exit(0)


def _open(request: RunRequest) -> "tuple[Opened, RunRequest]":
    """The model and its plan, which is made where there is none."""
    from pshard.session.open_plan import open_plan, settle_plan
    from pshard.session.readiness.first_profile import ensure_profile

    request = ensure_profile(request, _say)
    request, _ = settle_plan(request)
    return open_plan(request), request


def describe_model(opened: "Opened", path: Path, name: str | None) -> ServedModel:
    """The model of that file or folder as clients see it."""
    from pshard.units.kv_cells import longest_sequence

    spec = opened.file.spec
    weights = spec.count_weights()
    try:
        tokenizer = opened.file.tokenizer()
    except UserError as error:
        tokenizer = None  # token ids are served all the same
        _say(f"no texts can be asked for, token ids only: {error}")
    return ServedModel(
        name=name or name_of(path),
        created=int(time.time()),
        context=longest_sequence(spec.config, opened.variant.workload.context),
        trained=spec.config.context,
        vocab=spec.config.vocab,
        tokenizer=tokenizer,
        template=opened.file.chat_template,
        file=path.name,
        nbytes=spec.packed_nbytes,
        family=str(opened.file.metadata.get("general.architecture") or opened.file.metadata.get("model_type") or ""),
        weights=weights.total(),
        quant=weights.most_common(1)[0][0],
    )


def name_of(path: Path) -> str:
    """What a model is called by its file or folder: what the file says of itself may have spaces, and nobody types it.
    Of a file in parts, the name of all of them."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.absolute().name)


def _say(line: str) -> None:
    """A line for whoever started the server."""
    print(line, file=sys.stderr, flush=True)
