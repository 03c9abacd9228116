// XLA custom calls of RoI pooling on CUDA GPUs.

#include "launch.h"
#include "roi_cuda.h"
#include "roi_ffi.h"

namespace effjax {
namespace {

template <typename T, typename A>
Boxes<T, A> boxes(const PoolingInputs& in) {
  return {in.g, static_cast<const T*>(in.x.untyped_data()),
          static_cast<const A*>(in.first.untyped_data()),
          static_cast<const A*>(in.step.untyped_data()),
          static_cast<const A*>(in.count.untyped_data())};
}

// The CUDA implementation behind the handlers in roi_ffi.h.
struct PoolingOnCuda {
  using Context = cudaStream_t;

  static ffi::Error copy(Context stream, const void* from, void* to, size_t bytes) {
    return result_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }

  static ffi::Error pool(Context stream, const PoolingInputs& inputs, AnyBuffer y, bool adds) {
    const Pooling& g = inputs.g;
    return dispatch(inputs.x.element_type(), g.C / g.G, [&](auto storage, auto sums, auto width) {
      using T = decltype(storage);
      using A = decltype(sums);
      return [&]<int V>(Width<V>) {
        const auto in = boxes<T, A>(inputs);
        const int64_t packs = g.C / g.G / V, count = g.N * g.R * g.P * g.G * packs;
        return launch_threads(count, [&](unsigned blocks) {
          roi_pool_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(
              in, static_cast<T*>(y.untyped_data()), adds, packs, count);
        });
      }(width);
    });
  }

  static ffi::Error gradients(Context stream, const PoolingInputs& inputs, AnyBuffer dy,
                              AnyBuffer dx, AnyBuffer dfirst, bool moves) {
    const Pooling& g = inputs.g;
    auto zeroed = result_of(cudaMemsetAsync(dx.untyped_data(), 0, dx.size_bytes(), stream));
    if (zeroed.failure()) return zeroed;
    return dispatch(inputs.x.element_type(), g.C / g.G, [&](auto storage, auto sums, auto width) {
      using T = decltype(storage);
      using A = decltype(sums);
      return [&]<int V>(Width<V>) {
        const auto in = boxes<T, A>(inputs);
        const int64_t packs = g.C / g.G / V, count = g.N * g.R * g.P * g.G;
        const int lanes = lanes_for(packs);
        return launch_threads(count * lanes, [&](unsigned blocks) {
          roi_gradients_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(
              in, static_cast<const T*>(dy.untyped_data()), static_cast<A*>(dx.untyped_data()),
              moves ? static_cast<A*>(dfirst.untyped_data()) : nullptr, packs, count, lanes);
        });
      }(width);
    });
  }
};

}  // namespace
}  // namespace effjax

EFFJAX_EXPORT_GRAPHABLE(EffjaxRoiPool, effjax::RoiPool<effjax::PoolingOnCuda>)
EFFJAX_EXPORT_GRAPHABLE(EffjaxRoiPoolBackward, effjax::RoiPoolBackward<effjax::PoolingOnCuda>)
