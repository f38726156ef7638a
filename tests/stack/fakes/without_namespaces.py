"""The code reward as on a kernel without user namespaces: bubblewrap is not to be had."""

from areal_hpc.rewards import isolation

isolation.candidates = lambda: [isolation.Isolation()]

from areal_hpc.rewards import sandbox  # noqa: E402
from areal_hpc.rewards.code import code_reward  # noqa: E402, F401

sandbox.find_isolation.cache_clear()
