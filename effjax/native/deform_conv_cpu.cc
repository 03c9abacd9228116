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

// Calls run(T(), A()) with the types that x is stored in and computed in.
template <typename Run>
ffi::Error dispatch(ffi::DataType dtype, const Run& run) {
  switch (dtype) {
    case ffi::F32: run(float(), float()); break;
    case ffi::F64: run(double(), double()); break;
    case ffi::BF16: run(BFloat16(), float()); break;
    case ffi::F16: run(Float16(), float()); break;
    default: return invalid("x must be float32, float64, bfloat16 or float16");
  }
  return ffi::Error::Success();
}

template <typename T, typename A>
Operands<T, A> operands(const Geometry& g, ffi::AnyBuffer x, ffi::AnyBuffer offset,
                        ffi::AnyBuffer mask, ffi::Buffer<ffi::S32> row) {
  return {g, row.typed_data()[0], static_cast<const T*>(x.untyped_data()),
          static_cast<const A*>(offset.untyped_data()), static_cast<const A*>(mask.untyped_data())};
}

ffi::Error Columns(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer offset,
                   ffi::AnyBuffer mask, ffi::Buffer<ffi::S32> row,
                   ffi::Result<ffi::AnyBuffer> columns, EFFJAX_GEOMETRY_PARAMETERS) {
  Geometry g;
  if (auto error = check(x, offset, mask, row, *columns, x.element_type(),
                         EFFJAX_GEOMETRY_ARGUMENTS, g);
      error.failure()) {
    return error;
  }
  return dispatch(x.element_type(), [&](auto storage, auto accumulator) {
    using T = decltype(storage);
    using A = decltype(accumulator);
    deform_columns<T, A>(operands<T, A>(g, x, offset, mask, row),
                         static_cast<T*>(columns->untyped_data()), Parallel{pool});
  });
}

ffi::Error ColumnsBackward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer offset,
                           ffi::AnyBuffer mask, ffi::Buffer<ffi::S32> row,
                           ffi::AnyBuffer dcolumns, ffi::AnyBuffer dx_so_far,
                           ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> doffset,
                           ffi::Result<ffi::AnyBuffer> dmask, EFFJAX_GEOMETRY_PARAMETERS,
                           int64_t skip_dx) {
  Geometry g;
  if (auto error = check(x, offset, mask, row, dcolumns, accumulator_of(x.element_type()),
                         EFFJAX_GEOMETRY_ARGUMENTS, g);
      error.failure()) {
    return error;
  }
  if (auto error = check_gradients(x, offset, mask, dx_so_far, *dx, *doffset, *dmask);
      error.failure()) {
    return error;
  }
  if (skip_dx) return invalid("skip_dx is for CUDA");
  if (dx->untyped_data() != dx_so_far.untyped_data()) {  // XLA could not reuse the buffer
    std::memcpy(dx->untyped_data(), dx_so_far.untyped_data(), dx->size_bytes());
  }
  return dispatch(x.element_type(), [&](auto storage, auto accumulator) {
    using T = decltype(storage);
    using A = decltype(accumulator);
    deform_columns_backward<T, A>(operands<T, A>(g, x, offset, mask, row),
                                  static_cast<const A*>(dcolumns.untyped_data()),
                                  static_cast<A*>(dx->untyped_data()),
                                  static_cast<A*>(doffset->untyped_data()),
                                  static_cast<A*>(dmask->untyped_data()), Parallel{pool});
  });
}

}  // namespace
}  // namespace effjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(EffjaxDeformColumns, effjax::Columns,
                              EFFJAX_BIND_GEOMETRY(effjax::ffi::Ffi::Bind()
                                                       .Ctx<effjax::ffi::ThreadPool>()
                                                       .Arg<effjax::ffi::AnyBuffer>()
                                                       .Arg<effjax::ffi::AnyBuffer>()
                                                       .Arg<effjax::ffi::AnyBuffer>()
                                                       .Arg<effjax::ffi::Buffer<effjax::ffi::S32>>()
                                                       .Ret<effjax::ffi::AnyBuffer>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    EffjaxDeformColumnsBackward, effjax::ColumnsBackward,
    EFFJAX_BIND_GEOMETRY(effjax::ffi::Ffi::Bind()
                             .Ctx<effjax::ffi::ThreadPool>()
                             .Arg<effjax::ffi::AnyBuffer>()
                             .Arg<effjax::ffi::AnyBuffer>()
                             .Arg<effjax::ffi::AnyBuffer>()
                             .Arg<effjax::ffi::Buffer<effjax::ffi::S32>>()
                             .Arg<effjax::ffi::AnyBuffer>()
                             .Arg<effjax::ffi::AnyBuffer>()
                             .Ret<effjax::ffi::AnyBuffer>()
                             .Ret<effjax::ffi::AnyBuffer>()
                             .Ret<effjax::ffi::AnyBuffer>())
        .Attr<int64_t>("skip_dx"));

EFFJAX_EXPORT_FFI_API_VERSION
