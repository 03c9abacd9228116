// The custom calls of deformable convolution on a CPU.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "deform_conv_cpu.h"
#include "deform_conv_ffi.h"

namespace effjax {
namespace {

// What the threads of one loop share; it lives until the last of them has seen that it is over.
struct Loop {
  std::function<void(int64_t)> task;
  int64_t count;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable over;

  void work() {
    for (int64_t i = next++; i < count; i = next++) {
      task(i);
      if (++done == count) {
        std::lock_guard<std::mutex> lock(mutex);
        over.notify_all();
      }
    }
  }
};

// Runs tasks on XLA's own threads, and on the caller's: it never waits for a thread to be free.
struct Parallel {
  ffi::ThreadPool& pool;

  // The pool says 0 where it cannot tell.
  int64_t threads() const { return std::max<int64_t>(pool.num_threads(), 1); }

  void operator()(int64_t count, std::function<void(int64_t)> task) const {
    if (count == 0) return;
    auto loop = std::make_shared<Loop>();
    loop->task = std::move(task);
    loop->count = count;
    const int64_t helpers = std::min(threads(), count) - 1;
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->work(); });
    loop->work();
    std::unique_lock<std::mutex> lock(loop->mutex);
    loop->over.wait(lock, [&] { return loop->done == loop->count; });
  }
};

template <typename T, typename A>
Operands<T, A> operands(const Inputs& in) {
  return {in.g, in.row.typed_data()[0], static_cast<const T*>(in.x.untyped_data()),
          static_cast<const A*>(in.offset.untyped_data()),
          static_cast<const A*>(in.mask.untyped_data())};
}

// The calls' device, see deform_conv_ffi.h.
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

template <>
struct xla::ffi::CtxBinding<xla::ffi::ThreadPool> {
  using Ctx = xla::ffi::ThreadPool;
};

EFFJAX_EXPORT(EffjaxDeformColumns, effjax::Columns<effjax::Cpu>)
EFFJAX_EXPORT(EffjaxDeformColumnsBackward, effjax::ColumnsBackward<effjax::Cpu>)
EFFJAX_EXPORT_FFI_API_VERSION
