"""How far the clocks of the ranks lie apart, so that their telemetry can be laid side by side.

Called by `main` on all ranks, once, after the world stands.
"""

from __future__ import annotations

import json
import time

from areal_hpc.mpi.world import gather


def compare_clocks() -> tuple[float, float]:
    """(seconds by which this rank's clock is ahead of the controller's, how much that may be wrong)."""
    gather(b"", "the clocks")  # so that all ask at about the same time
    sent = time.time()
    everyone = [float(data) for data in gather(repr(sent).encode(), "the clocks")]
    received = time.time()
    controller = json.loads(gather(json.dumps([sent, received]).encode(), "the clocks")[0])
    return offset(everyone[0], controller[1], sent, received)


def offset(controller_sent: float, controller_received: float, sent: float, received: float) -> tuple[float, float]:
    """The offset and its error from one exchange in which everybody sent, then received from everybody.

    Nobody receives before everybody has sent: received - offset >= controller_sent and
    sent - offset <= controller_received, both by the controller's clock.
    """
    most, least = received - controller_sent, sent - controller_received
    return (most + least) / 2, (most - least) / 2
