// XLA custom calls of deformable convolution on CUDA GPUs.

#include "deform_conv_cuda.h"
#include "deform_conv_ffi.h"
#include "launch.h"

namespace effjax {
namespace {

template <typename T, typename A, int V, typename I>
Operands<T, A, V, I> operands(const Inputs& in, const void* x) {
  return make_operands<T, A, V, I>(in.g, x, in.offset.untyped_data(), in.mask.untyped_data(),
                                   in.row.typed_data());
}

// Calls launch(number of blocks, samples per block).
template <typename I, typename Launch>
ffi::Error launch_samples(I samples, int64_t packs, int least, const Launch& launch) {
  const int block = samples_of_block(packs, least);
  const int64_t blocks = int64_t{samples} / block + (samples % block > 0);
  return launch_blocks(blocks, [&](unsigned blocks) { launch(blocks, block); });
}

// The CUDA implementation behind the handlers in deform_conv_ffi.h.
struct Cuda {
  using Context = cudaStream_t;

  static ffi::Error copy(Context stream, const void* from, void* to, size_t bytes) {
    return result_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }

  static ffi::Error columns(Context stream, const Inputs& inputs, AnyBuffer columns) {
    const Geometry& g = inputs.g;
    if (g.C == 0) return ffi::Error::Success();
    return dispatch(inputs.x.element_type(), g.C / g.G, [&](auto storage, auto sums, auto width) {
      using T = decltype(storage);
      using A = decltype(sums);
      return [&]<int V>(Width<V>) {
        return with_index(g, V, [&]<typename I>(I) {
          const auto in = operands<T, A, V, I>(inputs, inputs.x.untyped_data());
          T* out = static_cast<T*>(columns.untyped_data());
          return launch_samples<I>(in.samples, in.packs, 1, [&](unsigned blocks, int block) {
            columns_kernel<T, A, V, I><<<blocks, kThreads, 0, stream>>>(in, out, block);
          });
        });
      }(width);
    });
  }

  static ffi::Error gradients(Context stream, const Inputs& inputs, AnyBuffer dcolumns,
                              AnyBuffer dx, AnyBuffer doffset, AnyBuffer dmask, bool skip_dx) {
    const Geometry& g = inputs.g;
    return dispatch_sums(inputs.x.element_type(), g.C / g.G, [&](auto storage, auto sums, auto width) {
      using T = decltype(storage);
      using A = decltype(sums);
      return [&]<int V>(Width<V>) {
        return with_index(g, V, [&]<typename I>(I) {
          const auto in = operands<T, A, V, I>(inputs, inputs.x.untyped_data());
          A* const to = skip_dx ? nullptr : static_cast<A*>(dx.untyped_data());
          const int shift = shift_for(in.packs), least = kThreads >> shift;
          return launch_samples<I>(in.samples, in.packs, least, [&](unsigned blocks, int block) {
            gradients_kernel<T, A, V, I><<<blocks, kThreads, 0, stream>>>(
                in, static_cast<const A*>(dcolumns.untyped_data()), to,
                static_cast<A*>(doffset.untyped_data()), static_cast<A*>(dmask.untyped_data()),
                block, shift);
          });
        });
      }(width);
    });
  }
};

// Handler of the deterministic gradient of x, for CUDA only: the CPU implementation is
// deterministic. Adds the contributions of all corners, sorted by pixel, to dx.
ffi::Error ScatterSorted(cudaStream_t stream, AnyBuffer offset, AnyBuffer mask, Integers row,
                         AnyBuffer dcolumns, Integers destination, Integers source,
                         AnyBuffer dx_so_far, Result dx, WindowAttribute window) {
  Inputs inputs{*dx, offset, mask, row};  // dx has the shape of x, which is not passed
  if (auto error = check_shapes(*window, dcolumns, inputs); error.failure()) return error;
  const Geometry& g = inputs.g;
  const int64_t corners = g.R * g.Wo * g.K * 4;
  const auto accumulator = accumulator_of(offset.element_type());
  for (auto sums : {offset, mask, dcolumns, dx_so_far, *dx}) {
    if (sums.element_type() != accumulator) {
      return invalid("offset, mask, dcolumns and dx must all be float32, or all float64");
    }
  }
  if (!has_shape(destination, {g.N, g.G, corners}) || !has_shape(source, {g.N, g.G, corners}) ||
      !has_shape(dx_so_far, {g.N, g.H, g.W, g.C})) {
    return invalid("destination and source must be [N, G, R*Wo*K*4], and dx as x");
  }
  if (auto error = copy_if_apart<Cuda>(stream, dx_so_far, *dx); error.failure()) return error;
  return dispatch_sums(accumulator, g.C / g.G, [&](auto, auto accumulator, auto width) {
    using A = decltype(accumulator);
    return [&]<int V>(Width<V>) {
      const auto in = operands<A, A, V, int64_t>(inputs, nullptr);
      const int64_t count = g.N * g.G * corners;
      const int lanes = lanes_for(in.packs);
      return launch_threads(count * lanes, [&](unsigned blocks) {
        scatter_kernel<A, V><<<blocks, kThreads, 0, stream>>>(
            in, static_cast<const A*>(dcolumns.untyped_data()), destination.typed_data(),
            source.typed_data(), static_cast<A*>(dx->untyped_data()), corners, count, lanes);
      });
    }(width);
  });
}

}  // namespace
}  // namespace effjax

EFFJAX_EXPORT_GRAPHABLE(EffjaxDeformColumns, effjax::Columns<effjax::Cuda>)
EFFJAX_EXPORT_GRAPHABLE(EffjaxDeformColumnsBackward, effjax::ColumnsBackward<effjax::Cuda>)
EFFJAX_EXPORT_GRAPHABLE(EffjaxDeformScatterSorted, effjax::ScatterSorted)
