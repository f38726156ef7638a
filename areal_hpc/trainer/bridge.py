"""Hugging Face weights into this rank's part of the model and back. Called by `megatron`.

mbridge knows which Hugging Face tensors make which Megatron parameter and how they are
cut over tensor-parallel ranks; this module adds names of Megatron's local layers, Llama's
tied embeddings and transformers 5, reads files without communication and exports with one
broadcast and one gather per parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from safetensors import safe_open

from areal_hpc.config.errors import ConfigError
from areal_hpc.trainer.parallel import Place

_BRIDGES = {"qwen2": Qwen2Bridge, "qwen3": Qwen3Bridge, "llama": LLaMABridge, "qwen3_moe": Qwen3MoEBridge}
EMBEDDING = "model.embed_tokens.weight"
_LOCAL_NAMES = {
    "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
}


def make_bridge(hf, dtype: torch.dtype, vocab_rows: int, overrides: dict[str, object]):
    """An mbridge bridge for this model; its `config` is the TransformerConfig to build with."""
    base = _BRIDGES[hf.model_type]

    class Bridge(base):
        _OTHER_MAPPING = {**base._OTHER_MAPPING, **_LOCAL_NAMES}
        # mbridge takes every name with "mlp" in it for a part of the MLP.
        _MLP_MAPPING = {**base._MLP_MAPPING, **_LOCAL_NAMES}
        # A copy: mbridge writes tied embeddings into the class.
        _DIRECT_MAPPING = dict(base._DIRECT_MAPPING)

        def _build_base_config(self, text_config_key=None, **kwargs):
            return super()._build_base_config(text_config_key, **{**kwargs, **overrides})

        def _adjust_mapping_for_shared_weights(self):
            if hf.tie_word_embeddings:
                self._DIRECT_MAPPING["output_layer.weight"] = EMBEDDING

    bridge = Bridge(hf, dtype=dtype, make_vocab_size_divisible_by=1)
    bridge.vocab_size = hf.vocab_size
    bridge.padded_vocab_size = vocab_rows
    return bridge


class HfFolder:
    """Reads tensors of a folder's safetensors files by name."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            self._files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        else:
            self._files = {}
            for file in sorted(self._folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as stream:
                    self._files.update(dict.fromkeys(stream.keys(), file.name))
        if not self._files:
            raise ConfigError(f"model.path={folder} has no *.safetensors file")
        self._streams: dict[str, object] = {}

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise ConfigError(f"model.path={self._folder} has no tensor {name!r}")
        file = self._files[name]
        if file not in self._streams:
            self._streams[file] = safe_open(self._folder / file, framework="pt").__enter__()
        return self._streams[file].get_tensor(name)


def load_weights(bridge, model: torch.nn.Module, folder: str | Path, place: Place) -> None:
    """Fill this rank's parameters from the folder. No communication."""
    source = HfFolder(folder)
    with torch.no_grad():
        for name, parameter in _parameters(bridge, model, place, own_experts=True):
            if name == "output_layer.weight" and parameter.shape[0] == 1:
                continue  # a value head is not in the folder
            tensors = [source.tensor(each) for each in bridge._weight_name_mapping_mcore_to_hf(name)]
            whole = bridge._weight_to_mcore_format(name, tensors)
            # Experts are not cut over tensor-parallel ranks unless ep is 1 (parallel.start).
            size, index = (1, 0) if _is_expert(name) and place.layout.ep > 1 else (place.layout.tp, place.tp_rank)
            part = list(bridge._weight_split_across_tp(name, whole, parameter, size))[index]
            if part.shape != parameter.shape:
                raise ConfigError(
                    f"model.path={folder}: {name} has the shape {tuple(part.shape)} on this rank, "
                    f"config.json gives {tuple(parameter.shape)}"
                )
            parameter.copy_(part)


@dataclass(frozen=True)
class _Entry:
    """One parameter of the whole model as every rank knows it."""

    name: str
    pp_rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: bool
    partition_dim: int


class Exporter:
    """Iterates a model's weights under Hugging Face names; all trainer ranks in lockstep.

    The plan (which parameter lies on which pipeline stage) is exchanged once, at construction.
    """

    def __init__(self, bridge, model: torch.nn.Module, place: Place) -> None:
        from megatron.core import parallel_state

        self._bridge, self._place = bridge, place
        self._parameters = dict(_parameters(bridge, model, place, own_experts=False))
        mine = [
            _Entry(
                name, place.pp_rank, tuple(parameter.shape), parameter.dtype,
                bool(getattr(parameter, "tensor_model_parallel", False)), getattr(parameter, "partition_dim", -1),
            )
            for name, parameter in self._parameters.items()
        ]
        self._pp_group = parallel_state.get_pipeline_model_parallel_group()
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._ep_group = parallel_state.get_expert_model_parallel_group()
        stages: list[list[_Entry]] = [[] for _ in range(place.layout.pp)]
        dist.all_gather_object(stages, mine, group=self._pp_group)
        entries = [entry for stage in stages for entry in stage]
        self._plan: list[_Entry] = []
        names: set[str] = set()
        for entry in entries:
            first = bridge._weight_name_mapping_mcore_to_hf(entry.name)[0]
            # Tied embeddings live on the first and on the last stage: export the first one.
            if first not in names:
                names.add(first)
                self._plan.append(entry)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every weight, in the same order each time and on every rank."""
        bridge, layout = self._bridge, self._place.layout
        with torch.no_grad():
            for entry in self._plan:
                part = self._from_stage(entry)
                if _is_expert(entry.name) and layout.ep > 1:
                    parts = [torch.empty_like(part) for _ in range(layout.ep)]
                    dist.all_gather(parts, part, group=self._ep_group)
                    yield from self._all_experts(entry, parts)
                    continue
                if entry.split and layout.tp > 1:
                    parts = [torch.empty_like(part) for _ in range(layout.tp)]
                    dist.all_gather(parts, part, group=self._tp_group)
                    part.tensor_model_parallel, part.partition_dim = True, entry.partition_dim
                    part = bridge._weight_merge_across_tp(entry.name, parts, part)
                yield from self._converted(entry.name, part)

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, type, shape) of what `tensors` brings, in its order. No communication."""
        bridge, layout = self._bridge, self._place.layout
        found = []
        for entry in self._plan:
            # The same conversions on tensors without data.
            part = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            if _is_expert(entry.name) and layout.ep > 1:
                converted = self._all_experts(entry, [part] * layout.ep)
            else:
                if entry.split and layout.tp > 1:
                    part.tensor_model_parallel, part.partition_dim = True, entry.partition_dim
                    part = bridge._weight_merge_across_tp(entry.name, [part] * layout.tp, part)
                converted = self._converted(entry.name, part)
            found += [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in converted]
        return found

    def _from_stage(self, entry: _Entry) -> torch.Tensor:
        here = entry.pp_rank == self._place.pp_rank
        if here:
            part = self._parameters[entry.name].detach().contiguous()
        else:
            part = torch.empty(entry.shape, dtype=entry.dtype, device=self._place.device)
        if self._place.layout.pp > 1:
            source = dist.get_global_rank(self._pp_group, entry.pp_rank)
            dist.broadcast(part, source, group=self._pp_group)
        return part

    def _all_experts(self, entry: _Entry, parts: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The expert at this local index of every expert-parallel rank."""
        stem, local = entry.name.rsplit(".weight", 1)
        per_rank = self._bridge.config.num_moe_experts // self._place.layout.ep
        for ep_rank, tensor in enumerate(parts):
            yield from self._converted(f"{stem}.weight{ep_rank * per_rank + int(local)}", tensor)

    def _converted(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        names, tensors = self._bridge._weight_to_hf_format(name, tensor)
        for each, value in zip(names, tensors, strict=True):
            yield each, value.contiguous()


def _is_expert(name: str) -> bool:
    return ".mlp.experts.linear_fc" in name


def _parameters(bridge, model: torch.nn.Module, place: Place, *, own_experts: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the whole model as mbridge knows it, parameter) of this rank.

    Experts get their global index with `own_experts`, else their index on this rank.
    """
    experts = getattr(bridge.config, "num_moe_experts", None) or 0
    first = experts // place.layout.ep * (dist.get_rank(_expert_group()) if place.layout.ep > 1 else 0)
    for name, parameter in model.named_parameters():
        if "decoder.layers." in name:
            head, index, rest = _split_layer(name)
            name = f"{head}.{model.decoder.layers[index].layer_number - 1}.{rest}"
        if ".local_experts." in name:
            # mlp.experts.local_experts.3.linear_fc1.weight -> mlp.experts.linear_fc1.weight3
            stem, rest = name.split(".local_experts.")
            expert, rest = rest.split(".", 1)
            name = f"{stem}.{rest}{expert}"
        if own_experts and _is_expert(name):
            stem, local = name.rsplit(".weight", 1)
            name = f"{stem}.weight{first + int(local)}"
        yield name, parameter


def _expert_group():
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_group()


def _split_layer(name: str) -> tuple[str, int, str]:
    head, tail = name.split("decoder.layers.", 1)
    index, rest = tail.split(".", 1)
    return f"{head}decoder.layers", int(index), rest
