"""`quire completion`: what the shells offer after a few letters, in the shells that are installed."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from quire.cli.command import COMMANDS, run
from quire.cli.completion import SHELLS, script
from quire.config.engine import EngineConfig
from quire.config.options import describe

ASK_BASH = """source {script}
words=({words})
COMP_WORDS=(quire "${{words[@]}}")
COMP_CWORD={position}
$(complete -p quire | sed 's/.*-F \\([^ ]*\\).*/\\1/') quire "{last}" "{previous}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def bash_offers(path: pathlib.Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    quoted = " ".join(f"'{word}'" for word in words)
    previous = ("quire", *words)[-2]
    text = ASK_BASH.format(script=path, words=quoted, position=len(words), last=words[-1], previous=previous)
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("completion") / "quire.bash"
    path.write_text(script("bash"))
    return path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("se",), ["serve"]),
        (("serve", "--max-num-s"), ["--max-num-seqs"]),
        (("serve", "--dtype", ""), ["auto", "bfloat16", "float16", "float32"]),
        (("bench", "lat"), ["latency"]),
        (("completion", ""), list(SHELLS)),
    ],
)
def test_what_bash_offers(bash_script: pathlib.Path, words: tuple[str, ...], offered: list[str]) -> None:
    assert bash_offers(bash_script, *words) == offered


def test_files_are_offered_where_files_are_named(bash_script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "options.yaml").touch()
    assert bash_offers(bash_script, "serve", "--config", f"{tmp_path}/opt") == [f"{tmp_path}/options.yaml"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_every_option_is_in_the_script(shell: str) -> None:
    text = script(shell)
    flags = [option.flag for option in describe(EngineConfig)]
    assert not [flag for flag in flags if flag.removeprefix("--") not in text]
    assert not [command for command in COMMANDS if command not in text]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_its_script(shell: str, tmp_path: pathlib.Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = tmp_path / "script"
    path.write_text(script(shell))
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_another_shell_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "no completion for 'tcsh'; there is for bash, zsh, fish" in capsys.readouterr().err
