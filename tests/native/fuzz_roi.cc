// Tests of RoI pooling's CPU loops, for AddressSanitizer and UBSan: random sizes, empty arrays, and
// positions, steps and counts that are huge, infinite, NaN, negative or exactly on a border. Results
// must be finite, have the same bits for any number of threads, and be close for both instruction
// sets.

#include "fuzz.h"
#include "roi_cpu.h"

// float16 is left out: it has the loops of bfloat16, and fuzz.cc tests its conversions.

namespace {

double pick_odd(int64_t size) {
  const double odd[] = {NAN, INFINITY, -INFINITY, 1e30, -1e30, -1, -0.5, 0, double(size), 3e9};
  if (pick(0, 5) == 0) return odd[pick(0, 9)];
  return std::normal_distribution<double>(1, 3)(random_bits);
}

template <typename T, typename A>
bool run() {
  effjax::Pooling g{};
  g.N = pick(0, 3), g.H = pick(1, 7), g.W = pick(1, 7), g.G = pick(1, 3), g.C = g.G * pick(1, 150);
  g.R = pick(0, 3), g.rows = pick(1, 3), g.columns = pick(1, 3), g.P = g.rows * g.columns;
  g.parts = pick(1, 2), g.margin = pick(0, 2) / 2.0, g.of_inside = pick(0, 1);
  const int64_t boxes = g.N * g.R, bins = boxes * g.P;
  const bool adds = pick(0, 1);
  Array<T> x(g.N * g.H * g.W * g.pixel_size()), dy(bins * g.C);
  Array<A> first(bins * g.G * 2), step(boxes * 2), count(boxes * 2);
  fill(x), fill(dy);
  for (int64_t i = 0; i < first.count; ++i) first.data[i] = A(pick_odd(g.H));
  for (int64_t i = 0; i < step.count; ++i) step.data[i] = A(pick_odd(g.W) / 4);
  for (int64_t i = 0; i < count.count; ++i) {
    count.data[i] = pick(0, 9) ? A(pick(0, 4)) : step.data[i] > A(0) ? A(1e5) : A(NAN);
  }
  const effjax::Boxes<T, A> in{g, x.data.get(), first.data.get(), step.data.get(),
                               count.data.get(), adds};
  struct Results {
    Array<T> y;
    Array<A> dx, dfirst;
  };
  const auto compute = [&](const auto& parallel, const effjax::PoolingLoops<T, A>& loops) {
    Results r{Array<T>(dy.count), Array<A>(x.count), Array<A>(first.count)};
    effjax::roi_pool<T, A>(in, r.y.data.get(), parallel, loops);
    effjax::roi_pool_backward<T, A>(in, dy.data.get(), r.dx.data.get(), r.dfirst.data.get(),
                                    parallel, loops);
    return r;
  };
  const Results one = compute(Serial{}, effjax::pooling_loops_for_this_cpu<T, A>());
  const Results many = compute(Threads{}, effjax::pooling_loops_for_this_cpu<T, A>());
  const Results old = compute(Serial{}, effjax::pooling_loops_for_any_cpu<T, A>());
  const double accurate = sizeof(A) == 8 ? 1e-12 : 1e-4, stored = sizeof(T) == 2 ? 1e-2 : accurate;
  return equal(one.y, many.y) && equal(one.dx, many.dx) && equal(one.dfirst, many.dfirst) &&
         near(one.y, old.y, stored) && near(one.dx, old.dx, accurate) &&
         near(one.dfirst, old.dfirst, accurate);
}

}  // namespace

int main() {
  for (int i = 0; i < 60; ++i) {
    if (!run<float, float>() || !run<double, double>() || !run<effjax::BFloat16, float>()) {
      std::printf("case %d differs between numbers of threads or instructions, or is not finite\n", i);
      return 1;
    }
  }
  std::printf("all equal\n");
  return 0;
}
