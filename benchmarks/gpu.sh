#!/usr/bin/env bash
# GPU tests and measurements on random weights, side by side. Usage: benchmarks/gpu.sh OUTPUT_FOLDER [LANE]...
# A lane is parts with commas between (W1,W2,W4); lanes run at once, each on a GPU of its own, or on those of GPUS ("0 1
# 2,3": the third has two). Parts that begin with @ use all GPUs: they are lanes of their own, and run after the others,
# in turn. Exit status: 0 all parts ended well, 1 one failed, 2 nothing was started. Parts; without any tests,W1,W2,W4:
#   tests  tests:A+B  @ranks  @nodes  @divisions        all of tests/gpu; files or folders of it; those of several GPUs
#   W1 W2 W3 W4 W4-0.6b W5 W6                           workloads: the 8B shape, W1 and W4-0.6b that of 0.6B
#   fp8 int4-g128 qwen3-30b-a3b deepseek-v2-lite gpt-oss even:SHAPE    W6 and W2; even: rows take experts in turn
#   gemma  half-pool  adapters  grouped  numerics       prompts of 32,000; 8-bit keys; scripts; `quire doctor numerics`
#   kernels:OP  calibrate  @replicas                    one op of `quire bench kernels`; costs of steps; an engine a GPU
#   @traffic  @context  @bubbles  @table                docs/parallel-experiments.md
#   @faults                                             ranks killed, stopped, out of memory: TIMES (5) each, 250 s
# BEFORE=FOLDER, a checkout of another commit: W1 to W6 run there too, in the same lane, after ours (files *_before).
# GPUS: else those of CUDA_VISIBLE_DEVICES, or nvidia-smi.  LIMIT_S (250): seconds for a part.  PYTHON (python3).
# FLA: a folder with flash-linear-attention, for `kernels` alone. benchmarks/pack.sh makes all this for a machine without
# a network.

set -u
refuse() { echo "gpu.sh: $*" >&2; exit 2; }
case ${1:-} in -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;; esac
[ -n "${1:-}" ] || refuse "name an output folder (-h: help)"
out=$(mkdir -p "$1" && cd "$1" && pwd) || refuse "no output folder: $1"
shift
[ $# -gt 0 ] || set -- tests,W1,W2,W4
before=${BEFORE:+$(cd "$BEFORE" && pwd)} || refuse "BEFORE is no folder: $BEFORE"
python=$(type -P "${PYTHON:-python3}") || refuse "no such program: ${PYTHON:-python3}"
[ "${python:0:1}" = / ] || python=$PWD/$python
cd "$(dirname "$0")/.." || exit 2
began=$SECONDS failed=0 is_check='' even='{"even_routing": true}'
mxfp4='{"quantization_config": {"quant_method": "mxfp4"}}'

say() { echo "== $((SECONDS - began)) s: $*"; }
run() { # name, command...
  local name=$1 status=0
  [ -z "$is_check" ] || return 0
  shift
  timeout -s INT -k 15 "${LIMIT_S:-250}" "$python" -m "$@" >"$out/$name.log" 2>&1 || status=$? failed=1
  say "$name: exit $status"
  grep -vE 'it/s|Loading|^$|^  (warnings|/)' "$out/$name.log" | tail -n "${LINES_SHOWN:-14}" | cut -c1-240
}
bench() { run "$1" quire bench "${@:2}" --device cuda --output-json "$out/$1.json"; } # name, arguments...
here_and_before() { # name, arguments...
  bench "$@"
  [ -z "$before" ] || (
    cd "$before" || exit 1
    PYTHONPATH="$before:${PYTHONPATH:-}" bench "$1_before" "${@:2}"
    exit $failed
  ) || failed=1
}
count() { wc -w <<<"${1//,/ }"; } # GPUs
tests() { # name, folders...
  for each in "${@:2}"; do [ -e "$each" ] || refuse "no such tests: $each"; done
  local n_gpus=$(count "${CUDA_VISIBLE_DEVICES:-}")
  [ -n "$is_check" ] || [ "$n_gpus" -ge 4 ] || say "$1: tests that need more GPUs than $n_gpus are skipped"
  LINES_SHOWN=30 run "$1" pytest -q -n "${TEST_PROCESSES:-12}" -p no:cacheprovider --timeout 240 \
    --tb="${TB:-line}" "${@:2}"
}
decks() { run "$1" "benchmarks.$1" --device cuda --output "$out/$1.json" "${@:2}"; } # script, arguments...
whole() { # name, arguments: every figure of a model's steps, and of a batch
  bench "$1_w6" latency --workload W6 --num-iters 1 --num-iters-warmup 1 --no-view "${@:2}"
  bench "$1_w2" throughput --workload W2 --no-view "${@:2}"
}
part() {
  local dense="--model shape:llama-3.1-8b --no-view" small="--model shape:qwen3-0.6b --no-view"
  case $1 in
    tests) tests tests tests/gpu ;;
    tests:?*)
      local those=${1#tests:}
      tests "tests_$(tr / _ <<<"${those%%+*}")" $(printf 'tests/gpu/%s ' ${those//+/ }) ;;
    W1) here_and_before w1 throughput --workload W1 $small --num-repeats 2 ;;
    W2) here_and_before w2 throughput --workload W2 $dense ;;
    W3) here_and_before w3 throughput --workload W3 --dataset-path benchmarks/w3_lengths.json $dense ;;
    W4) here_and_before w4_8b latency --workload W4 $dense --num-iters 2 --num-iters-warmup 1 ;;
    W4-0.6b) here_and_before w4_06b latency --workload W4 $small --max-model-len 8704 --num-iters 3 ;;
    W5) here_and_before w5 throughput --workload W5 $dense ;;
    W6) here_and_before w6 latency --workload W6 $dense --num-iters 1 --num-iters-warmup 1 ;;
    fp8 | int4-g128) whole "$1" --model shape:llama-3.1-8b --quantization "$1" --max-model-len 4096 ;;
    qwen3-30b-a3b | deepseek-v2-lite) whole "$1" --model "shape:$1" ;;
    even:?*) whole "${1#even:}_even" --model "shape:${1#even:}" --hf-overrides "$even" ;;
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
    calibrate) run calibrate quire bench calibrate --device cuda --output "$out/calibration.json" ;;
    numerics) run numerics quire doctor numerics --device cuda --json "$out/numerics.json" ;;
    kernels:?*)
      PYTHONPATH=${FLA:+$FLA:}${PYTHONPATH:-} LINES_SHOWN=60 run "kernels_${1#kernels:}" quire bench kernels --ops "${1#kernels:}" --device cuda \
        --time-limit 0 --output "$out/kernels_${1#kernels:}.json" ;;
    @ranks) TEST_PROCESSES=4 tests ranks tests/gpu/engine/test_ranks_cuda.py tests/gpu/compute/dist ;;
    @divisions) DEVICE=cuda TEST_PROCESSES=3 tests divisions tests/dist/every_division.py ;;
    @nodes) TEST_PROCESSES=2 TB=short tests nodes tests/gpu/engine/test_nodes_cuda.py ;;
    @replicas)
      run replicas benchmarks.replicas_throughput --replicas "$(count "$all")" --device cuda \
        --output "$out/replicas.json" ;;
    @traffic) decks rank_traffic --ranks "$(count "$all")" --model shape:llama-3.1-8b ;;
    @context) decks context_parallel --ranks "$(count "$all")" --lengths 8192,32768,131072 --rounds 1 ;;
    @bubbles) decks pipeline_bubbles --stages "$(count "$all")" --model shape:llama-3.1-8b --chunk 4096 --rounds 2 ;;
    @faults)
      run faults benchmarks.rank_faults --device cuda --ranks "$(count "$all")" --servers 4 --times "${TIMES:-5}" \
        --faults kill stop memory --log "$out/faults_server.log" --output "$out/faults.json" ;;
    @table) decks tensor_parallel_table --ranks "1,$(count "$all")" --batches 1,8,64 --rounds 1 ;;
    *) refuse "unknown part: $1 (-h lists them)" ;;
  esac
}
lane() { for part in ${1//,/ }; do part "$part"; done; return $failed; }
look_at_library() { # folder: whose plans of decode steps numpy makes, ten times as slowly, if it has none
  local code='import sys; from quire.kernels import native as n; print(n.explain()); sys.exit(not n.library())'
  (cd "$1" && "$python" -c "$code") ||
    echo "!!!!!! NO NATIVE LIBRARY IN $1: every step is slower on the host. Its figures are not those of Quire. !!!!!!"
}

n_found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
gpus=(${GPUS:-$(tr , ' ' <<<"${CUDA_VISIBLE_DEVICES-$(seq -s ' ' 0 $((n_found - 1)))}")})
all=$(IFS=, && echo "${gpus[*]}") n_lanes=0 pids=()
for lane in "$@"; do
  [ "${lane:0:1}" = @ ] || n_lanes=$((n_lanes + 1))
  for part in ${lane//,/ }; do
    [[ ${lane:0:1}${part:0:1} =~ ^(@@|[^@][^@])$ ]] || refuse "$part in $lane: parts with @ are lanes of their own"
    is_check=yes part "$part"
  done
done
[ ${#gpus[@]} -gt 0 ] || refuse "no GPU: nvidia-smi finds none, or CUDA_VISIBLE_DEVICES hides them; GPUS may name them"
[ $n_lanes -le ${#gpus[@]} ] || refuse "$n_lanes lanes, and places for ${#gpus[@]}: GPUS=\"${gpus[*]}\""
for folder in . ${before:+"$before"}; do look_at_library "$folder"; done
rm -f "$out"/lane*.txt
for lane in "$@"; do
  [ "${lane:0:1}" != @ ] || continue
  CUDA_VISIBLE_DEVICES=${gpus[${#pids[@]}]} lane "$lane" >"$out/lane${#pids[@]}.txt" 2>&1 &
  pids+=($!)
done
for pid in ${pids[*]}; do wait "$pid" || failed=1; done
[ ${#pids[@]} -eq 0 ] || cat "$out"/lane*.txt
for lane in "$@"; do [ "${lane:0:1}" != @ ] || CUDA_VISIBLE_DEVICES=$all lane "$lane"; done
exit $failed
