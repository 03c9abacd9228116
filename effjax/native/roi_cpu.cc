// XLA custom calls of RoI pooling on CPUs.

#include "roi_cpu.h"
#include "roi_ffi.h"
#include "threads.h"

namespace effjax {
namespace {

template <typename T, typename A>
Boxes<T, A> boxes(const PoolingInputs& in, bool adds) {
  return {in.g, static_cast<const T*>(in.x.untyped_data()),
          static_cast<const A*>(in.first.untyped_data()),
          static_cast<const A*>(in.step.untyped_data()),
          static_cast<const A*>(in.count.untyped_data()), adds};
}

// The CPU implementation behind the handlers in roi_ffi.h.
struct PoolingOnCpu {
  using Context = ffi::ThreadPool;

  static ffi::Error copy(Context, const void* from, void* to, size_t bytes) {
    std::memcpy(to, from, bytes);
    return ffi::Error::Success();
  }

  static ffi::Error pool(Context pool, const PoolingInputs& in, AnyBuffer y, bool adds) {
    return with_types<BFloat16, Float16>(in.x.element_type(), [&](auto storage, auto accumulator) {
      using T = decltype(storage);
      using A = decltype(accumulator);
      roi_pool<T, A>(boxes<T, A>(in, adds), static_cast<T*>(y.untyped_data()), Parallel{pool});
      return ffi::Error::Success();
    });
  }

  static ffi::Error gradients(Context pool, const PoolingInputs& in, AnyBuffer dy, AnyBuffer dx,
                              AnyBuffer dfirst, bool moves) {
    return with_types<BFloat16, Float16>(in.x.element_type(), [&](auto storage, auto accumulator) {
      using T = decltype(storage);
      using A = decltype(accumulator);
      roi_pool_backward<T, A>(boxes<T, A>(in, false), static_cast<const T*>(dy.untyped_data()),
                              static_cast<A*>(dx.untyped_data()),
                              moves ? static_cast<A*>(dfirst.untyped_data()) : nullptr,
                              Parallel{pool});
      return ffi::Error::Success();
    });
  }
};

}  // namespace
}  // namespace effjax

EFFJAX_EXPORT(EffjaxRoiPool, effjax::RoiPool<effjax::PoolingOnCpu>)
EFFJAX_EXPORT(EffjaxRoiPoolBackward, effjax::RoiPoolBackward<effjax::PoolingOnCpu>)
