#!/usr/bin/env bash
# Deformable convolution on an NVIDIA GPU: builds the package, runs the operator's tests on the GPU,
# the kernels under compute-sanitizer, then times them beside torchvision's CUDA operator.
#   bash effjax/bench/h200_deform.sh OUT    (from the repository; JSON and logs go to OUT)
# Not yet run on a GPU.
set -uo pipefail
out=$(mkdir -p "${1:?a folder for the results}" && cd "$1" && pwd)
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false EFFJAX_STRICT=1
status=0
run() { # log, command...: goes on after a failure, and says so
  local log=$1
  shift
  echo "== $log: $*"
  if "$@" >"$out/$log.log" 2>&1; then echo "   ok"; else
    echo "   FAILED ($?)"
    tail -15 "$out/$log.log"
    status=1
  fi
}

run build pip install --no-build-isolation --no-deps .
cd "$out" # the package that was installed, not the sources
source=$OLDPWD
run doctor python -c "from effjax import native; print(native.status(), native.gpus()); assert native.available('cuda') and native.gpus().count"
run tests python -m pytest -q -n0 --exhaustive "$source/tests/ops/deform_conv" "$source/tests/native" -p no:cacheprovider
small=(python -m effjax.bench.h200_deform --check-only)
# Each array is an allocation of its own: what is read beyond its end is found.
apart=(env XLA_PYTHON_CLIENT_ALLOCATOR=platform)
run apart "${apart[@]}" "${small[@]}"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck initcheck racecheck synccheck; do
    run "$tool" "${apart[@]}" compute-sanitizer --tool "$tool" --error-exitcode 1 "${small[@]}"
  done
fi
if command -v cuobjdump >/dev/null; then
  library=$(python -c "from importlib.resources import files; print(files('effjax.native') / 'libeffjax_cuda.so')")
  run instructions python -m effjax.bench.sass "$library" --json "$out"
fi
run command_buffers env XLA_FLAGS=--xla_gpu_enable_command_buffer=+CUSTOM_CALL "${small[@]}"
run times python -m effjax.bench.h200_deform --json "$out"
tail -40 "$out/times.log"
exit $status
