"""The learner's end of a weight update: send once to all engines, watch everything, fail closed.

One publish, over the steps of vLLM's weight-transfer life cycle on every engine:

    begin_update -> (receive_bucket | broadcast) per bucket -> finish_update -> receipts

The learner never blocks in the transport: it polls the send and the engines' answers together, so that an engine that dies
or refuses a tensor ends the publish at once, with an error that names it.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import ray
import torch
from torch import Tensor

from qarl_openrlhf.sync.errors import SyncError
from qarl_openrlhf.sync.manifest import Bucket, pack_buckets
from qarl_openrlhf.sync.transport import backend, make_sender

VERIFY = ("checksum", "readback", "off")
POLL_S = 0.005
# After a broken send: how long to wait for the engines to say which of them broke it.
GRACE_S = 3.0


class Publisher:
    """Publishes checkpoint tensors to all engines; lives in the process of learner rank 0.

    Args:
        engines: ``QarlRolloutActor`` handles.
        transport: "gloo", "nccl" or "ipc".
        device: where the tensors lie.
        bucket_mb: size of a flat buffer (MiB); two exist at a time.
        timeout_s: longest duration of one publish.
        verify: "checksum" (of every tensor, before its bucket is applied), "readback" (also of the engines' parameters
            afterwards) or "off".

    A failed publish raises ``SyncError``, leaves every engine that still lives in state FAILED (it refuses to generate) and
    drops the transport group. The next publish makes a new group, on a new port, and a complete one heals the engines.
    """

    def __init__(
        self,
        engines: list,
        *,
        transport: str = "gloo",
        device: torch.device | None = None,
        bucket_mb: int = 256,
        timeout_s: float = 120,
        verify: str = "checksum",
    ):
        backend(transport)  # refuses an unknown one
        if verify not in VERIFY:
            raise ValueError(f"verify {verify!r} does not exist: use one of {', '.join(VERIFY)}")
        self.engines = list(engines)
        self.names = [f"engine {i}" for i in range(len(self.engines))]
        self.bucket_bytes = int(bucket_mb * 2**20)
        self.timeout_s = timeout_s
        self.verify = verify
        self.transport = transport
        self.device = device or torch.device("cpu")
        self.sender = None
        self.receipts: list[dict] = []

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """Send all tensors (checkpoint name, tensor) as weight ``version``; returns ``sync/*`` metrics.

        The iterable is always exhausted, also after a failure: under ZeRO-3 other ranks gather along with it.
        """
        tensors = iter(named_tensors)
        self.deadline = time.monotonic() + self.timeout_s
        try:
            return self._publish(tensors, version)
        except BaseException as error:
            self.abandon(f"version {version}: {error}")
            with suppress(Exception):  # the first error is the cause
                for _ in tensors:
                    pass
            raise

    def abandon(self, reason: str) -> None:
        """No engine that still lives samples with the weights of this publish, complete or not: each goes FAILED and aborts its
        requests. Waits for them briefly and drops the group."""
        calls = [engine.abort_update.remote(reason) for engine in self.engines]
        self.close()
        ray.wait(calls, num_returns=len(calls), timeout=GRACE_S)

    def close(self) -> None:
        """Leave the transport group."""
        if self.sender is not None:
            self.sender.close()
            self.sender = None

    # ---- one publish --------------------------------------------------------------------------------------------------

    def _publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        started = time.perf_counter()
        if self.sender is None:
            self._connect()
        connected = time.perf_counter()
        self.sender.begin()
        self._ask("begin_update", version)
        total = buckets = sent = 0
        waiting = 0.0
        in_flight: tuple | None = None
        for bucket, flat in pack_buckets(
            tensors,
            version=version,
            bucket_bytes=self.bucket_bytes,
            with_checksums=self.verify != "off",
            allocate=self.sender.buffer,
        ):
            # This bucket was made while the one before was on its way.
            waiting += self._settle(in_flight)
            in_flight = self._send(bucket, flat)
            sent += len(bucket.names)
            total += bucket.nbytes
            buckets += 1
        waiting += self._settle(in_flight)
        finishing = time.perf_counter()
        self.receipts = [receipt for engine in self._ask("finish_update", version, sent) for receipt in engine]
        ended = time.perf_counter()
        return {
            "sync/version": version,
            "sync/bytes": total,
            "sync/tensors": sent,
            "sync/buckets": buckets,
            "sync/connect_ms": (connected - started) * 1e3,
            # waiting for sends and engines, without the time in which the next bucket was being made anyway
            "sync/send_ms": waiting * 1e3,
            "sync/finish_ms": (ended - finishing) * 1e3,
            "sync/publish_ms": (ended - started) * 1e3,
            "sync/load_ms": max(receipt["load_ms"] for receipt in self.receipts),
            "sync/verify_ms": max(receipt["verify_ms"] for receipt in self.receipts),
            "sync/checksum_ok": float(all(receipt["checksum_ok"] for receipt in self.receipts)),
        }

    def _connect(self) -> None:
        ranks = [state["ranks"] for state in self._ask("weights_state")]
        host = ray.util.get_node_ip_address()
        self.sender = make_sender(self.transport, host, 1 + sum(ranks), self.timeout_s, self.device)
        joined = self.sender.connect()
        calls, offset = [], 1
        for engine, name, count in zip(self.engines, self.names, ranks, strict=True):
            info = {
                "name": name,
                "group": self.sender.info.to_dict(),
                "rank_offset": offset,
                "verify": self.verify,
                "timeout_s": self.timeout_s,
            }
            calls.append(engine.init_weight_sync.remote(info))
            offset += count
        self._await(calls, "init_weight_sync", joined.done)
        joined.result()

    def _send(self, bucket: Bucket, flat: Tensor) -> tuple:
        sending = self.sender.send(flat)
        manifest = ray.put((bucket.to_dict(), sending.ticket))
        calls = [engine.receive_bucket.remote(manifest) for engine in self.engines]
        return calls, sending.work, bucket, flat

    def _settle(self, in_flight: tuple | None) -> float:
        """Wait until a bucket has been sent, proven and loaded everywhere; seconds waited."""
        if in_flight is None:
            return 0.0
        started = time.perf_counter()
        calls, work, bucket, _flat = in_flight
        what = f"bucket {bucket.index} ({bucket.names[0]} ... {bucket.names[-1]})"
        self._await(calls, what, work.is_completed)
        try:
            work.wait()
        except RuntimeError as error:
            raise SyncError(f"sending {what} failed, though every engine says it got it: {error}") from error
        return time.perf_counter() - started

    # ---- waiting ------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, *args) -> list:
        calls = [getattr(engine, method).remote(*args) for engine in self.engines]
        return self._await(calls, method)

    def _await(self, calls: list, what: str, sent: Callable[[], bool] = lambda: True) -> list:
        """Answers of all engines once they are there and ``sent()`` holds; SyncError naming the engines that fail or stall."""
        pending = dict(zip(calls, self.names, strict=True))
        errors: dict[str, str] = {}
        until = self.deadline
        while pending or not sent():
            done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_S) if pending else ([], time.sleep(POLL_S))
            for call in done:
                name = pending.pop(call)
                try:
                    ray.get(call)
                except Exception as error:
                    errors[name] = _reason(error)
                    # One failure breaks the group for all: let the others say theirs, which may be the cause.
                    until = min(until, time.monotonic() + GRACE_S)
            if errors and not pending:
                break
            if time.monotonic() > until:
                break
        if errors:
            raise SyncError(f"{what}: " + "; ".join(_named(name, reason) for name, reason in errors.items()))
        if pending or not sent():
            silent = ", ".join(pending.values()) or "the transport"
            raise SyncError(f"{what}: no answer from {silent} within the publish's {self.timeout_s:g} s")
        return ray.get(calls)


def _reason(error: Exception) -> str:
    if isinstance(error, ray.exceptions.RayActorError):
        return "the engine is dead (its actor process ended)"
    cause = getattr(error, "cause", None) or error
    return str(cause)


def _named(name: str, reason: str) -> str:
    return reason if reason.startswith(f"{name}:") else f"{name}: {reason}"
