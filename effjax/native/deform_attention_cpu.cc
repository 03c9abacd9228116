// XLA custom calls of deformable attention on CPUs.

#include "deform_attention_cpu.h"
#include "deform_attention_ffi.h"
#include "threads.h"

namespace effjax {
namespace {

template <typename T, typename A>
AttentionOperands<T, A> operands(const AttentionInputs& in, const Attention& g,
                                 const PointLevels<A>& points) {
  return {g, points, static_cast<const T*>(in.value.untyped_data()),
          static_cast<const A*>(in.locations.untyped_data()),
          static_cast<const A*>(in.weights.untyped_data())};
}

// The CPU implementation behind the handlers in deform_attention_ffi.h.
struct Cpu {
  using Context = ffi::ThreadPool;
  static constexpr bool kSkipsValue = false;

  static ffi::Error attend(Context pool, const AttentionInputs& in, const Attention& g,
                           AnyBuffer y) {
    return with_types<BFloat16, Float16>(in.value.element_type(), [&](auto storage, auto wide) {
      using T = decltype(storage);
      using A = decltype(wide);
      const PointLevels<A> points(g);
      attend_all<T, A>(operands<T, A>(in, g, points), static_cast<T*>(y.untyped_data()),
                       Parallel{pool});
      return ffi::Error::Success();
    });
  }

  static ffi::Error gradients(Context pool, const AttentionInputs& in, const Attention& g,
                              AnyBuffer dy, AnyBuffer dvalue, AnyBuffer dlocations,
                              AnyBuffer dweights) {
    return with_types<BFloat16, Float16>(in.value.element_type(), [&](auto storage, auto wide) {
      using T = decltype(storage);
      using A = decltype(wide);
      const PointLevels<A> points(g);
      attend_all_backward<T, A>(operands<T, A>(in, g, points),
                                static_cast<const T*>(dy.untyped_data()),
                                static_cast<A*>(dvalue.untyped_data()),
                                static_cast<A*>(dlocations.untyped_data()),
                                static_cast<A*>(dweights.untyped_data()), Parallel{pool});
      return ffi::Error::Success();
    });
  }
};

}  // namespace
}  // namespace effjax

EFFJAX_EXPORT(EffjaxMsDeformAttn, effjax::MsDeformAttn<effjax::Cpu>)
EFFJAX_EXPORT(EffjaxMsDeformAttnBackward, effjax::MsDeformAttnBackward<effjax::Cpu>)
