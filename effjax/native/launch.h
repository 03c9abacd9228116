// Launching CUDA kernels from XLA FFI handlers, for any dtype and number of channels.
#ifndef EFFJAX_LAUNCH_H_
#define EFFJAX_LAUNCH_H_

#include <limits>
#include <string>

#include "cuda.h"
#include "ffi.h"

namespace effjax {

inline ffi::Error result_of(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("effjax's kernels: ") + cudaGetErrorString(error));
}

// Calls launch(blocks), and returns the error of the launch, if any.
template <typename Launch>
ffi::Error launch_blocks(int64_t blocks, const Launch& launch) {
  if (blocks == 0) return ffi::Error::Success();
  if (blocks > std::numeric_limits<int32_t>::max()) {
    return invalid("too large for one launch: give fewer images at a time, or a smaller chunk_bytes");
  }
  launch(static_cast<unsigned>(blocks));
  return result_of(cudaGetLastError());
}

// Calls launch(blocks) with enough blocks for the given number of threads.
template <typename Launch>
ffi::Error launch_threads(int64_t threads, const Launch& launch) {
  return launch_blocks(threads / kThreads + (threads % kThreads > 0), launch);
}

template <int V>
struct Width {};

// Calls run(T(), A(), Width<V>()) with the storage type, the type of the computation, and the
// number of channels per pack: 16 bytes in T if that divides the number of contiguous channels,
// else 1.
template <typename Run>
ffi::Error dispatch(ffi::DataType dtype, int64_t channels, const Run& run) {
  return with_types<__nv_bfloat16, __half>(dtype, [&](auto storage, auto accumulator) {
    constexpr int kFull = 16 / sizeof(storage);
    return channels % kFull == 0 ? run(storage, accumulator, Width<kFull>())
                                  : run(storage, accumulator, Width<1>());
  });
}

// Like dispatch, with packs of 16 bytes in A. Used by kernels that add to arrays of type A.
template <typename Run>
ffi::Error dispatch_sums(ffi::DataType dtype, int64_t channels, const Run& run) {
  return with_types<__nv_bfloat16, __half>(dtype, [&](auto storage, auto accumulator) {
    constexpr int kFull = 16 / sizeof(accumulator);
    return channels % kFull == 0 ? run(storage, accumulator, Width<kFull>())
                                  : run(storage, accumulator, Width<1>());
  });
}

}  // namespace effjax

template <>
struct xla::ffi::CtxBinding<cudaStream_t> {
  using Ctx = xla::ffi::PlatformStream<cudaStream_t>;
};

// Exports a handler that may be captured in a CUDA graph.
#define EFFJAX_EXPORT_GRAPHABLE(symbol, call) \
  EFFJAX_EXPORT(symbol, call, xla::ffi::Traits::kCmdBufferCompatible)

#endif  // EFFJAX_LAUNCH_H_
