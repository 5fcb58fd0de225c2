"""Adapters of one worker: read from folders, kept on the host, and put into places beside the model.

Owns what is kept on the host, by content. Does not own places on the device (`places`), files (`files`), nor which
adapter is where (`control/adapters`). Invariant: without --enable-lora nothing is kept, and it costs no memory.
"""

from __future__ import annotations

import logging

import torch

from quire.compute.adapters.files import read_adapter
from quire.compute.adapters.places import Kept, adapters_on, device_bytes
from quire.compute.device.device import Device
from quire.compute.dist.comm import Comm
from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder, decoder_on
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.experts import ExpertsSpec
from quire.config.resolve import n_kept
from quire.config.stages import LayerRange
from quire.core.errors import ConfigError, EngineError, LoadError, shown
from quire.core.host import free_bytes
from quire.core.plan import AdapterPut
from quire.core.units import format_bytes

logger = logging.getLogger("quire.engine")


class HostAdapters:
    """See the module."""

    def __init__(self, config: EngineConfig, device: Device) -> None:
        self._config, self._device = config, device
        self._kept: dict[str, Kept] = {}
        self._model: Decoder | None = None
        """Which has places."""

    def places_bytes(self, arch: ModelArch, dtype: torch.dtype, comm: Comm, layers: LayerRange) -> int:
        """Of the places on the device. arch: the whole model; comm, layers: see `Decoder`."""
        config = self._config
        if not config.enable_lora:
            return 0
        model = decoder_on(torch.device("meta"), arch, dtype, 1, comm=comm, layers=layers)
        sizes = config.max_loras, config.max_lora_rank, dtype
        return device_bytes(self._device, model.adaptable(), *sizes, self._experts(model))

    def _experts(self, model: Decoder) -> list[Experts]:
        """Those that adapters may be of."""
        return [one for layer in model.layers if isinstance(one := layer.ffn, Experts) and self._config.lora_experts]

    def attach(self, model: Decoder, dtype: torch.dtype) -> int:
        """Places around a finished model's products; bytes that they take."""
        config = self._config
        if not config.enable_lora:
            return 0
        linears, experts = list(model.adaptable()), self._experts(model)
        if config.lora_experts and not any(isinstance(one.ffn, ExpertsSpec) for one in model.parts.whole.layers):
            raise ConfigError("lora_experts = True, and the model has no experts: leave --lora-experts out")
        self._model = model
        one_bytes, free = device_bytes(self._device, linears, 1, config.max_lora_rank, dtype, experts), free_bytes()
        if n_kept(config) * one_bytes > free > 0:
            logger.warning(
                "the host keeps up to %d adapters of %s each, more than the %s that are free: lower --max-cpu-loras or"
                " --max-lora-rank, or some of them will not be loaded",
                n_kept(config), format_bytes(one_bytes), format_bytes(free),
            )  # fmt: skip
        model.adapters = adapters_on(self._device, linears, config.max_loras, config.max_lora_rank, dtype, experts)
        return model.adapters.n_bytes

    def detach(self) -> None:
        """The model is given up; what is kept stays."""
        self._model = None

    def read_adapter(self, path: str, root: str) -> tuple[str, int, Kept]:
        """Read an adapter from its folder: (hash of its content, its rank, what `keep_adapter` takes). May be called in
        any thread. root: folder in which it must lie, empty: anywhere. Raises LoadError and ConfigError."""
        model = self._model
        if not self._config.enable_lora:
            raise ConfigError("this engine has no adapters: start it with --enable-lora", param="enable_lora")
        if model is None or model.adapters is None:
            raise ConfigError("the engine sleeps, and its model is not in memory: wake it up first", param="lora_path")
        adapter = read_adapter(path, root, model, self._config.max_lora_rank, with_experts=self._config.lora_experts)
        try:
            return adapter.content_id, adapter.rank, model.adapters.keep(adapter)
        except (MemoryError, RuntimeError) as error:  # torch says the latter
            raise LoadError(
                f"adapter {shown(path)}: no memory on the host for it ({str(error).splitlines()[0]}): lower"
                " --max-cpu-loras or --max-lora-rank"
            ) from None

    def keep_adapter(self, content_id: str, kept: Kept) -> None:
        """For plans that put it into a place."""
        self._kept[content_id] = kept

    def drop_adapter(self, content_id: str) -> None:
        """It is kept no longer; places on the device keep what they have."""
        self._kept.pop(content_id, None)

    def put(self, put: AdapterPut) -> None:
        """Into its place. Raises EngineError if it is not kept."""
        kept = self._kept.get(put.content_id)
        if kept is None or self._model is None or self._model.adapters is None:
            raise EngineError(f"adapter {put.content_id} is not on the host")
        self._model.adapters.put(put.place, kept)
