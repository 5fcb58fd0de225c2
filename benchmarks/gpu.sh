#!/usr/bin/env bash
# GPU tests and measurements on random weights, side by side. Usage: benchmarks/gpu.sh OUTPUT_FOLDER [LANE]...
# A lane is parts with commas between (W1,W2,W4); lanes run at once, each on a GPU of its own, or on those of GPUS ("0 1
# 2,3": the third has two). Parts that begin with @ use all GPUs: they are lanes of their own, and run after the others,
# in turn. tests:A+B are folders or files of tests/gpu. Default: tests,W1,W2,W4.
# BEFORE=FOLDER, a checkout of another commit: W1 to W6 run there too, in the same lane, after ours (files *_before).
# LIMIT_S (250): seconds for a part.  PYTHON (python3).
set -u
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?name an output folder}" && cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- tests,W1,W2,W4
python=${PYTHON:-python3} began=$SECONDS even='{"even_routing": true}'
mxfp4='{"quantization_config": {"quant_method": "mxfp4"}}'

say() { echo "== $((SECONDS - began)) s: $*"; }
run() { # name, command...
  local name=$1 status=0
  shift
  timeout "${LIMIT_S:-250}" "$python" -m "$@" >"$out/$name.log" 2>&1 || status=$?
  say "$name: exit $status"
  grep -vE 'it/s|Loading|^$|^  (warnings|/)' "$out/$name.log" | tail -n "${LINES_SHOWN:-14}" | cut -c1-240
}
bench() { run "$1" quire bench "${@:2}" --output-json "$out/$1.json"; } # name, arguments...
here_and_before() { # name, arguments...
  bench "$@"
  [ -z "${BEFORE:-}" ] || (cd "$BEFORE" && PYTHONPATH="$BEFORE:${PYTHONPATH:-}" bench "$1_before" "${@:2}")
}
tests() { # name, folders...
  LINES_SHOWN=30 run "$1" pytest -q -n "${TEST_PROCESSES:-12}" -p no:cacheprovider --timeout 240 --tb=line "${@:2}"
}
whole() { # name, arguments: every figure of a model's steps, and of a batch
  bench "$1_w6" latency --workload W6 --num-iters 1 --num-iters-warmup 1 --no-view "${@:2}"
  bench "$1_w2" throughput --workload W2 --no-view "${@:2}"
}
part() {
  local dense="--model shape:llama-3.1-8b --no-view"
  case $1 in
    tests) tests tests tests/gpu ;;
    tests:*)
      local those=${1#tests:}
      tests "tests_$(tr / _ <<<"${those%%+*}")" $(printf 'tests/gpu/%s ' ${those//+/ }) ;;
    W1) here_and_before w1 throughput --workload W1 --model shape:qwen3-0.6b --num-repeats 2 --no-view ;;
    W2) here_and_before w2 throughput --workload W2 $dense ;;
    W3) here_and_before w3 throughput --workload W3 --dataset-path "$PWD/benchmarks/w3_lengths.json" $dense ;;
    W4) here_and_before w4_8b latency --workload W4 $dense --num-iters 2 --num-iters-warmup 1 ;;
    W4-0.6b)
      here_and_before w4_06b latency --workload W4 --model shape:qwen3-0.6b --max-model-len 8704 --num-iters 3 --no-view ;;
    W5) here_and_before w5 throughput --workload W5 $dense ;;
    W6) here_and_before w6 latency --workload W6 $dense --num-iters 1 --num-iters-warmup 1 ;;
    fp8 | int4-g128) whole "$1" --model shape:llama-3.1-8b --quantization "$1" --max-model-len 4096 ;;
    qwen3-30b-a3b | deepseek-v2-lite) whole "$1" --model "shape:$1" ;;
    even:*) whole "${1#even:}_even" --model "shape:${1#even:}" --hf-overrides "$even" ;;
    gpt-oss) whole gpt-oss-20b --model shape:gpt-oss-20b --hf-overrides "$mxfp4" ;;
    gemma)
      for n in 1 32; do
        bench "gemma_$n" latency --model shape:gemma-3-1b --max-model-len 32100 --batch-size $n --input-len 32000 \
          --output-len 64 --num-iters 1 --num-iters-warmup 1
      done ;;
    half-pool) # keys and values in 8 bits in the bytes of half a bfloat16 pool
      bench w2_kv_bf16 throughput --workload W2 $dense --num-gpu-blocks-override 16384
      bench w2_kv_half throughput --workload W2 $dense --num-gpu-blocks-override 8192
      bench w2_kv_fp8 throughput --workload W2 $dense --num-gpu-blocks-override 16384 --kv-cache-dtype fp8 ;;
    adapters)
      run adapters benchmarks.adapters quire/bench/shapes/llama-3.1-8b --load-format dummy --device cuda \
        --json "$out/adapters.json" ;;
    grouped) run grouped benchmarks.grouped_product --output "$out/grouped_product.json" ;;
    numerics) run numerics quire doctor numerics --device cuda --json "$out/numerics.json" ;;
    kernels:*)
      LINES_SHOWN=60 run "kernels_${1#kernels:}" quire bench kernels --ops "${1#kernels:}" --device cuda \
        --time-limit 0 --output "$out/kernels_${1#kernels:}.json" ;;
    @ranks) TEST_PROCESSES=4 tests ranks tests/gpu/engine/test_ranks_cuda.py tests/gpu/compute/dist ;;
    @nodes) TEST_PROCESSES=2 tests nodes tests/gpu/engine/test_nodes_cuda.py ;;
    @replicas) run replicas benchmarks.replicas_throughput --replicas "$(nvidia-smi -L | wc -l)" --output "$out/replicas.json" ;;
    *) echo "unknown part: $1" >&2; return 2 ;;
  esac
}
lane() { for each in ${1//,/ }; do part "$each"; done; }

gpus=(${GPUS:-0 1 2 3 4 5 6 7}) n=0
for lane in "$@"; do
  [ "${lane:0:1}" = @ ] && continue
  CUDA_VISIBLE_DEVICES=${gpus[n]} lane "$lane" >"$out/lane$n.txt" 2>&1 &
  n=$((n + 1))
done
wait
cat "$out"/lane*.txt 2>/dev/null
for lane in "$@"; do [ "${lane:0:1}" != @ ] || lane "$lane"; done
