// Shared by the programs that test the CPU loops: arrays without padding, random numbers, and several
// ways to run tasks.
#ifndef TESTS_FUZZ_H_
#define TESTS_FUZZ_H_

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "half.h"

namespace {

std::mt19937 random_bits(0);

int64_t pick(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random_bits);
}

template <typename T>
struct Array {
  explicit Array(int64_t count) : count(count), data(new T[count]()) {}
  int64_t count;
  std::unique_ptr<T[]> data;
};

template <typename T>
void fill(Array<T>& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    effjax::narrow(std::normal_distribution<float>()(random_bits), a.data[i]);
  }
}
void fill(Array<double>& a) {
  for (int64_t i = 0; i < a.count; ++i) a.data[i] = std::normal_distribution<double>()(random_bits);
}

struct Serial {
  int64_t threads() const { return 1; }
  template <typename Task>
  void operator()(int64_t count, const Task& task) const {
    for (int64_t i = 0; i < count; ++i) task(i);
  }
};

struct Threads {
  int64_t threads() const { return 4; }
  template <typename Task>
  void operator()(int64_t count, const Task& task) const {
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < 4; ++t) {
      threads.emplace_back([=, &task] {
        for (int64_t i = t; i < count; i += 4) task(i);
      });
    }
    for (auto& thread : threads) thread.join();
  }
};

// Pretends to have 37 threads, and records the smallest number of tasks.
struct Tasks {
  int64_t* least;
  int64_t threads() const { return 37; }
  template <typename Task>
  void operator()(int64_t count, const Task& task) const {
    *least = std::min(*least, count);
    Serial{}(count, task);
  }
};

template <typename T>
bool equal(const Array<T>& a, const Array<T>& b) {
  return a.count == 0 || !std::memcmp(a.data.get(), b.data.get(), a.count * sizeof(T));
}

// Returns true if a is finite and close to b.
template <typename T>
bool near(const Array<T>& a, const Array<T>& b, double tolerance) {
  double worst = 0, most = 1;
  for (int64_t i = 0; i < a.count; ++i) {
    const double u = effjax::widen(a.data[i]), v = effjax::widen(b.data[i]);
    if (!std::isfinite(u)) return false;
    worst = std::max(worst, std::abs(u - v)), most = std::max(most, std::abs(u));
  }
  return worst <= tolerance * most;
}

template <typename T>
bool is_zero(const Array<T>& a) {
  bool zero = true;
  for (int64_t i = 0; i < a.count; ++i) zero &= effjax::widen(a.data[i]) == 0;
  return zero;
}

}  // namespace

#endif  // TESTS_FUZZ_H_
