#!/usr/bin/env bash
# Pack what a machine that has GPUs, torch and Triton, but no network, needs for benchmarks/gpu.sh (about 20 MB).
# Usage: benchmarks/pack.sh FOLDER [COMMIT]; take FOLDER there with the checkout, and in the checkout's root:
#   . FOLDER/use.sh && benchmarks/gpu.sh OUTPUT_FOLDER ...
# In it: packages as constraints.txt pins them, for CPython 3.12 on x86-64 Linux; transformers, the oracle of tests;
# Quire's native CPU library as built here; and, if a COMMIT is named, its checkout, which use.sh names in BEFORE.
# PYTHON (.venv/bin/python): one with pip and an index.  MACHINE_PYTHON (3.12): the version there.

set -euo pipefail
refuse() { echo "pack.sh: $*" >&2; exit 2; }
case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;; esac
[ -n "${1:-}" ] || refuse "name a folder (-h: help)"
mkdir -p "$1" && pack=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || refuse "no such program: $python: \`make serve\` makes it, or PYTHON names another"
compgen -G 'quire/kernels/_native/*.so' >/dev/null || refuse "quire/kernels/_native is empty: \`make serve\` builds it"
tests="pytest pytest-timeout pytest-asyncio pytest-xdist execnet iniconfig pluggy hypothesis sortedcontainers regex"
server="msgspec pyzmq starlette uvicorn httptools python-multipart uvloop prometheus_client llguidance tqdm shtab"
clients="aiohttp aiosignal aiohappyeyeballs attrs frozenlist multidict propcache yarl httpx httpcore h11 anyio sniffio"
others="idna certifi click psutil einops fla_core==0.6.0 transformers"

rm -rf "$pack/wheels" "$pack/native" "$pack"/*.tar.xz
platforms=$(for n in 17 24 26 27 28 31 34 35; do echo "--platform manylinux_2_${n}_x86_64"; done)
site=$(mktemp -d) && trap 'rm -rf "$site"' EXIT
"$python" -m pip install -q -c constraints.txt --no-deps --only-binary :all: --implementation cp --no-compile \
  --python-version "${MACHINE_PYTHON:-3.12}" $platforms --platform manylinux2014_x86_64 --target "$site" \
  $tests $server $clients $others
tar -C "$site" --exclude=transformers/cli -c . | xz -9e -T0 >"$pack/site.tar.xz"
cp -r quire/kernels/_native "$pack/native"
[ -z "${2:-}" ] || git archive "$2" quire csrc benchmarks packaging setup.py pyproject.toml constraints.txt \
  ':!quire/_models' ':!benchmarks/results' | xz -9e -T0 >"$pack/before.tar.xz"
cat >"$pack/use.sh" <<'USE'
# To be sourced in a checkout's root; see benchmarks/pack.sh. Fills /tmp/quire-site once.
pack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) site=/tmp/quire-site
if [ ! -e $site/done ]; then
  mkdir -p $site $site-fla && tar -xJf "$pack/site.tar.xz" -C $site &&
    mv $site/fla $site/fla_core-* $site/einops* $site-fla/ && touch $site/done
fi
mkdir -p quire/kernels/_native && cp -n "$pack"/native/* quire/kernels/_native/
if [ -e "$pack/before.tar.xz" ]; then
  export BEFORE=/tmp/quire-before
  mkdir -p $BEFORE/quire/kernels/_native && tar -xJf "$pack/before.tar.xz" -C $BEFORE
  cp -n "$pack"/native/* $BEFORE/quire/kernels/_native/
fi
# fla only beside kernels of states: transformers would take it for models on a CPU
export FLA=$site-fla PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1
# multicast of NVLink can put GPUs of a shared host out of service
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
USE
du -sh "$pack"
