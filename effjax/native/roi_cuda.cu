// XLA custom calls of RoI pooling on CUDA GPUs.

#include "launch.h"
#include "roi_cuda.h"
#include "roi_ffi.h"

namespace effjax {
namespace {

template <typename T, typename A, int V>
Boxes<T, A> boxes(const PoolingInputs& in) {
  return make_boxes<T, A, V>(in.g, in.x.untyped_data(), in.first.untyped_data(),
                             in.step.untyped_data(), in.count.untyped_data());
}

// Rejects sizes that do not fit the 32-bit indices of the kernels.
ffi::Error check_sizes(const Pooling& g) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kThreads;
  for (int64_t size : {product_of({g.N, g.R}), product_of({g.P, g.G}), product_of({g.R, g.P}),
                       g.H + kTileSide, g.W + kTileSide, product_of({g.rows, g.parts}),
                       product_of({g.columns, g.parts}), product_of({g.parts, g.parts, g.G}),
                       product_of({g.pixel_size(), int64_t{sizeof(double)}})}) {
    if (size < 0 || size > kMost) {
      return invalid("too large for one launch: give fewer images, boxes or channels at a time");
    }
  }
  return ffi::Error::Success();
}

// Calls launch(number of blocks, bins per block).
template <typename Launch>
ffi::Error launch_bins(int64_t bins, int64_t packs, int least, const Launch& launch) {
  const int block = samples_of_block(packs, least);
  return launch_blocks((bins + block - 1) / block, [&](unsigned blocks) { launch(blocks, block); });
}

// The CUDA implementation behind the handlers in roi_ffi.h.
template <bool kDeterministic>
struct PoolingOnCuda {
  using Context = cudaStream_t;

  static ffi::Error copy(Context stream, const void* from, void* to, size_t bytes) {
    return result_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }

  static ffi::Error pool(Context stream, const PoolingInputs& inputs, AnyBuffer y, bool adds) {
    const Pooling& g = inputs.g;
    if (auto error = check_sizes(g); error.failure() || g.C == 0) return error;
    return dispatch(inputs.x.element_type(), g.C / g.G, [&](auto storage, auto sums, auto width) {
      using T = decltype(storage);
      using A = decltype(sums);
      return [&]<int V>(Width<V>) {
        const auto in = boxes<T, A, V>(inputs);
        return launch_bins(in.bins, in.packs, 1, [&](unsigned blocks, int block) {
          roi_pool_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(
              in, static_cast<T*>(y.untyped_data()), adds, block);
        });
      }(width);
    });
  }

  // Computes dfirst if `moves`. The deterministic implementation computes dx in a second kernel.
  static ffi::Error gradients(Context stream, const PoolingInputs& inputs, AnyBuffer dy,
                              AnyBuffer dx, AnyBuffer dfirst, bool moves) {
    const Pooling& g = inputs.g;
    if (auto error = check_sizes(g); error.failure()) return error;
    if constexpr (kDeterministic) {
      if (auto error = gather(stream, inputs, dy, dx); error.failure() || !moves) return error;
    } else {
      const auto zeroed = cudaMemsetAsync(dx.untyped_data(), 0, dx.size_bytes(), stream);
      if (auto error = result_of(zeroed); error.failure()) return error;
    }
    const auto dtype = inputs.x.element_type();
    return dispatch_sums(dtype, g.C / g.G, [&](auto storage, auto sums, auto width) {
      using T = decltype(storage);
      using A = decltype(sums);
      return [&]<int V>(Width<V>) {
        const auto in = boxes<T, A, V>(inputs);
        const int shift = shift_for(in.packs), least = kThreads >> shift;
        return launch_bins(in.bins, in.packs, least, [&](unsigned blocks, int block) {
          roi_gradients_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(
              in, static_cast<const T*>(dy.untyped_data()),
              kDeterministic ? nullptr : static_cast<A*>(dx.untyped_data()),
              moves ? static_cast<A*>(dfirst.untyped_data()) : nullptr, block, shift);
        });
      }(width);
    });
  }

  static ffi::Error gather(Context stream, const PoolingInputs& inputs, AnyBuffer dy,
                           AnyBuffer dx) {
    const Pooling& g = inputs.g;
    if (dx.element_count() == 0) return ffi::Error::Success();
    return dispatch(inputs.x.element_type(), g.C / g.G, [&](auto storage, auto sums, auto width) {
      using T = decltype(storage);
      using A = decltype(sums);
      return [&]<int V>(Width<V>) {
        const auto in = boxes<T, A, V>(inputs);
        const auto tiles = Tiles::of(g, in.packs);
        return launch_blocks(tiles.blocks(g.N), [&](unsigned blocks) {
          roi_gather_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(
              in, static_cast<const T*>(dy.untyped_data()), static_cast<A*>(dx.untyped_data()),
              tiles);
        });
      }(width);
    });
  }
};

}  // namespace
}  // namespace effjax

EFFJAX_EXPORT_GRAPHABLE(EffjaxRoiPool, effjax::RoiPool<effjax::PoolingOnCuda<false>>)
EFFJAX_EXPORT_GRAPHABLE(EffjaxRoiPoolBackward, effjax::RoiPoolBackward<effjax::PoolingOnCuda<false>>)
EFFJAX_EXPORT_GRAPHABLE(EffjaxRoiPoolBackwardDeterministic,
                        effjax::RoiPoolBackward<effjax::PoolingOnCuda<true>>)
