"""Publishing weights from the trainer: connect once, then one publication per version.

`TrainerWeights` is built by every trainer rank and called by all of them in lockstep (the
export holds collectives); only the lead talks to rollouts. vLLM's trainer engine does the
transfer; here lies what makes it all or nothing: offer, send, commit or abandon. With
weights.overlap the transfer takes a copy of the weights and runs in a thread of the lead.
vLLM is imported at the first `connect`, not before.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_hpc.config.schema import Config, Device, WeightBackend
from areal_hpc.durable import DiskFullError
from areal_hpc.weights.client import RolloutClient
from areal_hpc.weights.watch import TransferStuck, in_thread, run_watched

if TYPE_CHECKING:
    from areal_hpc.mpi.world import World
    from areal_hpc.paths import RunPaths
    from areal_hpc.telemetry import Telemetry
    from areal_hpc.weights.source import ExportSource, MetadataFn, TensorsFn

logger = logging.getLogger(__name__)


class PublishError(RuntimeError):
    """Nothing was published; every engine that lives serves the version before."""


@dataclass(frozen=True)
class Publication:
    """How a publication ended: `error` is "" (and `timings` are seconds per phase), or says why not."""

    version: int
    timings: dict[str, float]
    error: str = ""


def resolve_backend(config: Config) -> WeightBackend:
    """The backend that `auto` stands for."""
    if config.weights.backend is not WeightBackend.auto:
        return config.weights.backend
    return WeightBackend.nccl if config.run.device is Device.cuda else WeightBackend.gloo


class TrainerWeights:
    """One trainer rank's part in publications.

    metadata_fn() -> [(name, torch dtype, full shape)]; tensors_fn() -> iterator of (name,
    full tensor) in the same order. Both may hold trainer collectives; only the lead's
    tensors are used.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        paths: RunPaths,
        metadata_fn: MetadataFn,
        tensors_fn: TensorsFn,
        telemetry: Telemetry,
    ) -> None:
        self._config = config
        self._world = world
        self._paths = paths
        self._functions = (metadata_fn, tensors_fn)
        self._telemetry = telemetry
        self._backend = resolve_backend(config)
        self._client: RolloutClient | None = None
        self._source: ExportSource | None = None
        self._engine: Any = None
        self._rollout_ranks: tuple[int, ...] = ()
        self._snapshot_version: int | None = None
        self._background: Future[dict[str, float]] | None = None
        self._background_version = 0

    def connect(self, rollout_ranks: tuple[int, ...]) -> None:
        """Build the transfer group with these world ranks; called by every trainer rank.

        Raises TimeoutError naming who did not join, or the engine's own error.
        """
        from areal_hpc.weights.plugin import register
        from areal_hpc.weights.source import ExportSource

        register()
        self._rollout_ranks = tuple(rollout_ranks)
        self._source = ExportSource(*self._functions)
        # May be a collective: every rank asks once, here.
        self._source.metadata()
        self._client = RolloutClient(
            self._world.channel,
            rollout_ranks,
            self._world.describe,
            timeout_s=self._config.weights.timeout_s,
            members_per_engine=self._members_per_engine(),
        )
        with self._telemetry.span("weights.connect", backend=self._backend.value):
            self._open()

    def publish(self, version: int) -> dict[str, float]:
        """Make every engine serve the current weights as `version`.

        Called by every trainer rank; the lead's result holds seconds per phase (`total_s`,
        `transfer_s`, and the slowest engine's `pause_to_resume_s`). Raises PublishError on
        the lead when nothing was published; other ranks never learn of that. Raises
        DiskFullError where the weights go through files.
        """
        assert self._source is not None and self._background is None, "connect first, one at a time"
        self._source.begin_publication()
        self._snapshot_version = None
        if not self._world.is_trainer_lead:
            with self._telemetry.span("weights.publish", version=version):
                self._engine.send_weights()
            return {}
        return self._publish(version)

    def attempt(self, version: int) -> Publication:
        """As `publish`, with a failure as a value."""
        try:
            return Publication(version, self.publish(version))
        except PublishError as error:
            return Publication(version, {}, str(error))

    @property
    def in_progress(self) -> bool:
        """A publication that was begun has not been reported by `finished`."""
        return self._background is not None

    def begin(self, version: int) -> None:
        """Start to publish the current weights as `version`, and return once they are copied.

        Called by every trainer rank; training may change the weights at once. A version
        that was begun before is sent again from its copy (a retry after a failure). The
        copy, as large as the model, stays with the lead until the next version's.
        """
        assert self._source is not None and self._background is None, "connect first, one at a time"
        if version != self._snapshot_version:
            with self._telemetry.span("weights.snapshot", version=version):
                self._source.take_snapshot(keep=self._world.is_trainer_lead)
            self._snapshot_version = version
        if self._world.is_trainer_lead:
            self._source.begin_publication(from_snapshot=True)
            self._background_version = version
            self._background = in_thread(self._publish, version)

    def finished(self) -> Publication | None:
        """The publication that was begun, once it has ended; None before, and on other ranks.

        Raises what ends the run (an engine that was told to serve and did not answer).
        """
        if self._background is None or not self._background.done():
            return None
        background, self._background = self._background, None
        try:
            return Publication(self._background_version, background.result())
        except PublishError as error:
            return Publication(self._background_version, {}, str(error))

    def _publish(self, version: int) -> dict[str, float]:
        assert self._client is not None
        begin = time.perf_counter()
        with self._telemetry.span("weights.publish", version=version) as attributes:
            try:
                self._ensure_connected(version)
                self._send()
            except (DiskFullError, TransferStuck):  # the same again at another attempt: it ends the run
                raise
            except Exception as error:
                self._withdraw(version, error)
                raise PublishError(f"version {version} was not published: {error}") from error
            # From here on the version is live: an engine that dies now is restarted with it,
            # and a rank that does not answer at all ends the run.
            sent = time.perf_counter()
            phases = self._client.commit()
            timings = {"total_s": time.perf_counter() - begin, "transfer_s": sent - begin}
            for name in phases[0]:
                timings[name] = max(phase[name] for phase in phases)
            attributes.update(timings)
        if self._backend is WeightBackend.file:
            self._engine.forget_before(version)
        return timings

    def _send(self) -> None:
        assert self._client is not None
        if self._backend is WeightBackend.nccl:
            client = self._client
            run_watched(self._engine.send_weights, lambda: client.failure, self._abort)
        else:
            # These look at the engines' answers and at the clock themselves.
            self._engine.send_weights()

    def _abort(self) -> None:
        assert self._source is not None
        # First: a thread that the abort wakes must not go on with the next bucket.
        self._source.interrupt()
        self._disconnect()

    def close(self) -> None:
        """Let go of the transfer group, after a publication that is still running."""
        if self._background is not None:
            wait([self._background], timeout=self._config.weights.timeout_s)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _ensure_connected(self, version: int) -> None:
        """Ask all engines to take an update; join anew if one left the group (it was restarted)."""
        assert self._client is not None
        if not self._client.offer(version) or self._engine is None:
            logger.info("connecting the engines to the trainer again")
            self._disconnect()
            self._open()

    def _withdraw(self, version: int, error: Exception) -> None:
        assert self._client is not None and self._source is not None
        logger.warning("publication of version %d failed: %s", version, error)
        # The group may hold a half-sent bucket: the next publication needs a new one.
        self._disconnect()
        # The other trainer ranks may still be in this pass.
        self._source.drain()
        try:
            self._client.abandon()
        except Exception as second:  # such an engine is restarted by its rank
            logger.warning("an engine did not confirm the withdrawal: %s", second)

    def _open(self) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._engine = WeightTransferTrainerFactory.trainer_init(
            self._init_info(), client=self._client, source=self._source
        )

    def _members_per_engine(self) -> int:
        return self._config.rollout.tensor_parallel if self._backend is WeightBackend.nccl else 1

    def _init_info(self) -> Any:
        weights = self._config.weights
        rank = self._world.role_rank
        world_size = 1 + len(self._rollout_ranks) * self._members_per_engine()
        if self._backend is WeightBackend.file:
            from areal_hpc.weights.file import FileTrainerInitInfo

            return FileTrainerInitInfo(folder=str(self._paths.weight_files), rank=rank)
        if self._backend is WeightBackend.gloo:
            from areal_hpc.weights.gloo import GlooTrainerInitInfo

            return GlooTrainerInitInfo(
                host=self._lead_address(),
                world_size=world_size,
                bucket_bytes=weights.bucket_bytes,
                timeout_s=weights.timeout_s,
                rank=rank,
            )
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        return NCCLTrainerInitInfo(
            master_address=self._lead_address(),
            master_port=get_open_port(),
            world_size=world_size,
            packed_buffer_size_bytes=weights.bucket_bytes,
            rank=rank,
        )

    def _lead_address(self) -> str:
        """Loopback while everybody is on one node (whose own name may not resolve)."""
        hosts = self._world.hosts
        everyone = {hosts[rank] for rank in (self._world.trainer_ranks[0], *self._rollout_ranks)}
        return "127.0.0.1" if len(everyone) == 1 else hosts[self._world.trainer_ranks[0]]
