"""A training step on a cluster: back-propagation, and the sums that overlap with it.

Gradients are grouped into buckets in the order in which they appear. A bucket is summed
as soon as it is there and the bucket before it has been summed; the step ends with the
last sum. What a step is above the seconds of one device is what communication costs.
Ranks are taken to be equally fast; input, the update and other users of the network are
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from collective.buckets import BYTES_BETWEEN_HOSTS
from collective.comparison.prediction.models import Profile
from collective.comparison.prediction.simulator import Cluster, Times, times

STAGING = 12e9  # bytes/s between a GPU and its host: PCIe 3.0 x16
HIDDEN = 0.02  # a smaller share of a step than this is not worth a name
MIB = 1 << 20


@dataclass(frozen=True)
class Policy:
    """How a backend sums gradients."""

    algorithm: str  # of the core: ours, or the one that stands for the library's
    bucket_bytes: int | None  # None: one bucket, after the last gradient
    # The most bytes of buckets that are there which travel as one; 0: none.
    fuses: int = 0
    cycle: float = 0.0  # seconds between two looks at what is there
    stages: bool = False  # whether a GPU's gradients go through the memory of its host
    note: str = ""  # what is assumed


# As the backends are by default on several hosts (docs/how-to/choosing-a-backend.md).
POLICIES = {
    "native": Policy("auto", BYTES_BETWEEN_HOSTS, stages=True, note="our core"),
    "horovod": Policy(
        "ring",
        BYTES_BETWEEN_HOSTS,
        fuses=128 * MIB,
        cycle=1e-3,
        note="a ring over all ranks, up to 128 MiB fused each millisecond",
    ),
    "tf-multiworker": Policy("ring", 16 * MIB, note="a ring over all ranks"),
    "mpi": Policy(
        "ring", None, stages=True, note="a ring over all ranks, after all gradients"
    ),
}
FLAT_RING = Policy("ring", BYTES_BETWEEN_HOSTS, note="a ring, bucket by bucket")


@dataclass(frozen=True)
class Predicted:
    """A step of one model on one cluster by one policy; all in seconds."""

    compute: float  # of one device alone
    step: float  # with communication
    sums: float  # all all-reduces, end to end
    wire: float  # what the links need at least for these bytes

    @property
    def efficiency(self) -> float:
        """Of N devices: the share of N times the rate of one."""
        return self.compute / self.step

    @property
    def bound(self) -> str:
        """What limits the step: ``compute``, ``wire`` or ``messages``."""
        if self.step - self.compute < HIDDEN * self.step:
            return "compute"
        return "wire" if self.wire > self.sums / 2 else "messages"


def buckets(profile: Profile, bucket_bytes: int | None) -> list[tuple[int, float]]:
    """Bytes of each bucket, and when its last gradient is there."""
    found: list[tuple[int, float]] = []
    filled = 0
    for gradient in profile.gradients:
        filled += gradient.bytes
        if bucket_bytes is not None and filled >= bucket_bytes:
            found.append((filled, gradient.ready))
            filled = 0
    if filled:
        found.append((filled, profile.gradients[-1].ready))
    return found


def predict(
    profile: Profile, cluster: Cluster, policy: Policy, gpu: bool = True
) -> Predicted:
    """Predicts a step.

    Args:
        gpu: Whether devices are GPUs, whose gradients some backends stage.
    """
    seconds = times(cluster, policy.algorithm)
    staging = 1 / STAGING if gpu and policy.stages and cluster.size > 1 else 0.0
    waiting = buckets(profile, policy.bucket_bytes)
    waiting = [(size, ready + size * staging) for size, ready in waiting]
    end, sums, last = _sum_all(waiting, seconds, policy)
    share = (cluster.hosts - 1) / cluster.hosts
    wire = 2 * share * profile.bytes / cluster.wire.bytes_per_second
    step = max(profile.seconds, end + last * staging)
    return Predicted(profile.seconds, step, sums, wire)


def _sum_all(
    waiting: list[tuple[int, float]], seconds: Times, policy: Policy
) -> tuple[float, float, int]:
    """When the last sum is there; the seconds of all sums; bytes of the last."""
    end = sums = 0.0
    size = at = 0
    while at < len(waiting):
        size, ready = waiting[at]
        at += 1
        begin = max(end, ready)
        if policy.cycle:
            # It waits for half a cycle in the middle, and for all ranks to agree.
            begin += policy.cycle / 2 + seconds(4)
        while at < len(waiting) and waiting[at][1] <= begin:
            if size + waiting[at][0] > policy.fuses:
                break
            size += waiting[at][0]
            at += 1
        end = begin + seconds(size)
        sums += seconds(size)
    return end, sums, size
