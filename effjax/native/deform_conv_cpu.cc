// XLA custom calls of deformable convolution on CPUs.

#include "deform_conv_cpu.h"
#include "deform_conv_ffi.h"
#include "threads.h"

namespace effjax {
namespace {

template <typename T, typename A>
Operands<T, A> operands(const Inputs& in) {
  return {in.g, in.row.typed_data()[0], static_cast<const T*>(in.x.untyped_data()),
          static_cast<const A*>(in.offset.untyped_data()),
          static_cast<const A*>(in.mask.untyped_data())};
}

// The CPU implementation behind the handlers in deform_conv_ffi.h.
struct Cpu {
  using Context = ffi::ThreadPool;

  static ffi::Error copy(Context, const void* from, void* to, size_t bytes) {
    std::memcpy(to, from, bytes);
    return ffi::Error::Success();
  }

  static ffi::Error columns(Context pool, const Inputs& in, AnyBuffer columns) {
    return with_types<BFloat16, Float16>(in.x.element_type(), [&](auto storage, auto accumulator) {
      using T = decltype(storage);
      using A = decltype(accumulator);
      deform_columns<T, A>(operands<T, A>(in), static_cast<T*>(columns.untyped_data()),
                           Parallel{pool});
      return ffi::Error::Success();
    });
  }

  static ffi::Error gradients(Context pool, const Inputs& in, AnyBuffer dcolumns, AnyBuffer dx,
                              AnyBuffer doffset, AnyBuffer dmask, bool skip_dx) {
    if (skip_dx) return invalid("skip_dx is for CUDA");
    return with_types<BFloat16, Float16>(in.x.element_type(), [&](auto storage, auto accumulator) {
      using T = decltype(storage);
      using A = decltype(accumulator);
      deform_columns_backward<T, A>(operands<T, A>(in),
                                    static_cast<const A*>(dcolumns.untyped_data()),
                                    static_cast<A*>(dx.untyped_data()),
                                    static_cast<A*>(doffset.untyped_data()),
                                    static_cast<A*>(dmask.untyped_data()), Parallel{pool});
      return ffi::Error::Success();
    });
  }
};

}  // namespace
}  // namespace effjax

EFFJAX_EXPORT(EffjaxDeformColumns, effjax::Columns<effjax::Cpu>)
EFFJAX_EXPORT(EffjaxDeformColumnsBackward, effjax::ColumnsBackward<effjax::Cpu>)
