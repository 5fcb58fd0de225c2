"""Replicas on Ray Serve: the one file that imports ray. It places them, restarts them, scales and replaces them; it
carries requests to them, and tells when one is gone.

Owns what is said to Ray. Does not own the choice of a replica (`chooser.py`), nor what a replica does (`replica.py`).
Invariants: Ray's own HTTP proxy is never started; a Ray that this process has started ends with it, another one loses
only our application.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from typing import Any, Final

import msgspec

from quire.config.cluster import ClusterConfig
from quire.config.engine import EngineConfig
from quire.core import env
from quire.core.errors import ConfigError, EngineError
from quire.engine import logs
from quire.engine.interrupts import undivided
from quire.engine.ranks.node_port import reserved_port
from quire.engine.replicas import lines
from quire.engine.replicas.channel import EndpointAddress
from quire.engine.replicas.chooser import chooser_of
from quire.engine.replicas.fleet import GONE, ReplicaLost
from quire.engine.replicas.machine import knock, remove_session
from quire.engine.replicas.other_node import OtherNode
from quire.engine.replicas.reasons import last_line, reason_of
from quire.engine.replicas.replica import EngineReplica
from quire.engine.replicas.room import check_room, check_spread, engine_of_replica, idle_gpus, needs_of

lines.settle()  # Ray reads it when it is imported
try:
    import ray
    from ray import serve
    from ray.exceptions import ActorDiedError, RayError
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import RayServeException
    from ray.serve.request_router import RequestRouter
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as missing:
    raise ConfigError(
        f"several replicas need Ray, which is not installed here ({missing}): pip install 'ray[serve,data]==2.60.*'"
    ) from None

logger = logging.getLogger("quire.engine")

DEPLOYMENT: Final = "engine"
OBJECT_STORE_BYTES: Final = 200_000_000
"""Of a Ray that is started here. Requests alone go through it."""
ROWS_A_BLOCK: Final = 8
"""Rows that a replica is given at once, in Ray Data's blocks; two blocks are under way."""
MAX_BLOCKS: Final = 10_000
LOGGING: Final = {"log_level": "WARNING", "enable_access_log": False}
"""Of Ray Serve in a replica: a line for each request is the server's business."""
LOOPBACK: Final = "127.0.0.1"
HEALTH_PERIOD_S: Final = 5.0
DEFAULT_ONGOING: Final = 512
"""Requests that one replica is given at once where `max_num_seqs` does not say how many it can run."""
DRAIN_S: Final = 600.0
"""Longest time that a replica which is to go gets for the requests that it has."""
END_S: Final = 15.0
"""At the end, when none is left: longer than an engine takes to end."""
KILL_S: Final = 5.0
"""And what was killed is gone within so long."""
LOOK_S: Final = 0.25
LOST_RAY_S: Final = 10
"""A Ray of this machine that is killed does not come back: so long after it Ray's library ends this process."""
SLOW_S: Final = 30.0
"""A start that takes longer is told every so many seconds, in Ray's words."""


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]
    """Asks a `Chooser`. Ray Serve goes on to the next replica when the first one is full or gone. It copies this class
    with all that it refers to in this file."""

    def initialize_state(self, **kwargs: Any) -> None:
        """kwargs: `application`, whose chooser it is."""
        self._chooser = chooser_of(kwargs["application"])

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Each replica by itself, the best one first."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else it asks again at once when all are full
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = self._chooser.rank(pending_request.args[0], [*replicas])
        self._chooser.placed(pending_request.args[0], names[0])  # others that come meanwhile must know
        return [[replicas[name]] for name in names]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """A replica has taken it."""
        self._chooser.placed(pending_request.args[0], replica_id.unique_id)

    def update_replicas(self, replicas: list[Any]) -> None:
        """Those that take requests from now on."""
        self._chooser.routable = frozenset(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas(replicas)


class EngineDeployment:
    """A replica as Ray Serve runs it."""

    async def __init__(self, config: bytes, address: bytes, needs: bytes, revision: int) -> None:  # type: ignore[misc]
        """config: an EngineConfig; address: an EndpointAddress; needs: Ray's resources of each node; revision: differs
        after a rolling update. Ray Serve waits for it, and tells a ConfigError."""
        logs.show()
        engine = msgspec.json.decode(config, type=EngineConfig)
        self._others: list[Any] = []
        if engine.nnodes > 1:
            self._port = reserved_port()
            """Kept, so that nobody else has it when the engine is started, or started again."""
            engine, self._others = _start_others(
                msgspec.structs.replace(engine, master_port=self._port.getsockname()[1]),
                msgspec.json.decode(needs, type=dict[str, float]),
            )
        self._replica = EngineReplica(
            engine,
            msgspec.json.decode(address, type=EndpointAddress),
            serve.get_replica_context().replica_id.unique_id,
        )
        await self._replica.start()

    async def run(self, wire_id: str, message: bytes) -> None:
        """See `EngineReplica.run`. wire_id: for the router."""
        await self._replica.run(message)

    async def check_health(self) -> None:
        """Ray Serve puts another replica into the place of one that raises here."""
        self._replica.check()
        await asyncio.gather(*(other.check.remote() for other in self._others))

    async def __del__(self) -> None:
        """Ray Serve waits for it once the requests have ended."""
        with contextlib.suppress(AttributeError):  # its options were wrong
            await self._replica.leave()


class OtherNodeActor:
    """The ranks that a replica has on another node. Ends with the replica, whose it is."""

    def __init__(self, config: bytes) -> None:
        """config: an EngineConfig."""
        logs.show()
        self._node = OtherNode(msgspec.json.decode(config, type=EngineConfig))

    def check(self) -> None:
        """Its process runs, or runs again."""
        self._node.check()


def _start_others(engine: EngineConfig, needs: dict[str, float]) -> tuple[EngineConfig, list[Any]]:
    """In a replica, which has a placement group with a bundle on each of its nodes, of which the first is its own: the
    options, which have a port, with its address, and an actor in each of the others."""
    engine = msgspec.structs.replace(engine, master_addr=str(ray.util.get_node_ip_address()))
    group, others = ray.util.get_current_placement_group(), []
    amounts = dict(needs)
    own = {"num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0), "memory": amounts.pop("memory", None)}
    for number in range(1, engine.nnodes):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        actor = ray.remote(OtherNodeActor).options(**own, resources=amounts, scheduling_strategy=strategy)
        others.append(actor.remote(msgspec.json.encode(msgspec.structs.replace(engine, node_rank=number))))
    return engine, others


class RayFleet:
    """`Fleet` on Ray Serve. `connect` comes first and `close` last, outside of the event loop."""

    def __init__(self, name: str, engine: EngineConfig, cluster: ClusterConfig) -> None:
        """name: of the application, which takes the place of one that has the same name already; `chooser_of(name)`
        chooses its replicas."""
        self.failure: str | None = None
        self.session = ""
        """Folder of a Ray that was started here."""
        self._name = name
        self._engine = engine
        self._cluster = cluster
        self._address: EndpointAddress | None = None
        self._revision = 0
        self._method: Any = None
        self._is_ours = not cluster.ray_address

    def connect(self) -> str:
        """Join the cluster or start one; the address of this machine in it. ConfigError if there is none, or it has no
        room for the replicas."""
        check_spread(self._engine, self._cluster)
        self.session = join_ray(self._cluster)
        check_room(self._cluster.n_at_start, self._cluster.ray_actor_options, _nodes(), self._engine.nnodes)
        idle = idle_gpus(self._cluster.ray_actor_options, _nodes()) if self._engine.device == "auto" else ""
        if idle:
            logger.warning("%s", idle)
        return LOOPBACK if self._is_ours else str(ray.util.get_node_ip_address())

    async def start(self, address: EndpointAddress) -> None:
        """Deploy; returns when all replicas that there are to be at first run."""
        self._address = address
        await asyncio.to_thread(self._deploy)
        await self._wait_running()

    async def update(self, engine: EngineConfig, cluster: ClusterConfig) -> None:
        """Put replicas with these options into the places of those that run, some at a time; each of those finishes
        what it has. ConfigError if there is no room, or Ray refuses: then nothing changes."""
        check_room(cluster.n_at_start, cluster.ray_actor_options, await asyncio.to_thread(_nodes), engine.nnodes)
        self._engine, self._cluster = engine, cluster
        self._revision += 1
        await asyncio.to_thread(self._deploy)
        await self._wait_running()

    async def run(self, wire_id: str, message: bytes) -> None:
        """See `Fleet`."""
        response = self._method.remote(wire_id, message)
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except ActorDiedError:
            raise ReplicaLost(GONE, is_gone=True) from None
        except EngineError as error:  # of the replica; Ray has wrapped it
            raise ReplicaLost(error.args[0] if error.args else GONE, is_gone=False) from None
        except (RayError, RayServeException) as error:
            logger.warning("Ray could not carry request %s: %s", wire_id, str(error).splitlines()[0])
            raise ReplicaLost(GONE, is_gone=False) from None

    def close(self) -> bool:
        """End the replicas, and a Ray that was started here. Whether none had to be killed."""
        is_clean = True
        with contextlib.suppress(RayError, RayServeException, OSError, RuntimeError):
            if ray.is_initialized():
                serve.delete(self._name, _blocking=False)
                self._kill(chooser_of(self._name).silent)
                is_clean = self._has_gone(END_S)
                if not is_clean:
                    logger.warning("not all replicas have ended in %g s: they are killed", END_S)
                    self._kill()
                if self._has_gone(KILL_S) and self._is_ours:
                    serve.shutdown()
        ray.shutdown(wait_for_processes=self._is_ours)
        return is_clean and not chooser_of(self._name).silent

    def _has_gone(self, limit_s: float) -> bool:
        """Whether no replica is left; waits so long for it."""
        end_s = time.monotonic() + limit_s
        while (is_there := self._name in serve.status().applications) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        return not is_there

    def _kill(self, replicas: Collection[str] | None = None) -> None:
        """SIGKILL to these replicas, or to all: one that is stopped or hangs ends at no word of Ray Serve's."""
        for actor in ray.util.list_named_actors(all_namespaces=True):
            _, is_replica, name = actor["name"].rpartition(f"::{self._name}#{DEPLOYMENT}#")
            if is_replica and (replicas is None or name in replicas):
                with contextlib.suppress(RayError, ValueError):  # it has ended meanwhile
                    ray.kill(ray.get_actor(**actor))

    def _deploy(self) -> None:
        options, scaling = self._cluster.ray_actor_options, dict(self._cluster.autoscaling_config)
        n_seqs = self._engine.max_num_seqs
        if scaling:
            scaling.setdefault("target_ongoing_requests", max(1, n_seqs * 3 // 4) if n_seqs else 32)
        needs, n_each = needs_of(options), self._engine.nnodes
        spread = {"placement_group_bundles": [needs] * n_each, "placement_group_strategy": "STRICT_SPREAD"}
        try:
            serve.start(proxy_location="Disabled")
            deployment = serve.deployment(
                EngineDeployment,
                name=DEPLOYMENT,
                num_replicas=None if scaling else self._cluster.replicas,
                autoscaling_config=scaling or None,
                ray_actor_options=options or None,
                **(spread if n_each > 1 else {}),
                max_ongoing_requests=2 * n_seqs if n_seqs else DEFAULT_ONGOING,
                health_check_period_s=HEALTH_PERIOD_S,
                graceful_shutdown_timeout_s=DRAIN_S,
                graceful_shutdown_wait_loop_s=0.5,
                max_constructor_retry_count=2,
                request_router_config=RequestRouterConfig(
                    request_router_class=PrefixRequestRouter, request_router_kwargs={"application": self._name}
                ),
            )
            application = deployment.bind(
                msgspec.json.encode(engine_of_replica(self._engine, self._cluster)),
                msgspec.json.encode(self._address),
                msgspec.json.encode(needs),
                self._revision,
            )
            target = serve.RunTarget(application, name=self._name, route_prefix=None, logging_config=LOGGING)
            (handle,) = serve.run_many([target], wait_for_applications_running=False)
        except (ValueError, TypeError) as error:  # also of pydantic: an option of Ray that is wrong
            raise ConfigError(f"Ray refuses the options of the replicas: {error}") from None
        except (RayError, RayServeException) as error:
            raise ConfigError(f"the replicas cannot be deployed: {str(error).splitlines()[0]}") from None
        self._method = handle.run

    async def _wait_running(self) -> None:
        """ConfigError or EngineError if the replicas cannot be started, as of a single engine."""
        loop = asyncio.get_running_loop()
        told_s = loop.time()
        while True:
            status = (await asyncio.to_thread(serve.status)).applications.get(self._name)
            state = "" if status is None else str(status.status.value)
            texts = [] if status is None else [each.message for each in status.deployments.values() if each.message]
            why = reason_of(texts or ([] if status is None else [status.message]))
            if state == "RUNNING":
                return
            if state == "DEPLOY_FAILED":
                raise why.error("the replicas cannot be started")
            if loop.time() - told_s > SLOW_S:
                told_s = loop.time()
                logger.warning("replicas are still being started: %s", why.words)
            await asyncio.sleep(LOOK_S)


def join_ray(cluster: ClusterConfig) -> str:
    """Join the cluster, or start one of this machine that ends with this process; its folder, or none of a Ray of
    others. ConfigError if that cannot be."""
    try:
        if not cluster.ray_address:
            env.set_for_children("RAY_USAGE_STATS_ENABLED", "0")
            with undivided():  # of a Ray that is half started, processes would stay behind
                context = ray.init(
                    "local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES,
                    logging_level=logging.ERROR, _system_config={"gcs_rpc_server_reconnect_timeout_s": LOST_RAY_S},
                )  # fmt: skip
        else:
            knock(cluster.ray_address)
            context = ray.init(cluster.ray_address, logging_level=logging.ERROR)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not cluster.ray_address:
            raise ConfigError(f"a Ray of this machine cannot be started: {reason}") from None
        raise ConfigError(
            f"the Ray cluster at {cluster.ray_address} cannot be used: {reason}. It must run (`ray status`), with the "
            "versions of Ray and Python that are here, and its token be known here (RAY_AUTH_MODE=token)"
        ) from None
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it warns once for each request of a lost replica
    return "" if cluster.ray_address else str(context.address_info["session_dir"])


def _nodes() -> list[dict[str, float]]:
    """What each node has, by Ray's names."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class RayMap:
    """Work on many rows by actors of Ray Data: `with RayMap(cluster) as ray_map`."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster
        self._session = ""

    def __enter__(self) -> RayMap:
        """Raises as `join_ray`, and ConfigError if it has no room."""
        self._session = join_ray(self._cluster)
        check_room(self._cluster.n_at_start, self._cluster.ray_actor_options, _nodes(), 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        ray.shutdown(wait_for_processes=bool(self._session))
        if self._session and kind is None:
            remove_session(self._session)

    def engine_config(self, engine: EngineConfig) -> EngineConfig:
        """See `engine_of_replica`. ConfigError for an engine of several machines."""
        if engine.nnodes > 1:
            raise ConfigError(
                f"nnodes = {engine.nnodes}: the engines of a batch are each of one machine: leave --nnodes out",
                param="nnodes",
            )
        return engine_of_replica(engine, self._cluster)

    def run(self, worker: type, arguments: tuple[Any, ...], rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """What `worker(*arguments)`, one on each replica, makes of the rows, in their order: it is an async generator
        of a row for a row, and works on several at once. One that is killed is made anew, and gets its rows again.
        EngineError with the reason if one fails."""
        if not rows:
            return
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        options = {"num_cpus": 1, **self._cluster.ray_actor_options}
        n_rows = min(ROWS_A_BLOCK, -(-len(rows) // (2 * self._cluster.n_at_start)))
        n_blocks = min(MAX_BLOCKS, -(-len(rows) // n_rows))
        found = ray.data.from_items(rows, override_num_blocks=n_blocks).map(
            worker,
            fn_constructor_args=arguments,
            compute=ray.data.ActorPoolStrategy(
                size=self._cluster.n_at_start, max_tasks_in_flight_per_actor=2, max_concurrent_calls_per_actor=2
            ),
            **options,
        )
        try:
            yield from found.iter_rows()
        except RayError as error:
            raise EngineError(f"a replica could not go on: {last_line(str(error))}") from None
