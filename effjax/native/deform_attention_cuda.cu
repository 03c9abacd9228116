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
  if (g.N * g.Q * g.M > kMost || g.M * g.D > kMost || g.points() > kMost) {
    return invalid("too large for one launch: give fewer images or queries at a time");
  }
  return ffi::Error::Success();
}

// The CUDA implementation behind the handlers in deform_attention_ffi.h.
struct Cuda {
  using Context = cudaStream_t;

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
    const auto zeroed = cudaMemsetAsync(dvalue.untyped_data(), 0, dvalue.size_bytes(), stream);
    if (auto error = result_of(zeroed); error.failure()) return error;
    return dispatch(inputs.value.element_type(), g.D, [&](auto storage, auto wide, auto width) {
      using T = decltype(storage);
      using A = decltype(wide);
      return [&]<int V>(Width<V>) {
        const auto in = arrays<T, A, V>(inputs, g);
        return launch_threads(int64_t{in.heads} << in.shift, [&](unsigned blocks) {
          attend_backward_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(
              in, static_cast<const T*>(dy.untyped_data()), static_cast<A*>(dvalue.untyped_data()),
              static_cast<A*>(dlocations.untyped_data()),
              static_cast<A*>(dweights.untyped_data()));
        });
      }(width);
    });
  }

 private:
  template <typename T, typename A, int V>
  static AttentionArrays<T, A, V> arrays(const AttentionInputs& in, const Attention& g) {
    return attention_arrays<T, A, V>(g, in.value.untyped_data(), in.locations.untyped_data(),
                                     in.weights.untyped_data());
  }
};

}  // namespace
}  // namespace effjax

EFFJAX_EXPORT_GRAPHABLE(EffjaxMsDeformAttn, effjax::MsDeformAttn<effjax::Cuda>)
EFFJAX_EXPORT_GRAPHABLE(EffjaxMsDeformAttnBackward, effjax::MsDeformAttnBackward<effjax::Cuda>)
