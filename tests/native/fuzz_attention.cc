// Tests of deformable attention's CPU loops, like those of deformable convolution in fuzz.cc.

#include "deform_attention_cpu.h"
#include "fuzz.h"

// float16 is left out: it has the loops of bfloat16, and fuzz.cc tests its conversions.

namespace {

using effjax::Attention;

double pick_location() {
  const double odd[] = {NAN, INFINITY, -INFINITY, 1e30, -1e30, 0, 1, -0.5, 3e9};
  if (pick(0, 3) == 0) return odd[pick(0, 8)];
  return std::normal_distribution<double>(0.5, 0.4)(random_bits);
}

template <typename T, typename A>
struct Problem {
  explicit Problem(const Attention& g)
      : g(g), points(g), value(g.N * g.S * g.M * g.D), dy(g.N * g.Q * g.M * g.D),
        locations(g.N * g.Q * g.M * g.points() * 2), weights(locations.count / 2) {}

  Attention g;
  effjax::PointLevels<A> points;
  Array<T> value, dy;
  Array<A> locations, weights;

  struct Results {
    Array<T> y;
    Array<A> dvalue, dlocations, dweights;
  };
  template <typename Parallel>
  Results compute(const Parallel& parallel, const effjax::AttentionLoops<T, A>& loops) const {
    const effjax::AttentionOperands<T, A> in{g, points, value.data.get(), locations.data.get(),
                                             weights.data.get()};
    Results r{Array<T>(dy.count), Array<A>(value.count), Array<A>(locations.count),
              Array<A>(weights.count)};
    effjax::attend_all<T, A>(in, r.y.data.get(), parallel, loops);
    effjax::attend_all_backward<T, A>(in, dy.data.get(), r.dvalue.data.get(),
                                      r.dlocations.data.get(), r.dweights.data.get(), parallel,
                                      loops);
    return r;
  }
};

Attention pick_attention() {
  Attention g{pick(0, 2), 0, pick(1, 3), pick(1, 70), pick(0, 40), pick(1, 7), {}, pick(0, 1) != 0};
  for (int64_t levels = pick(1, 4); levels > 0; --levels) {
    g.levels.push_back({pick(1, 5), pick(1, 5)});
    g.S += g.levels.back().height * g.levels.back().width;
  }
  return g;
}

template <typename T, typename A>
bool run() {
  Problem<T, A> p(pick_attention());
  fill(p.value), fill(p.dy), fill(p.weights);
  for (int64_t i = 0; i < p.locations.count; ++i) {
    p.locations.data[i] = static_cast<A>(pick_location() * (p.g.normalized ? 1 : 4));
  }
  const auto here = effjax::attention_loops_for_this_cpu<T, A>();
  const auto one = p.compute(Serial{}, here), many = p.compute(Threads{}, here);
  // Rounds differently without FMA.
  const auto old = p.compute(Serial{}, effjax::attention_loops_for_any_cpu<T, A>());
  const double accurate = sizeof(A) == 8 ? 1e-12 : 1e-4, stored = sizeof(T) == 2 ? 1e-2 : accurate;
  return equal(one.y, many.y) && equal(one.dvalue, many.dvalue) &&
         equal(one.dlocations, many.dlocations) && equal(one.dweights, many.dweights) &&
         near(one.y, old.y, stored) && near(one.dvalue, old.dvalue, accurate) &&
         near(one.dweights, old.dweights, accurate);
}

// All samples lie outside, and weights, values and gradients are NaN or infinite.
template <typename T, typename A>
bool run_outside() {
  Attention g{1, 4, 1, 37, 1, 3, {{2, 2}}, true};
  Problem<T, A> p(g);
  const A outside[6] = {A(-0.25), 0, 0, NAN, A(-INFINITY), A(1e30)};
  for (int i = 0; i < 6; ++i) p.locations.data[i] = outside[i];
  for (int i = 0; i < 3; ++i) p.weights.data[i] = i % 2 ? NAN : INFINITY;
  for (int64_t i = 0; i < p.value.count; ++i) {
    effjax::narrow(A(i % 2 ? NAN : INFINITY), p.value.data[i]);
  }
  for (int64_t i = 0; i < p.dy.count; ++i) effjax::narrow(A(NAN), p.dy.data[i]);
  bool right = true;
  for (const auto& loops : {effjax::attention_loops_for_this_cpu<T, A>(),
                            effjax::attention_loops_for_any_cpu<T, A>()}) {
    const auto r = p.compute(Serial{}, loops);
    right &= is_zero(r.y) && is_zero(r.dvalue) && is_zero(r.dlocations) && is_zero(r.dweights);
  }
  return right;
}

}  // namespace

int main() {
  if (!run_outside<float, float>() || !run_outside<double, double>() ||
      !run_outside<effjax::BFloat16, float>()) {
    std::printf("a sample outside is not zero\n");
    return 1;
  }
  for (int i = 0; i < 60; ++i) {
    if (!run<float, float>() || !run<double, double>() || !run<effjax::BFloat16, float>()) {
      std::printf("case %d differs between numbers of threads or instructions\n", i);
      return 1;
    }
  }
  std::printf("all equal\n");
  return 0;
}
