"""Several replicas at one address, by Ray Serve: each is the application of `specdec serve` in a process of its own.

    python examples/ray_serve.py                                      two replicas of the bundled pair, on this machine
    python examples/ray_serve.py --router prefix                      a request goes where its prefix is cached
    python examples/ray_serve.py --replicas 4 --gpus 1 --target DIR --drafter DIR
    python examples/ray_serve.py --tensor-parallel 2 --target DIR     two GPUs a replica, which share it
    python examples/ray_serve.py --replicas 16 --front-ends 4 --address auto --host 0.0.0.0    on a cluster that runs

Takes every option of `specdec serve`, for each replica. Ray starts the replicas, replaces one that fails its health
check, and chooses one for each request; the header X-Replica of an answer names it.
Needs the extras: specdec-runtime[serve,ray].
"""

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import typer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.cli.actions.run_server import load_served, prepare_process, serve_settings
from specdec.cli.command import command
from specdec.cli.commands import ServeOptions
from specdec.cli.config_file import PREFIX
from specdec.errors import ConfigError
from specdec.serving.application import create_app
from specdec.serving.http.events import event
from specdec.serving.http.faults import error_body
from specdec.serving.http.probes import why_not_alive
from specdec.serving.server_settings import ServeSettings
from specdec.settings.declared_fields import option

PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
"""Ray's own, by the name that needs no vLLM: `ray.serve.llm.request_router` exports it, and imports vLLM first."""
ROUTED_CHARS = 4_000_000
"""Characters of recent prompts that this router remembers per replica."""
MAX_LOST = 3
"""Replicas that a request is sent to, each after the one before was lost, until its client gets an error."""
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)
"""Entries of a request's ASGI scope that can be sent to another process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions(ServeOptions):
    """Several replicas of specdec serve, under Ray Serve."""

    replicas: int = option(2, "Engines, each in a process of its own.", min=1)
    router: Literal["load", "prefix"] = option(
        "load", "load: to the less busy of two random replicas; prefix: where most of its prompt was sent before."
    )
    front_ends: int = option(1, "Processes that forward requests and answers.", min=1)
    cpus: float = option(1.0, "Cores of a replica.", min=0)
    gpus: float | None = option(None, "GPUs of a replica; default: those that share the target, or none.", min=0)
    address: str | None = option(None, "Address of a Ray cluster, or 'auto'; default: start one on this machine.")


class Replica:
    """One engine and its application; Ray makes it in a process of its own, which sees only the GPUs of the replica."""

    def __init__(self, options: ServeOptions, settings: ServeSettings) -> None:
        from ray.serve import get_replica_context

        prepare_process(options)
        self.engine, self.settings = load_served(options, settings)
        self.app = create_app(self.engine, self.settings)
        self.name = get_replica_context().replica_id.unique_id

    async def answer(self, *routed_by: Any, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Yield the application's messages to the client. Cancelling this ends the request, as a disconnect would."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        unread = [body]

        async def receive() -> Message:
            if not unread:
                await asyncio.Future()  # the client stays, or this is cancelled
            return {"type": "http.request", "body": unread.pop()}

        async def serve() -> None:
            try:
                await self.app(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        serving = asyncio.create_task(serve())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)["X-Replica"] = self.name
                yield message
            await serving  # raises what it raised
        finally:
            serving.cancel()

    async def metrics(self) -> tuple[str, str]:
        """The replica's name, and its figures as Prometheus reads them."""
        return self.name, (await self.app.state.metrics.text()).decode()

    def check_health(self) -> None:
        """Ray asks every few seconds; a replica that raises is replaced."""
        trouble = why_not_alive(self.engine, self.settings.liveness_seconds) or self.engine.trouble
        if trouble:
            raise RuntimeError(trouble)

    async def __del__(self) -> None:
        await self.engine.close()
        self.engine.engine.close()


class FrontEnd:
    """Forwards each request to the replica that Ray's router chooses, and the answer to the client.

    If the replica is lost before the answer began, another one gets the request: all give the same answer.
    """

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self.replicas = replicas
        self.max_body_bytes = max_body_bytes

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(routes=[Route("/metrics", self.read_metrics), Mount("/", self.relay)])

    async def read_metrics(self, request: Request) -> Response:
        figures = await self.replicas.broadcast("metrics").results_async()
        return Response(merged_metrics(figures), media_type=CONTENT_TYPE_LATEST)

    async def relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        from ray.exceptions import RayActorError

        body = b""
        more = True
        while more and len(body) <= self.max_body_bytes:  # the replica refuses a longer one
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            body += part.get("body", b"")
            more = part.get("more_body", False)
        text = routed_text(body)
        routed_by = [SimpleNamespace(prompt=text)] if text else []  # without a text the router chooses by load
        told = {name: scope[name] for name in SCOPE if name in scope}
        started: Message | None = None
        for _ in range(MAX_LOST):
            answer = self.replicas.options(stream=True).answer.remote(*routed_by, scope=told, body=body)
            try:
                async for message in answer:
                    started = started or message
                    await send(message)
                return
            except RayActorError:
                if started is not None:
                    break
            finally:
                answer.cancel()
        await tell_of_loss(started, scope, receive, send)


async def tell_of_loss(started: Message | None, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the client an error that says to ask again. started: the head of the answer, if it was sent."""
    error = error_body(503, "the replica of this request was lost; ask again", None, "replica_lost")
    if started is None:
        await JSONResponse(error, 503, {"Retry-After": "1"})(scope, receive, send)
    elif Headers(scope=started).get("content-type", "").startswith("text/event-stream"):
        await send({"type": "http.response.body", "body": event(error)})
    else:
        raise RuntimeError("the replica was lost in the middle of an answer")  # which the client sees break off


def routed_text(body: bytes) -> str:
    """Text of a chat, prompt or response, whose beginning other requests may share; empty where there is none."""
    try:
        asked = json.loads(body)
        if not isinstance(asked, dict):
            return ""
        return _words(asked.get("messages") or asked.get("prompt") or asked.get("input"))
    except (ValueError, RecursionError):
        return ""  # the replica refuses it


def _words(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(map(_words, part))
    if isinstance(part, dict):
        return _words(part.get("content") or part.get("text"))
    return f"{part} " if isinstance(part, int) else ""  # ids of tokens


def merged_metrics(figures: Iterable[tuple[str, str]]) -> bytes:
    """Figures of several replicas as one text, in which each line names its replica."""
    families: dict[str, Metric] = {}
    for replica, text in figures:
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, sample.labels | {"replica": replica}, sample.value)
    return generate_latest(SimpleNamespace(collect=families.values))


def actor_options(options: ReplicaOptions) -> dict[str, float]:
    """Resources of a replica: a GPU for each rank that shares the target, unless `--gpus` says otherwise."""
    ranks = options.tensor_parallel
    shared_by = ranks if ranks > 1 else 0
    gpus = shared_by if options.gpus is None else options.gpus
    if gpus < shared_by:
        raise ConfigError(f"--gpus {gpus:g} a replica are fewer than --tensor-parallel {shared_by}; leave --gpus out")
    return {"num_cpus": options.cpus, "num_gpus": gpus}


def application(options: ReplicaOptions, settings: ServeSettings) -> Any:
    """The application that `serve.run` starts: replicas, and front ends before them."""
    from ray import serve

    replicas = serve.deployment(
        Replica,
        name="specdec",
        num_replicas=options.replicas,
        # Ray's default of 5 would keep batches small; beyond this many it queues requests itself
        max_ongoing_requests=options.batch_size + options.max_waiting,
        graceful_shutdown_timeout_s=settings.stop_seconds,
        ray_actor_options=actor_options(options),
        request_router_config=router_config(options),
    )
    front = serve.deployment(
        serve.ingress()(FrontEnd),
        name="front",
        num_replicas=options.front_ends,
        max_ongoing_requests=1 << 20,  # replicas bound it
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas.bind(options, settings), settings.max_body_bytes)


def router_config(options: ReplicaOptions) -> dict[str, Any]:
    """Ray's router of the replicas; nothing for its default, the less busy of two random ones."""
    if options.router == "load":
        return {}
    settings = {
        # a replica that has a whole batch more than another gets no more, whatever it has cached
        "imbalanced_threshold": options.batch_size,
        "do_eviction": True,
        "eviction_threshold_chars": ROUTED_CHARS,
        "eviction_target_chars": ROUTED_CHARS * 9 // 10,
    }
    return {"request_router_class": PREFIX_ROUTER, "request_router_kwargs": settings}


def run_replicas(options: ReplicaOptions) -> None:
    settings = serve_settings(options)
    actor_options(options)  # refuses before anything starts
    if settings.ssl_certfile is not None:
        raise ConfigError("--ssl-certfile: Ray listens for the replicas, without TLS; put a proxy before it")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
    try:
        import ray
        from ray import serve
    except ImportError:
        raise ConfigError("replicas need Ray Serve: pip install 'specdec-runtime[serve,ray]'") from None
    if options.address is None:
        cpus = int(options.replicas * options.cpus) + 1  # as it was asked for, whatever the machine has
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    else:
        ray.init(options.address)
    host, port = options.host, options.port
    serve.start(http_options={"host": host, "port": port})
    serve.run(application(options, settings), name="specdec", route_prefix="/")
    print(f"ray serve: http://{host}:{port}, {options.replicas} replicas", flush=True)
    stopped = threading.Event()
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda *_: stopped.set())
    stopped.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    alone = typer.Typer(add_completion=False)
    command("ray_serve.py", run_replicas, alone, context_settings={"auto_envvar_prefix": PREFIX})(ReplicaOptions)
    alone()
