"""The reward service with real worker processes: sums, errors, limits, kills, order."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from areal_hpc.config.schema import RewardsConfig
from areal_hpc.rewards.registry import RewardError, UnscorableGold
from areal_hpc.rewards.service import RewardService
from areal_hpc.telemetry import Telemetry
from areal_hpc.types import Prompt

HERE = Path(__file__).parent
BY_TEXT = "reward_functions:by_text"


def prompt(number: int = 1, gold: str = "4", meta: str = "") -> Prompt:
    return Prompt(number, "2+2?", gold=gold, meta=meta)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 90))


def scored(config: RewardsConfig, *args, telemetry=None):
    """The results and the counters of one call."""

    async def inner():
        async with RewardService(config, telemetry) as service:
            return await service.score(*args), service.stats()

    return run(inner())


def test_a_group_in_its_order():
    results, stats = scored(
        RewardsConfig(), prompt(), [r"\boxed{4}", "5", "", "4.0", "4"], [False] * 4 + [True]
    )
    assert [result.reward for result in results] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert stats["checks"] == 3  # the empty and the truncated one never reach a worker


def test_a_weighted_sum_logs_each_part(tmp_path):
    config = RewardsConfig(
        weights={"math": 1.0, "length": 0.5}, options={"length": {"target": 0, "limit": 10}}
    )
    telemetry = Telemetry(tmp_path / "t.jsonl")
    results, _ = scored(config, prompt(), ["4", "3" * 10], [False, True], telemetry=telemetry)
    telemetry.close()
    assert results[0].parts == {"math": 1.0, "length": -0.1}
    assert results[0].reward == pytest.approx(0.95)
    assert results[1].parts == {"math": 0.0, "length": -1.0}  # too long: cut off, and punished for it
    assert results[1].reward == -0.5
    text = (tmp_path / "t.jsonl").read_text()
    assert '"s":"reward.score"' in text and '"num":2,"sums":{"math":1.0,"length":-1.1}' in text


def test_group_functions_get_options_and_complete_answers():
    results, _ = scored(
        RewardsConfig(fn="reward_functions:length_of_each", options={"factor": 2.0}),
        prompt(),
        ["a", "", "ccc", "dd"],
        [False, False, False, True],
    )
    assert [result.reward for result in results] == [2.0, 0.0, 6.0, 0.0]
    results, _ = scored(
        RewardsConfig(fn="reward_functions:sees_all"), prompt(), ["a", "", "ccc"], [True, False, False]
    )
    assert [result.reward for result in results] == [1.0, 0.0, 3.0]


def test_broken_functions_are_named_and_the_service_goes_on():
    async def inner():
        async with RewardService(RewardsConfig(fn="reward_functions:one_value")) as service:
            for number in (3, 4):
                with pytest.raises(
                    RewardError, match=f"one_value on prompt {number} returned 1 values for 4"
                ):
                    await service.score(prompt(number), ["a"] * 4)
            return service.stats()

    assert run(inner())["errors"] == 2


def test_what_cannot_be_imported_fails_at_the_start():
    for fn, said in (
        ("no_such:thing", "no_such:thing cannot be imported"),
        ("reward_functions:x", "no attribute"),
    ):
        with pytest.raises(RewardError, match=said):
            scored(RewardsConfig(fn=fn), prompt(), ["a"])
    with pytest.raises(RewardError, match="does not take rewards.options"):
        scored(RewardsConfig(options={"colour": 1}), prompt(), ["a"])
    with pytest.raises(ValueError, match="did you mean"):
        RewardService(RewardsConfig(fn="maths"))


def test_an_unparseable_gold_answer_is_never_paid():
    async def inner():
        async with RewardService(RewardsConfig()) as service:
            with pytest.raises(UnscorableGold, match="prompt 9"):
                await service.score(prompt(9, gold="???"), ["???", "4"])
            assert (await service.score(prompt(), ["4"]))[0].reward == 1.0
            return service.stats()

    assert run(inner())["unscorable"] >= 1


def test_a_hung_check_is_killed_with_its_whole_tree():
    mark = uuid.uuid4().hex
    results, stats = scored(RewardsConfig(fn=BY_TEXT, timeout_s=1.5), prompt(meta=mark), ["family", "easy"])
    assert [result.reward for result in results] == [0.0, 1.0]
    assert stats["kills"] == 1
    deadline = time.monotonic() + 5
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def processes_with(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:
                pass
    return found


@pytest.mark.parametrize("death", ["die", "segfault"])
def test_a_worker_that_dies_is_replaced(death):
    results, stats = scored(RewardsConfig(fn=BY_TEXT), prompt(), ["a", death, "b"])
    assert [result.reward for result in results] == [1.0, 0.0, 1.0]
    assert "crash" in results[1].note and stats["crashes"] == 1 and stats["restarts"] == 1


def test_checks_sent_ahead_to_a_dead_worker_are_done_by_the_next():
    async def inner():
        async with RewardService(RewardsConfig(fn=BY_TEXT)) as service:
            await service.score(prompt(), ["a"] * 200)  # short checks: many are sent ahead from now on
            return await service.score(prompt(), ["a"] * 30 + ["die"] + ["a"] * 30), service.stats()

    results, stats = run(inner())
    assert [result.reward for result in results] == [1.0] * 30 + [0.0] + [1.0] * 30
    assert stats["crashes"] == 1


def test_memory_is_limited_and_the_worker_survives():
    results, stats = scored(RewardsConfig(fn=BY_TEXT), prompt(), ["eat", "b"])
    assert [result.reward for result in results] == [0.0, 1.0]
    assert "memory" in results[0].note and stats["memory"] == 1 and stats["restarts"] == 0


def test_prints_signals_and_mpi_variables_do_not_reach_the_pipes(monkeypatch):
    monkeypatch.setenv("PMI_FD", "7")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    monkeypatch.setenv("HYDI_CONTROL_FD", "8")
    results, stats = scored(RewardsConfig(fn=BY_TEXT), prompt(), ["print", "sigterm", "environment", "b"])
    assert [result.reward for result in results] == [1.0, 1.0, 0.0, 1.0]
    assert stats["restarts"] == 0


def test_checks_run_beside_each_other():
    async def inner():
        async with RewardService(RewardsConfig(fn=BY_TEXT, workers=2)) as service:
            await service.score(prompt(), ["a"] * 8)
            start = time.monotonic()
            await asyncio.gather(*(service.score(prompt(k), ["slow"] * 2) for k in range(4)))
            return time.monotonic() - start

    assert run(inner()) < 2.2  # 8 x 0.3 s one after the other are 2.4 s


def test_a_cancelled_group_is_dropped():
    async def inner():
        async with RewardService(RewardsConfig(fn=BY_TEXT)) as service:
            await service.score(prompt(), ["a"])
            task = asyncio.create_task(service.score(prompt(), ["slow"] * 50))
            await asyncio.sleep(0.1)
            task.cancel()
            start = time.monotonic()
            assert (await service.score(prompt(), ["a"]))[0].reward == 1.0
            return time.monotonic() - start, service.stats()

    seconds, stats = run(inner())
    assert seconds < 5 and stats["checks"] < 20


def test_closing_leaves_no_process():
    async def inner():
        async with RewardService(RewardsConfig(fn=BY_TEXT, workers=2)) as service:
            pids = {int(r.reward) for k in range(8) for r in await service.score(prompt(k), ["pid"])}
            hanging = asyncio.create_task(service.score(prompt(), ["hang"]))
            await asyncio.sleep(0.2)
        with pytest.raises(RewardError, match="closed"):
            await hanging
        return pids

    start = time.monotonic()
    pids = run(inner())
    assert time.monotonic() - start < 10
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


PARENT = """
import asyncio, os
from areal_hpc.config.schema import RewardsConfig
from areal_hpc.rewards.service import RewardService
from areal_hpc.types import Prompt

async def main():
    async with RewardService(RewardsConfig(fn="reward_functions:by_text", timeout_s=60)) as service:
        [result] = await service.score(Prompt(1, ""), ["pid"])
        print(int(result.reward), flush=True)
        await service.score(Prompt(1, ""), ["hang"])

asyncio.run(main())
"""


def test_workers_die_with_their_parent():
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment)
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
