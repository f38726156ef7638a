"""Which prompts, in which order, a run asks: what a position in them means.

Checked by the launcher before anything starts and by the controller on the nodes.
"""

from __future__ import annotations

import hashlib
from typing import Any

from areal_hpc.config.errors import ConfigError
from areal_hpc.config.schema import Config, OnChange
from areal_hpc.data.datasets import PromptSets


def prompts_identity(config: Config, prompts: PromptSets) -> str:
    """Digest of the training prompts and of their order."""
    order = f"{prompts.digest} seed {config.run.seed} shuffle {config.data.shuffle}"
    return hashlib.sha256(order.encode()).hexdigest()


def check_prompts(config: Config, last_run: dict[str, Any] | None, prompts: PromptSets) -> None:
    """`last_run`: the journal's newest record of a beginning, if there is one.

    Raises ConfigError if that attempt had other prompts, or another order, unless
    data.on_change allows to begin the new ones.
    """
    if last_run is None or config.data.on_change is OnChange.restart:
        return
    now = prompts_identity(config, prompts)
    if last_run["data"] != now:
        raise ConfigError(
            f"data.train, run.seed or data.shuffle is not what this run was last started with (digest {now[:12]}, "
            f"the journal has {last_run['data'][:12]}): restore it, choose another run.folder, or set "
            "data.on_change=restart to go on from the checkpoint with the new prompts from their beginning"
        )
