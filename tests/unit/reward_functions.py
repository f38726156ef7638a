"""Reward functions of a user, good and bad, for the tests of the service."""

import asyncio
import os
import signal
import subprocess
import sys
import time

from areal_hpc.rewards.registry import UnscorableGold, per_sample, sees_truncated


def length_of_each(prompt, responses, factor=1.0):
    return [factor * len(response) for response in responses]


@sees_truncated
@per_sample
async def sees_all(prompt, response):
    await asyncio.sleep(0.001)
    return len(response)


def one_value(prompt, responses):
    return [1.0]


@per_sample
def by_text(prompt, response):
    """What the response asks for."""
    if response == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    if response == "family":
        # A child in a session of its own with a child that it leaves behind.
        subprocess.Popen(
            [sys.executable, "-c", "import os, time; os.fork(); os.setsid(); time.sleep(1000)", prompt.meta],
            start_new_session=True,
        )
        time.sleep(1000)
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "segfault":
        import ctypes

        ctypes.string_at(0)
    if response == "eat":
        return len(bytearray(10 * 1024**3))
    if response == "print":
        print("x" * 100_000)
        os.write(1, b"not a frame")
    if response == "environment":
        return sum(name.startswith(("PMI_", "MPI_", "HYD")) for name in os.environ)
    if response == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGINT)
    if response == "pid":
        return os.getpid()
    if response == "slow":
        time.sleep(0.3)
    return 1.0


def odd_prompts(prompt, responses):
    """The length of each answer, but for four prompts; "hang" never ends."""
    match prompt.prompt_id:
        case 1:
            raise UnscorableGold("gold 1 is no number")
        case 2:
            return [1.0, float("nan")]
        case 3:
            raise KeyError("broken on purpose")
        case 4:
            return [1.0]
    if "hang" in responses:
        time.sleep(1000)
    return [float(len(response)) for response in responses]
