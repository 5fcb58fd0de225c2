"""`quire doctor [MODEL]`: what this machine has, or what a model is; what is wrong, and what to do. Exit code 1 if
serving cannot work. `quire doctor numerics [MODEL]` is `cli/numerics`.

Owns the checks, each a small function from the machine to `Finding`s. Invariant: a check reports, it never raises.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import errno
import importlib
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator

from quire import __version__
from quire.bench import machine
from quire.bench.shape import PREFIX, shape_options
from quire.cli import numerics
from quire.cli.interrupt import instant_exit
from quire.config.arch import ModelArch
from quire.config.flags import FlagParser
from quire.config.model import read_arch
from quire.config.parts import parts
from quire.config.unread import unread_keys
from quire.core import env, host
from quire.core.errors import ConfigError, QuireError, shown
from quire.core.units import format_bytes
from quire.engine.wire import SOCKET, socket_folder
from quire.serve.config import ServerConfig

MIN_PYTHON = (3, 11)
TORCH_RANGE = ((2, 11), (2, 14))
"""Versions of torch that Quire is tested with: from the first, below the second."""
NEEDED = {
    "msgspec": "msgspec", "zmq": "pyzmq", "safetensors": "safetensors", "tokenizers": "tokenizers", "jinja2": "jinja2",
    "starlette": "starlette", "uvicorn": "uvicorn", "httptools": "httptools", "prometheus_client": "prometheus_client",
}  # fmt: skip
"""Module → package that serving imports."""
MIN_MEMORY_BYTES = 2 * 2**30
MIN_DISK_BYTES = 2**30
MIN_OPEN_FILES = 4096
DEFAULT_PORT = 8000
LISTED = 8
"""Most keys of a config.json in one line."""


@enum.unique
class Status(enum.Enum):
    """How bad a finding is. Only `FAIL` means that serving cannot work."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "FAIL"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    value: str
    advice: str = ""


Findings = Iterator[Finding]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model_argument", nargs="?", default=None, metavar="MODEL",
        help="folder, .gguf file or shape:NAME: say which parts it is read as and whether it runs, not what the "
        "machine has",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.epilog = "quire doctor numerics [MODEL] compares kernels and a model with float64; see its --help"
    if isinstance(parser, FlagParser):
        numerics.configure(parser.add_mode(numerics.NAME, numerics.MEANING))


def run(namespace: argparse.Namespace) -> int:
    """Print the findings; returns 1 if one of them is a failure."""
    model = getattr(namespace, "model_argument", None)
    if model == numerics.NAME:
        raise ConfigError("numerics comes first: quire doctor numerics [MODEL]; a folder of this name is ./numerics")
    with instant_exit():
        findings = examine() if model is None else list(check_model(model))
    failed = any(finding.status is Status.FAIL for finding in findings)
    if namespace.json:
        rows = [dataclasses.asdict(finding) | {"status": finding.status.value} for finding in findings]
        print(json.dumps({"quire": __version__, "can_serve": not failed, "findings": rows}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.status.value:>4}  {finding.name:<18}{finding.value}")
            if finding.advice:
                print(f"{'':24}→ {finding.advice}")
        warned = any(finding.status is Status.WARN for finding in findings)
        runs = "This model runs as far as the warnings above say." if warned else "This model runs."
        good = "This machine can serve." if model is None else runs
        bad = (
            "Serving cannot work until the failures above are mended." if model is None else "This model does not run."
        )
        print(bad if failed else good)
    return 1 if failed else 0


def examine() -> list[Finding]:
    """Every check in order."""
    checks: tuple[Callable[[], Findings], ...] = (
        check_python, check_packages, check_processor, check_memory, check_torch, check_gpus, check_triton,
        check_native, check_demo, check_cache, check_files, check_port, check_environment,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def check_model(model: str) -> Findings:
    """Which parts a model is read as, and whether its tensors are those; the key or tensor that stands against it. Of a
    bundled shape there is nothing but its parts."""
    try:
        is_shape = model.startswith(PREFIX)
        if is_shape:
            model = str(shape_options(model)["model"])
        hub = importlib.import_module("quire.compute.weights.hub")
        if hub.is_on_hub(model):
            raise ConfigError(f"{shown(model)} is neither a folder nor a file here; doctor fetches nothing")
        folder = hub.find_checkpoint(model)
        yield Finding("model", Status.OK, str(folder))
        arch = read_arch(folder)
    except (ImportError, OSError, QuireError) as error:
        yield Finding("model", Status.FAIL, str(error))
        return
    for name, text in parts(arch):
        yield Finding(name, Status.OK, text)
    yield from _check_keys(folder)
    if is_shape:
        yield Finding("tensors", Status.NOTE, "none: the weights of a shape are random (--load-format dummy)")
        return
    yield from _check_tokenizer(folder, arch)
    try:
        n_shards, n_tensors = importlib.import_module("quire.compute.weights.loader").fits(folder, arch)
    except (ImportError, OSError, QuireError) as error:
        yield Finding("tensors", Status.FAIL, str(error))
        return
    yield Finding("tensors", Status.OK, f"all {n_tensors} in {n_shards} {'files' if n_shards > 1 else 'file'} fit")


def _check_keys(folder: pathlib.Path) -> Findings:
    """Keys that nothing reads."""
    names = [] if folder.is_file() else unread_keys(folder)
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        advice = "if one of them changes what the model computes, its tokens will be others than they should be"
        yield Finding("keys not read", Status.NOTE, ", ".join(map(shown, names[:LISTED])) + more, advice)


def _check_tokenizer(folder: pathlib.Path, arch: ModelArch) -> Findings:
    """Whether there is one that can be read."""
    try:
        n_tokens = len(importlib.import_module("quire.text.tokenizer").HfTokenizer.load(folder, arch.vocab_size))
    except (ImportError, OSError, QuireError) as error:
        yield Finding("tokenizer", Status.WARN, str(error))
        return
    yield Finding("tokenizer", Status.OK, f"{n_tokens:,} tokens")


def check_python() -> Findings:
    """Version and platform."""
    good = sys.version_info >= MIN_PYTHON
    advice = "" if good else "use Python 3.11 or newer"
    yield Finding("quire", Status.OK, f"{__version__} {machine.commit()[:12]}".strip())
    yield Finding("python", Status.OK if good else Status.FAIL, platform.python_version(), advice)
    linux = platform.system() == "Linux"
    advice = "" if linux else "only Linux is tested"
    yield Finding("system", Status.OK if linux else Status.WARN, f"{platform.system()} {platform.machine()}", advice)


def check_packages() -> Findings:
    """Packages without which the server does not start."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        yield Finding("packages", Status.FAIL, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield Finding("packages", Status.OK, f"all {len(NEEDED)} that serving imports are installed")


def check_processor() -> Findings:
    """Cores and instruction sets."""
    flags = machine.isa_flags()
    yield Finding("processor", Status.OK, f"{machine.cpu_model()}, {machine.n_cores()} cores usable")
    slow = platform.machine() == "x86_64" and "avx2" not in flags
    advice = "without AVX2 the CPU kernels run in their slowest form" if slow else ""
    yield Finding("instruction sets", Status.WARN if slow else Status.OK, " ".join(flags) or "none known", advice)


def check_memory() -> Findings:
    """Main memory, a container's limit counted in, and the limit on address space if there is one."""
    total, available = machine.memory_bytes()
    low = 0 < available < MIN_MEMORY_BYTES
    advice = f"less than {format_bytes(MIN_MEMORY_BYTES)} is free: only the demo model is likely to fit" if low else ""
    text = f"{format_bytes(total)}, {format_bytes(available)} free" if total else "unknown"
    yield Finding("memory", Status.WARN if low else Status.OK, text, advice)
    left = host.address_bytes()
    if left < host.UNLIMITED:
        low = left < MIN_MEMORY_BYTES
        advice = "raise the limit (ulimit -v unlimited): models are mapped under it" if low else ""
        text = f"{format_bytes(left)} left under the limit of ulimit -v"
        yield Finding("address space", Status.WARN if low else Status.NOTE, text, advice)


def check_torch() -> Findings:
    """Torch can be imported and is of a tested version."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield Finding("torch", Status.FAIL, f"cannot be imported: {error}", "pip install 'torch>=2.11,<2.14'")
        return
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    tested = found is not None and TORCH_RANGE[0] <= (int(found[1]), int(found[2])) < TORCH_RANGE[1]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    text = f"{torch.__version__}, {build}, {torch.get_num_threads()} threads"
    advice = "" if tested else "Quire is tested with torch 2.11 to 2.13"
    yield Finding("torch", Status.OK if tested else Status.WARN, text, advice)


def check_gpus() -> Findings:
    """GPUs as the driver and as torch see them; they must agree."""
    driver = machine.gpus()
    for gpu in driver:
        yield Finding("gpu", Status.OK, f"{gpu['name']}, {gpu['memory.total']}, driver {gpu['driver_version']}")
    try:
        cuda = importlib.import_module("quire.compute.device.cuda")
    except (ImportError, OSError):
        return  # torch is broken, which its own check has said
    if not driver and not cuda.is_available():
        yield Finding("gpu", Status.NOTE, "none: models run on the CPU")
    elif not cuda.is_available():
        yield Finding(
            "cuda", Status.WARN, "the driver lists a GPU that torch cannot use",
            "install a CUDA build of torch that this driver supports (see pytorch.org), or serve with --device cpu",
        )  # fmt: skip
    else:
        for line in cuda.describe():
            yield Finding("cuda", Status.OK, line)


def check_triton() -> Findings:
    """Triton compiles the GPU kernels; a CPU needs none."""
    needed = bool(machine.gpus())
    try:
        yield Finding("triton", Status.OK, importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        advice = "pip install triton: the GPU kernels need it" if needed else ""
        status = Status.WARN if needed else Status.NOTE
        yield Finding("triton", status, "not installed", advice)


def check_native() -> Findings:
    """The compiled CPU kernels."""
    try:
        native = importlib.import_module("quire.kernels.native")
    except (ImportError, OSError) as error:
        yield Finding("cpu kernels", Status.WARN, f"cannot be looked at: {error}")
        return
    yield Finding("cpu kernels", Status.OK if native.library() is not None else Status.WARN, native.explain())


def check_demo() -> Findings:
    """The bundled model that `quire serve` serves by default."""
    try:
        hub = importlib.import_module("quire.compute.weights.hub")
        folder = hub.find_checkpoint("")
    except (ImportError, OSError, QuireError) as error:
        yield Finding("demo model", Status.WARN, str(error), "name a model: quire serve MODEL")
        return
    n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    yield Finding("demo model", Status.OK, f"{folder.name}, {format_bytes(n_bytes)}")


def check_cache() -> Findings:
    """The folder for kernels built on demand can be written and has room."""
    folder = env.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            n_free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = "set QUIRE_CACHE_DIR to a folder that can be written: kernels built on demand are kept there"
        yield Finding("cache folder", Status.WARN, f"{folder}: {error.strerror}", advice)
        return
    low = n_free < MIN_DISK_BYTES
    advice = "free some disk space" if low else ""
    yield Finding("cache folder", Status.WARN if low else Status.OK, f"{folder}, {format_bytes(n_free)} free", advice)


def check_files() -> Findings:
    """Open files bound the connections; a temporary folder holds the engine's socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES
    advice = f"raise the hard limit (ulimit -Hn) to serve more than about {hard // 2} clients" if low else ""
    yield Finding("open files", Status.WARN if low else Status.OK, f"limit {soft}, at most {hard}", advice)
    try:
        folder = socket_folder()
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(str(folder.path / SOCKET))
        finally:
            folder.remove()
    except (OSError, ConfigError) as error:
        advice = "point TMPDIR to a short path on a local disk: the server talks to its engine through a socket there"
        yield Finding("temporary folder", Status.FAIL, str(error), advice)


def check_port(port: int = DEFAULT_PORT) -> Findings:
    """The server's default port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            advice = "serve on another port (--port N)" + (", or stop the program that listens there" if taken else "")
            yield Finding(f"port {port}", Status.WARN, "in use" if taken else str(error.strerror), advice)
            return
    yield Finding(f"port {port}", Status.OK, "free")


def check_environment() -> Findings:
    """Variables that Quire reads and that are set; values of keys stay hidden."""
    try:
        ServerConfig().verify()
    except ConfigError as error:
        yield Finding("environment", Status.FAIL, str(error), "unset QUIRE_API_KEY or give it a proper value")
    for name in env.VARIABLES:
        value = env.read(name)
        if value:
            yield Finding("environment", Status.NOTE, f"{name}={'***' if name.endswith('KEY') else value}")
    for name in env.unknown():
        yield Finding("environment", Status.WARN, f"{name} is set", f"Quire reads only {', '.join(env.VARIABLES)}")
