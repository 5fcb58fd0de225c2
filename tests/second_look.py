"""`--second-look N`: up to N tests that failed beside others run once more, one after the other and alone.

For CI, where hundreds of processes are started and killed on two cores. What fails again has failed. What passes is
named at the end: a race to be mended, in the test or in Quire.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTION = "--second-look"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=int, default=0, metavar="N", help="tries up to N failed tests again, alone")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    most: int = config.getoption(OPTION)
    if not most or exitstatus != pytest.ExitCode.TESTS_FAILED or hasattr(config, "workerinput"):
        return
    reporter = config.pluginmanager.getplugin("terminalreporter")
    failed = sorted({report.nodeid for kind in ("failed", "error") for report in reporter.stats.get(kind, [])})
    if not 0 < len(failed) <= most:
        return
    command = [sys.executable, "-m", "pytest", "--tb=long", "-p", "no:cacheprovider", "-n", "0", OPTION, "0", *failed]
    reporter.write_sep("=", f"a second look at {len(failed)} of them, alone")
    sys.stdout.flush()
    if subprocess.run(command, cwd=config.rootpath, check=False).returncode == 0:
        session.exitstatus = pytest.ExitCode.OK
        config.stash[_RACES] = failed


_RACES = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    for name in config.stash.get(_RACES, []):
        print(f"failed beside others and passed alone, mend it: {name}", flush=True)
