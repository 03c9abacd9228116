// Parallel loops on XLA's CPU thread pool.
#ifndef EFFJAX_THREADS_H_
#define EFFJAX_THREADS_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "ffi.h"

namespace effjax {

// State of one loop. The threads share its ownership, so that it lives until the last one is done.
struct Loop {
  std::function<void(int64_t)> task;
  int64_t count;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable over;
  std::exception_ptr failure;  // first exception thrown by a task

  void work() noexcept {
    for (int64_t i = next++; i < count; i = next++) {
      try {
        task(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!failure) failure = std::current_exception();
      }
      if (++done == count) {
        std::lock_guard<std::mutex> lock(mutex);
        over.notify_all();
      }
    }
  }
};

// Runs task(0), …, task(count - 1) on the pool's threads and on the calling thread. The caller
// takes tasks itself, so that a loop finishes even if no other thread becomes free. An exception of
// a task is rethrown after all tasks have finished.
template <typename Pool>
struct Parallel {
  Pool& pool;

  // num_threads() is 0 if the pool does not know.
  int64_t threads() const { return std::max<int64_t>(pool.num_threads(), 1); }

  void operator()(int64_t count, std::function<void(int64_t)> task) const {
    if (count <= 0) return;
    auto loop = std::make_shared<Loop>();
    loop->task = std::move(task);
    loop->count = count;
    const int64_t helpers = std::min(threads(), count) - 1;
    try {
      for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->work(); });
    } catch (const std::bad_alloc&) {  // continue with the threads scheduled so far
    }
    loop->work();
    std::unique_lock<std::mutex> lock(loop->mutex);
    loop->over.wait(lock, [&] { return loop->done == loop->count; });
    if (loop->failure) std::rethrow_exception(loop->failure);
  }
};
template <typename Pool>
Parallel(Pool&) -> Parallel<Pool>;

}  // namespace effjax

template <>
struct xla::ffi::CtxBinding<xla::ffi::ThreadPool> {
  using Ctx = xla::ffi::ThreadPool;
};

#endif  // EFFJAX_THREADS_H_
