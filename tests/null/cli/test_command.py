"""The command itself: subcommands, exit codes, Ctrl-C, start-up time. No engine runs here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types

import pytest

from quire import __version__
from quire.cli.command import COMMANDS, run
from quire.cli.generate import check_model_argument
from quire.core.errors import ConfigError, ContextLengthExceeded, EngineDead, LoadError, shown


def quire(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def stand_in(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    """Replace `quire serve` by a module whose run() does what a test needs."""
    module = types.ModuleType("quire.cli.serve")
    module.configure = lambda parser: None  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quire.cli.serve", module)


def raising(error: BaseException) -> object:
    def run(_: object) -> int:
        raise error

    return run


def test_version_and_help() -> None:
    assert quire("--version").stdout == f"quire {__version__}\n"
    shown = quire("--help")
    assert shown.returncode == 0 and all(name in shown.stdout for name in COMMANDS)


def test_help_is_quick_and_loads_no_torch() -> None:
    """What takes time is counted, not the time: 151 modules are loaded, 23 of them by Python itself, and 6 more where
    the package is installed as a link to its source."""
    code = (
        "import sys; from quire.cli.main import main; main([])\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'asyncio', 'uvicorn', 'yaml'}\n"
        "print(len(sys.modules), *sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    n_modules, *heavy = done.stdout.splitlines()[-1].split()
    assert int(n_modules) < 170 and not heavy


def test_progress_reaches_stderr_where_a_command_computes_in_this_process() -> None:
    code = """if True:
        import sys, threading, types
        from quire.cli.command import run
        from quire.core import ticker
        ticker.PERIOD_S = 0.01
        def work(_):
            said = threading.Event()
            info = ticker.logger.info
            ticker.logger.info = lambda *a: (info(*a), said.set())
            for _ in ticker.ticked([1], "measuring"):
                said.wait(60)
            return 0
        module = types.ModuleType("quire.cli.kernels")
        module.configure, module.run = lambda parser: None, work
        sys.modules["quire.cli.kernels"] = module
        sys.exit(run(["kernels"]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "measuring: 0 of 1, " in done.stderr and not done.stdout


def test_help_of_every_subcommand_loads_no_torch() -> None:
    code = (
        "import sys; from quire.cli.main import main\n"
        "for words in (['serve'], ['chat'], ['generate'], ['doctor'], ['bench', 'serve'], ['bench', 'latency']):\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as ended: assert ended.code == 0, words\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_no_command_prints_help_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize("words, message", [
    (["srve"], "quire: error: unknown command 'srve'; did you mean serve?"),
    (["generate", "--temperatur", "1"],
     "quire generate: error: unknown option --temperatur; did you mean --temperature?"),
    (["bench", "latency", "--batchsize", "1"],
     "quire bench latency: error: unknown option --batchsize; did you mean --batch-size?"),
    (["generate", "--top-p", "2"], "quire generate: error: argument --top-p: '2' is not allowed"),
    (["quantize", "demo", ""], "quire quantize: error: argument OUTDIR: '' is empty: give a name"),
    (["merge", "demo", "adapter", " "], "quire merge: error: argument OUTDIR: ' ' is empty: give a name"),
    (["run-batch", "-i", "in", "-o", ""], "quire run-batch: error: argument -o/--output-file: '' is empty: give"),
    (["run-batch", "-i", "", "-o", "out"], "quire run-batch: error: argument -i/--input-file: '' is empty: give"),
    (["plan", "train", "--budget", "1e20", "--plot", ""], "quire plan train: error: argument --plot: '' is empty"),
    (["--vers"], "quire: error: unknown option --vers; did you mean --version?"),
])  # fmt: skip
def test_wrong_command_lines_exit_with_2(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("error, code", [
    (ConfigError("--max-num-seqs 0\nis wrong"), 2), (LoadError("no such folder"), 2),
    (ContextLengthExceeded("too long"), 1), (EngineDead("gone"), 1),
])  # fmt: skip
def test_errors_keep_their_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    stand_in(monkeypatch, raising(error))
    assert run(["serve"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines == f"quire: error: {error}".splitlines()


def test_exit_code_of_the_command_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, lambda _: 7)
    assert run(["serve"]) == 7


def test_ctrl_c_ends_with_130_and_one_line() -> None:
    code = (
        "import sys, time, types\n"
        "from quire.cli.main import main\n"
        "module = types.ModuleType('quire.cli.serve'); module.configure = lambda parser: None\n"
        "def run(namespace): print('ready', flush=True); time.sleep(30)\n"
        "module.run = run; sys.modules['quire.cli.serve'] = module\n"
        "sys.exit(main(['serve']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "quire: interrupted"


def test_ctrl_c_ends_a_plan_of_this_machine_where_what_measures_would_swallow_it() -> None:
    code = """
import sys, time, types
module = types.ModuleType("quire.bench.here")
def this_machine(is_cpu):
    print("ready", flush=True)
    try:
        time.sleep(30)
    except KeyboardInterrupt:  # as some libraries do while they load
        sys.exit(77)
module.this_machine = this_machine
sys.modules["quire.bench.here"] = module
from quire.cli.main import main
sys.exit(main(["plan", "demo", "--gpu", "here"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, "quire: interrupted")


def test_hardly_anything_is_imported_before_ctrl_c_is_guarded() -> None:
    """Ctrl-C while a module above the guard loads is a traceback: `signal` and `contextlib` take five times as long as
    all that is there."""
    code = "import sys; before = set(sys.modules); import quire.cli.main; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {"__future__", "importlib", "warnings", "importlib._bootstrap", "importlib._bootstrap_external"}
    own = {"quire", "quire.cli", "quire.cli.main", "quire.core", "quire.core.version"}
    assert set(done.stdout.split()) <= modules | own


def test_a_second_ctrl_c_is_no_traceback_either() -> None:
    """It comes with whatever is imported after the first, which comes while the engine's modules are."""
    code = """
import os, signal, sys
for name in ("contextlib", "signal"):
    sys.modules.pop(name, None)
class Impatient:
    def find_spec(self, name, *rest):
        if name in ("quire.engine.stdio", "contextlib", "signal"):
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Impatient())
from quire.cli.main import main
sys.exit(main(["--version"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT and done.stderr == ""


def test_a_reader_that_leaves_is_no_traceback() -> None:
    process = subprocess.run(
        f"{sys.executable} -m quire bench serve --help | true", shell=True, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert "Traceback" not in process.stderr


def test_model_and_flag_that_disagree_are_refused() -> None:
    done = quire("generate", "one", "--model", "two", "--prompt", "x")
    assert done.returncode == 2
    assert done.stderr == "quire: error: MODEL 'one' and --model 'two' disagree: give one of them\n"


@pytest.mark.parametrize("text", ["import os", "hello", "x = 1 / 2", "long " * 1000])
def test_a_prompt_in_the_place_of_the_model_is_pointed_out(text: str) -> None:
    done = quire("generate", text)
    assert done.returncode == 2
    assert f"is neither a folder nor a hub name such as org/name; did you mean --prompt {shown(text)}?" in done.stderr


@pytest.mark.parametrize("model", ["", "demo", "~", ".", "org/name", "shape:qwen3-0.6b"])
def test_what_may_be_a_model_is_not_taken_for_a_prompt(model: str) -> None:
    check_model_argument(model)


def test_a_prompt_is_needed() -> None:
    done = quire("generate")
    assert done.returncode == 2 and "the prompt on standard input is empty" in done.stderr
