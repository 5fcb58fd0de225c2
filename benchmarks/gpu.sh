#!/usr/bin/env bash
# GPU tests, then the workloads on random weights. Usage: benchmarks/gpu.sh OUTPUT_FOLDER [tests|W1|W2|W4|...]...
set -u
cd "$(dirname "$0")/.."
out=${1:?name an output folder}
shift
[ $# -gt 0 ] || set -- tests W1 W2 W4
mkdir -p "$out"
bench() { # name, model, arguments...
  local name=$1 model=$2
  shift 2
  timeout 300 python3 -m quire bench "$@" --model "shape:$model" --output-json "$out/$name.json" >"$out/$name.log" 2>&1
  echo "== $name: exit $?"
  grep -vE 'it/s|Loading|^$' "$out/$name.log" | tail -n 14
}
for what in "$@"; do
  case $what in
    tests) timeout 420 python3 -m pytest -q -x --timeout 200 -p no:cacheprovider tests/gpu 2>&1 | tee "$out/tests.log" | tail -n 25 ;;
    W1) bench w1 qwen3-0.6b throughput --workload W1 ;;
    W2) bench w2 llama-3.1-8b throughput --workload W2 ;;
    W3) bench w3 llama-3.1-8b throughput --workload W3 --dataset-path "$W3_LENGTHS" ;;
    W4) bench w4_8b llama-3.1-8b latency --workload W4 --num-iters 3 --num-iters-warmup 1
        bench w4_06b qwen3-0.6b latency --workload W4 --num-iters 3 --num-iters-warmup 1 --max-model-len 8704 ;;
    W5) bench w5 llama-3.1-8b throughput --workload W5 ;;
    W6) bench w6 llama-3.1-8b latency --workload W6 --num-iters 2 --num-iters-warmup 1 ;;
    *) echo "unknown part: $what" >&2; exit 2 ;;
  esac
done
