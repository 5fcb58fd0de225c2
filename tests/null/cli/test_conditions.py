"""Commands where something about the process is bad: files that are full or closed, folders that are gone, low limits.
Each ends with one clear line and a status, never with a traceback."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
LONG = "/" + "l" * 120


def quire(words: str, shell: str = "", redirect: str = "", folder: pathlib.Path | None = None) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a command in a shell that has run `shell` before."""
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; {shell} "$0" -m quire {words} {redirect}', sys.executable],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False, cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def refusals(commands: list[str], folder: pathlib.Path) -> list[str]:
    """What each `quire` with these words says, all forked from one process that has loaded the server."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *commands], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=200, check=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    ends = json.loads(done.stdout)
    for command, (status, said) in zip(commands, ends, strict=True):
        assert status == 2 and "Traceback" not in said and "Exception ignored" not in said, (command, status, said)
    return [said for _, said in ends]


FORKS = """
import json, os, shlex, signal, sys, tempfile
import quire.cli.bench, quire.cli.run_batch, quire.cli.serve, quire.serve.server
from quire.cli.main import main
ends = []
for command in sys.argv[1:]:
    with tempfile.TemporaryFile() as said:
        if not (child := os.fork()):
            signal.alarm(60)  # one that is not refused is not left behind
            os.dup2(said.fileno(), 2)
            sys.exit(main(shlex.split(command)))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        ends.append((status, said.read().decode()))
print(json.dumps(ends))
"""


@pytest.mark.parametrize("words", ["--help", "serve --help", "--version", "doctor --json"])
def test_output_that_cannot_be_written(words: str) -> None:
    status, _, said = quire(words, redirect=">/dev/full")
    assert status == 1 and said == "quire: error: the output cannot be written: No space left on device\n"
    if words != "doctor --json":  # it takes seconds, and says it in the same way
        assert quire(words, redirect=">/dev/full 2>&1")[0] == 1


@pytest.mark.parametrize("words", ["--help", "nonsense"])
def test_closed_files(words: str) -> None:
    """What belongs to stderr does not come out at stdout when stderr is closed, nor the other way round."""
    status, output, said = quire(words)
    assert quire(words, redirect=">&-") == (status, "", said)
    assert quire(words, redirect="2>&-") == (status, output, "")
    assert quire(words, redirect="<&- >&- 2>&-") == (status, "", "")


def test_a_reader_that_leaves_early() -> None:
    for words in ("doctor --json", "serve --help"):
        assert quire(words, redirect="| head -c 1 >/dev/null")[2] == ""


def test_a_folder_that_is_gone(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    for words in ("serve --device null --port 0", "--version"):
        status, _, said = quire(words, f"mkdir -p {place}; cd {place}; rmdir {place};")
        assert status == 1 and said == "quire: error: the current folder is gone: change to another one\n"


@pytest.mark.parametrize(
    "setting",
    [
        "unset HOME; TMPDIR=/nonexistent COLUMNS=1 TERM=dumb",
        "HOME=/proc TMPDIR=/proc LANG=C LC_ALL=C PYTHONIOENCODING=ascii PYTHONUTF8=0 PYTHONCOERCECLOCALE=0",
    ],
)
def test_odd_surroundings_do_no_harm(setting: str) -> None:
    status, output, said = quire("serve --help", setting)
    assert status == 0 and "--port" in output and not said
    assert quire("bench throughput --device null --num-prompts 2 --input-len 4 --output-len 2", setting)[0] == 0


def test_a_temporary_folder_with_a_long_name(tmp_path: pathlib.Path) -> None:
    place = pathlib.Path(str(tmp_path) + LONG)
    place.mkdir(parents=True)
    status, output, _ = quire("doctor", f"TMPDIR={place}")
    assert status == 0 and "temporary folder" not in output, "another place is found"


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("-n 20", "raise the limit on open files (ulimit -n)"),
        ("-n 10", "raise the limit on open files (ulimit -n)"),
        ("-v 600000", "a library cannot be loaded: "),
        ("-f 0", "raise the limit on the size of files (ulimit -f)"),
    ],
)
def test_low_limits(limit: str, reason: str) -> None:
    status, _, said = quire("serve --device null --port 0", f"ulimit {limit};")
    assert status in (1, 2)
    line = said.splitlines()[-1]
    assert line.startswith("quire: error: ") and reason in line


PATHS = {
    "--api-key-file": ("missing", "folder", "pipe"),
    "--record": ("folder", "pipe", "nowhere"),
    "--data-dir": ("file", "pipe"),
    "--ssl-keyfile": ("missing", "folder", "pipe"),
    "--chat-template": ("missing", "folder", "pipe"),
    "--tokenizer": ("missing", "file", "pipe"),
    "--model": ("missing", "file", "pipe"),
}


def test_paths_of_a_server(tmp_path: pathlib.Path) -> None:
    """One line that has the path and the reason, at once, whatever stands there."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    places = {"nowhere": "none/x"}
    cases = [(flag, kind, tmp_path / places.get(kind, kind)) for flag, kinds in PATHS.items() for kind in kinds]
    certificate = {"--ssl-keyfile": f"--ssl-certfile {tmp_path / 'file'}"}
    commands = [f"serve --device null --port 0 {certificate.get(flag, '')} {flag} {path}" for flag, _, path in cases]
    for (flag, kind, path), said in zip(cases, refusals(commands, tmp_path), strict=True):
        line = said.splitlines()[-1]
        assert line.startswith("quire: error: ") and str(path) in line, line
        if flag not in ("--ssl-keyfile", "--model", "--tokenizer"):
            reasons = {
                "missing": "No such file", "folder": ("folder", "directory"), "nowhere": "No such file",
                "file": ("File exists", "Not a directory"), "pipe": ("a pipe", "File exists", "Not a directory"),
            }  # fmt: skip
            wanted = reasons[kind]
            assert any(word in line for word in ([wanted] if isinstance(wanted, str) else wanted)), line


def test_files_of_other_commands(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "in").write_text("")
    cases = {
        "run-batch -i pipe -o out --device null": "pipe: it is a pipe, not a regular file",
        "run-batch -i in -o pipe --device null": "pipe: it is a pipe that nobody reads",
        "run-batch -i . -o out --device null": ".: it is a folder, not a regular file",
        "bench replay pipe --base-url http://127.0.0.1:9": "pipe cannot be read: it is a pipe, not a regular file",
        "bench throughput --device null --output-json pipe": "--output-json 'pipe' is a pipe: give the name of a file",
        "bench throughput --device null --output-json .": "--output-json '.' is a folder: give the name of a file",
        "bench throughput --device null --plot pipe.html": "",
    }
    os.mkfifo(tmp_path / "pipe.html")
    for reason, said in zip(cases.values(), refusals(list(cases), tmp_path), strict=True):
        assert reason in said.splitlines()[-1], (reason, said)


def test_names(tmp_path: pathlib.Path) -> None:
    cases = [
        ("--served-model-name ''", "is empty: give a value, or leave --served-model-name out"),
        ("--served-model-name ' '", "is empty"),
        ("--served-model-name a a", "is given twice"),
        ("--served-model-name 'a\nb'", "printable"),
        ("--served-model-name ' a'", "begins or ends with a blank"),
        (f"--served-model-name {'x' * 300}", "at most 256"),
        ("--api-key-file ''", "leave --api-key-file out"),
        ("--chat-template ''", "leave --chat-template out"),
        ("--data-dir ''", "leave --data-dir out"),
        ("--host ''", "leave --host out"),
    ]
    ends = refusals([f"serve --port 0 {flags}" for flags, _ in cases], tmp_path)
    for (flags, reason), said in zip(cases, ends, strict=True):
        assert reason in " ".join(said.split()), (flags, said)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--num-gpu-blocks-override 1 --device cpu", "raise --num-gpu-blocks-override to at least 2"),
        ("--num-gpu-blocks-override 1 --device null", "too small"),
        ("--max-model-len 1 --device cpu", "max_model_len of 1"),
    ],
)
def test_sizes_that_the_engine_refuses(flags: str, reason: str) -> None:
    status, _, said = quire(f"serve --port 0 {flags}")
    assert status == 2 and reason in " ".join(said.split()), said
