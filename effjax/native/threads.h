// Loops on the threads that XLA has on a CPU.
#ifndef EFFJAX_THREADS_H_
#define EFFJAX_THREADS_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "ffi.h"

namespace effjax {

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

}  // namespace effjax

template <>
struct xla::ffi::CtxBinding<xla::ffi::ThreadPool> {
  using Ctx = xla::ffi::ThreadPool;
};

#endif  // EFFJAX_THREADS_H_
