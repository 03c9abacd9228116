// XLA custom calls of deformable attention on CUDA GPUs.

#include "deform_attention_cuda.h"
#include "deform_attention_ffi.h"
#include "launch.h"

namespace effjax {
namespace {

// Rejects sizes that do not fit the 32-bit indices of the kernels.
ffi::Error check_sizes(const Attention& g) {
  if (g.levels.size() > kMostLevels) {
    return invalid("at most " + std::to_string(kMostLevels) + " levels on a GPU");
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t pixel_bytes = g.M * g.D * int64_t{sizeof(double)};
  if (g.N * g.Q * g.M > kMost || pixel_bytes > kMost || g.points() > kMost || g.P > kMost) {
    return invalid("too large for one launch: give fewer images or queries at a time");
  }
  return ffi::Error::Success();
}

// The CUDA implementation behind the handlers in deform_attention_ffi.h.
struct Cuda {
  using Context = cudaStream_t;
  static constexpr bool kSkipsValue = true;

  static ffi::Error copy(Context stream, const void* from, void* to, size_t bytes) {
    return result_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }

  static ffi::Error attend(Context stream, const AttentionInputs& inputs, const Attention& g,
                           AnyBuffer y) {
    if (auto error = check_sizes(g); error.failure()) return error;
    return dispatch(inputs.value.element_type(), g.D, [&](auto storage, auto wide, auto width) {
      using T = decltype(storage);
      using A = decltype(wide);
      return [&]<int V>(Width<V>) {
        const auto in = arrays<T, A, V>(inputs, g);
        T* out = static_cast<T*>(y.untyped_data());
        return launch_threads(int64_t{in.heads} << in.shift, [&](unsigned blocks) {
          attend_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(in, out);
        });
      }(width);
    });
  }

  static ffi::Error gradients(Context stream, const AttentionInputs& inputs, const Attention& g,
                              AnyBuffer dy, AnyBuffer dvalue, AnyBuffer dlocations,
                              AnyBuffer dweights) {
    if (auto error = check_sizes(g); error.failure()) return error;
    const bool skips_value = dvalue.dimensions()[1] == 0;
    if (!skips_value) {
      const auto zeroed = cudaMemsetAsync(dvalue.untyped_data(), 0, dvalue.size_bytes(), stream);
      if (auto error = result_of(zeroed); error.failure()) return error;
    }
    const auto dtype = inputs.value.element_type();
    return dispatch_sums(dtype, g.D, [&](auto storage, auto wide, auto width) {
      using T = decltype(storage);
      using A = decltype(wide);
      return [&]<int V>(Width<V>) {
        const auto in = arrays<T, A, V>(inputs, g, kLeastLanes);
        A* const to = skips_value ? nullptr : static_cast<A*>(dvalue.untyped_data());
        return launch_threads(int64_t{in.heads} << in.shift, [&](unsigned blocks) {
          attend_backward_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(
              in, static_cast<const T*>(dy.untyped_data()), to,
              static_cast<A*>(dlocations.untyped_data()),
              static_cast<A*>(dweights.untyped_data()));
        });
      }(width);
    });
  }

  template <typename T, typename A, int V>
  static AttentionArrays<T, A, V> arrays(const AttentionInputs& in, const Attention& g,
                                         int least_lanes = 1) {
    return attention_arrays<T, A, V>(g, in.value.untyped_data(), in.locations.untyped_data(),
                                     in.weights.untyped_data(), least_lanes);
  }
};

// Handler of the deterministic gradient of value, for CUDA only: the CPU implementation is
// deterministic. Adds the contributions of all corners, sorted by pixel, to dvalue.
ffi::Error AttendScatterSorted(cudaStream_t stream, AnyBuffer locations, AnyBuffer weights,
                               AnyBuffer dy, Integers destination, Integers source,
                               AnyBuffer dvalue_so_far, Result dvalue, SizesAttribute sizes,
                               NormalizedAttribute normalized) {
  // value is not passed. It has the shape of dvalue, and the dtype of dy.
  const AttentionInputs inputs{*dvalue, locations, weights};
  Attention g;
  auto error = check_attention_shapes(inputs, dy, *sizes, *normalized != 0, g);
  if (error.failure() || (error = check_sizes(g), error.failure())) return error;
  const auto accumulator = accumulator_of(dy.element_type());
  for (auto sums : {locations, weights, dvalue_so_far, *dvalue}) {
    if (sums.element_type() != accumulator) {
      return invalid("locations, weights and dvalue must be float32, or float64 where dy is");
    }
  }
  const int64_t corners = product_of({g.Q, g.points(), 4});
  if (corners < 0 || corners > std::numeric_limits<int32_t>::max() / 2 ||
      !has_shape(destination, {g.N, g.M, corners}) || !has_shape(source, {g.N, g.M, corners}) ||
      !same_shape(dvalue_so_far, *dvalue)) {
    return invalid("destination and source must be [N, M, Q*L*P*4], below 2**30, and dvalue as value");
  }
  error = copy_if_apart<Cuda>(stream, dvalue_so_far, *dvalue);
  if (error.failure() || corners == 0 || dvalue->element_count() == 0) return error;
  return dispatch(dy.element_type(), g.D, [&](auto storage, auto wide, auto width) {
    using T = decltype(storage);
    using A = decltype(wide);
    return [&]<int V>(Width<V>) {
      const auto in = Cuda::arrays<T, A, V>(inputs, g);
      const int64_t of_head = scatter_blocks(corners, in.shift);
      return launch_blocks(g.N * g.M * of_head, [&](unsigned blocks) {
        attend_scatter_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(
            in, static_cast<const T*>(dy.untyped_data()), destination.typed_data(),
            source.typed_data(), static_cast<A*>(dvalue->untyped_data()),
            static_cast<int32_t>(g.S), static_cast<int32_t>(corners),
            Divisor<int32_t>(static_cast<int32_t>(of_head)));
      });
    }(width);
  });
}

}  // namespace
}  // namespace effjax

EFFJAX_EXPORT_GRAPHABLE(EffjaxMsDeformAttn, effjax::MsDeformAttn<effjax::Cuda>)
EFFJAX_EXPORT_GRAPHABLE(EffjaxMsDeformAttnBackward, effjax::MsDeformAttnBackward<effjax::Cuda>)
EFFJAX_EXPORT_GRAPHABLE(EffjaxMsDeformAttnScatterSorted, effjax::AttendScatterSorted)
