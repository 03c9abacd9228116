#!/usr/bin/env bash
# Dense block, DenseNets, batch norm, planner and offload on an NVIDIA GPU.
#   bash effjax/bench/h200_models.sh OUT    (from the repository; JSON and logs go to OUT)
# Not yet run on a GPU.
set -uo pipefail
out=$(mkdir -p "${1:?a folder for the results}" && cd "$1" && pwd)
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=120
status=0
run() { # log, command...
  local log=$1
  shift
  echo "== $log: $*"
  "$@" >"$out/$log.log" 2>&1 || { echo "   FAILED ($?)"; tail -15 "$out/$log.log"; status=1; }
}

run build pip install --no-build-isolation --no-deps .
source=$PWD
cd "$out"
run offload_tests python -m pytest -q -n0 --exhaustive "$source/tests/ops/offload" -p no:cacheprovider
run batch_norm python -m effjax.bench.batch_norm --json "$out"
run batch_norm_half python -m effjax.bench.batch_norm --dtype bfloat16 --json "$out"
run offload python -m effjax.bench.offload --layers 16 --width 2048 --heads 16 --context 1024 \
  --batch-size 16 --dtype bfloat16 --json "$out"
run models python -m effjax.bench.h200_models all --json "$out"
tail -60 "$out/models.log"
exit $status
