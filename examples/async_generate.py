"""Requests side by side in your own event loop: an engine in a process beside it, outputs as they come.

Run: python examples/async_generate.py [MODEL] (a folder, a .gguf file or a name on the hub; none: the bundled model)
"""

import asyncio
import sys

from quire import AsyncLLM, EngineConfig, SamplingParams


async def answer(llm: AsyncLLM, prompt: str) -> str:
    text = ""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    async for output in llm.generate(prompt, params):  # leaving the loop early cancels the request
        text = output.outputs[0].text
    return f"{prompt!r} -> {text!r}"


async def main() -> None:
    llm = await AsyncLLM.create(EngineConfig(model=sys.argv[1] if len(sys.argv) > 1 else ""))
    try:
        for line in await asyncio.gather(*(answer(llm, f"def {name}(") for name in ("add", "read", "main"))):
            print(line)
    finally:
        await llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
