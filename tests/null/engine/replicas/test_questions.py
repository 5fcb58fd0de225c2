"""What a replica that comes is told of adapters, after others were told a thousand times."""

from __future__ import annotations

from quire.core.adapters import AdapterFacts, module_names
from quire.core.commands import Command, LoadAdapter, UnloadAdapter
from quire.core.events import Done, EngineReady, EngineStats
from quire.engine.replicas.questions import ReplicaQuestions
from quire.engine.replicas.stats import ReplicaFigures

READY = EngineReady(128, n_pages=65, page_size=4, logits_width=50, device="cpu")
MODULES = module_names(["m=/m", '{"name": "n", "path": "/n"}'])


class Told:
    """One replica 'a' that does all it is told; what 'b' is told when it comes."""

    def __init__(self) -> None:
        self.figures, self.sent = ReplicaFigures(), list[tuple[str, Command]]()
        self.questions = ReplicaQuestions(self.send, self.figures, lambda _: None, lambda: MODULES)
        self.figures.introduce("a", READY)

    async def send(self, replica: str, command: Command) -> None:
        self.sent.append((replica, command))

    async def do(self, command: LoadAdapter | UnloadAdapter, error: str | None = None) -> None:
        await self.questions.ask(command)
        names = [AdapterFacts(command.name, "/", "hash", 8)] if isinstance(command, LoadAdapter) else []
        self.figures.note("a", EngineStats(adapters=names))
        self.questions.take("a", Done(command.ticket, value=error is None, error=error))

    async def newcomer(self) -> list[tuple[type[Command], str]]:
        self.sent.clear()
        self.figures.introduce("b", READY)
        await self.questions.tell("b")
        assert {replica for replica, _ in self.sent} <= {"b"}
        return [(type(one), one.name) for _, one in self.sent if isinstance(one, LoadAdapter | UnloadAdapter)]


async def test_who_comes_hears_nothing_of_what_is_over() -> None:
    told = Told()
    for i in range(1000):
        await told.do(LoadAdapter(2 * i, f"x{i}", "/x"))
        await told.do(UnloadAdapter(2 * i + 1, f"x{i}"))
    await told.do(LoadAdapter(5000, "y", "/y"))
    await told.do(UnloadAdapter(5001, "nobody"), "no adapter is loaded under the name 'nobody'")
    assert list(told.questions._adapters) == ["y"]
    assert await told.newcomer() == [(LoadAdapter, "y")]


async def test_who_comes_gives_up_the_modules_that_the_others_have_not() -> None:
    told = Told()
    await told.do(LoadAdapter(1, "m", "/other", in_place=True))
    await told.do(UnloadAdapter(2, "m"))
    await told.do(UnloadAdapter(3, "n"), "replica c was lost before it answered: try again")
    assert await told.newcomer() == [(UnloadAdapter, "m"), (UnloadAdapter, "n")]
    told = Told()
    await told.do(UnloadAdapter(1, "m"))
    await told.do(LoadAdapter(2, "m", "/m"))
    assert await told.newcomer() == [(LoadAdapter, "m")]


async def test_what_the_first_that_refuses_blames_is_the_answer() -> None:
    told, answers = Told(), list[Done]()
    told.figures.introduce("b", READY)
    told.questions.on_answer = answers.append  # type: ignore[assignment]
    await told.questions.ask(LoadAdapter(1, "y", "/y"))
    told.questions.take("a", Done(1))
    told.questions.take("b", Done(1, value=False, error="all adapters are in use", param="lora_name"))
    assert answers == [Done(1, value=False, error="all adapters are in use", param="lora_name")]
