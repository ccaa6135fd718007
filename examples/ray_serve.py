"""Several replicas at one address, by Ray Serve: each is the application of `specdec serve` in a process of its own.

    python examples/ray_serve.py --replicas 2                                 the bundled pair, on this machine
    python examples/ray_serve.py --replicas 4 --gpus 1 --target DIR --drafter DIR
    python examples/ray_serve.py --replicas 2 --tensor-parallel 2 --target DIR      two GPUs a replica, which share it
    python examples/ray_serve.py --address auto --host 0.0.0.0 --replicas 8   on a cluster that runs already

Ray starts the replicas, replaces one that fails its health check, and sends a request to the one of two replicas that
has fewer running; the header X-Replica of an answer names it. Needs the extras: specdec-runtime[serve,ray].
"""

import argparse
import os
import signal
import sys
import threading
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec import EngineConfig, SpecConfig
from specdec.cli.bodies.settings import drafter_name, quiet_libraries
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.server_settings import ServeSettings, sampling_defaults


class SayWhich:
    """Around the application: the name of the replica in every answer."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self.app, self.name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Replica"] = self.name
            await send(message)

        await self.app(scope, receive, with_name)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The settings of one replica. It sees only the GPUs that Ray assigned to it."""
    return EngineConfig(max_batch_size=options.batch_size, tensor_parallel=options.tensor_parallel)


def actor_options(options: argparse.Namespace) -> dict[str, float]:
    """What Ray gives a replica: a GPU for each that shares the target, unless `--gpus` says otherwise."""
    shared_by = options.tensor_parallel if options.tensor_parallel > 1 else 0
    gpus = shared_by if options.gpus is None else options.gpus
    if gpus < shared_by:
        raise SystemExit(f"--gpus {gpus:g} a replica are fewer than --tensor-parallel {shared_by}; leave --gpus out")
    return {"num_cpus": options.cpus, "num_gpus": gpus}


class Replica:
    """One engine and its application; Ray makes it in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        quiet_libraries()
        self.engine = AsyncEngine.from_pretrained(
            options.target,
            drafter_name(options.target, options.drafter),
            spec=SpecConfig(options.num_steps, options.draft_topk),
            config=engine_config(options),
            max_waiting=options.max_waiting,
        )
        defaults = sampling_defaults(self.engine.generation_config)
        self.settings = ServeSettings(model_names=[options.target], api_keys=options.api_key, defaults=defaults)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from ray.serve import get_replica_context

        return SayWhich(create_app(self.engine, self.settings), get_replica_context().replica_id.unique_id)

    def check_health(self) -> None:
        """Ray asks every few seconds; a replica that raises is replaced."""
        if self.engine.trouble:
            raise RuntimeError(self.engine.trouble)

    async def __del__(self) -> None:
        await self.engine.close()


def deployment(options: argparse.Namespace) -> Any:
    """What `serve.run` takes."""
    from ray import serve

    made = serve.deployment(
        serve.ingress()(Replica),
        name="specdec",
        num_replicas=options.replicas,
        # Ray's default of 5 would keep batches small; beyond this many it queues requests itself
        max_ongoing_requests=options.batch_size + options.max_waiting,
        graceful_shutdown_timeout_s=options.stop_seconds,
        ray_actor_options=actor_options(options),
    )
    return made.bind(options)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny-gemma4")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--num-steps", type=int, default=4, help="levels of the draft")
    parser.add_argument("--draft-topk", type=int, default=1, help="branches a node")
    parser.add_argument("--batch-size", type=int, default=8, help="requests that run at a time, of each replica")
    parser.add_argument("--max-waiting", type=int, default=64, help="requests that may wait, of each replica")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="cores that a replica is given")
    parser.add_argument("--gpus", type=float, help="GPUs of a replica; default: those that share the target, or none")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of one host that share a replica's target")
    parser.add_argument("--api-key", action="append", default=[], help="a key that admits requests; again for each")
    parser.add_argument("--address", help="of a Ray cluster, or 'auto'; default: one of its own on this machine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--stop-seconds", type=float, default=30.0, help="for streams to end when it is stopped")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    actor_options(options)  # refuses before anything starts
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray is imported
    try:
        import ray
        from ray import serve
    except ImportError:
        sys.exit("ray_serve.py needs Ray Serve: pip install 'specdec-runtime[serve,ray]'")
    if options.address is None:
        cpus = int(options.replicas * options.cpus) + 1  # as it was asked for, whatever the machine has
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    else:
        ray.init(options.address)
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(deployment(options), name="specdec", route_prefix="/")
    print(f"ray serve: http://{options.host}:{options.port}, {options.replicas} replicas", flush=True)
    stopped = threading.Event()
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda *_: stopped.set())
    stopped.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
