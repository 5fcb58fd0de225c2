"""What an operator asks of the engine of an `AsyncLLM`. Owns the calls, not how they travel (`questions`)."""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.core.adapters import LoRARequest, check_adapter_name
from quire.core.commands import LoadAdapter, ResetPrefixCache, Sleep, UnloadAdapter, WakeUp
from quire.core.errors import InvalidParameter, RequestError
from quire.core.events import EngineStats
from quire.engine.questions import Questions
from quire.engine.sleep import check_sleep, check_wake


class Orders:
    """A part of `AsyncLLM`."""

    config: EngineConfig
    model_name: str
    _questions: Questions
    _stats: EngineStats

    async def reset_prefix_cache(self) -> bool:
        """Forget the pages that no open request holds; True if none are left. Raises EngineLost or EngineDead."""
        return await self._questions.order(ResetPrefixCache)

    async def sleep(self, level: int = 1) -> None:
        """End every request and give memory back, as `LLM.sleep`. Raises SleepFailed, EngineLost or EngineDead too."""
        check_sleep(self.config, level)
        await self._questions.order(lambda ticket: Sleep(ticket, level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what `sleep` gave up, and take requests again. Raises as `sleep`, and sleeps on then."""
        check_wake(self.config, tags)
        await self._questions.order(WakeUp)

    async def is_sleeping(self) -> bool:
        """True between `sleep` and the end of `wake_up`, whoever asked for them."""
        return self._stats.is_asleep

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, from inside the folder of --lora-root. Raises RequestError with the reason, EngineLost or
        EngineDead."""
        name, path, in_place = lora_request.lora_name, lora_request.lora_path, lora_request.load_inplace
        check_adapter_name(name)
        if name in (*self.config.served_model_name, self.model_name):
            raise InvalidParameter("lora_name", name, "another name than the model's")
        return await self._questions.order(lambda ticket: LoadAdapter(ticket, name, path, in_place), RequestError)

    async def remove_lora(self, lora_name: str) -> bool:
        """New requests cannot name it; open ones end with it. Raises as `add_lora`."""
        return await self._questions.order(lambda ticket: UnloadAdapter(ticket, lora_name), RequestError)
