// Tests of deformable convolution's CPU loops, for AddressSanitizer and UBSan: random geometries, empty
// arrays, and offsets that are huge, infinite, NaN or exactly on a border. Results must have the same
// bits for any number of threads, and be close for both instruction sets. NaN and infinity must have
// no effect if no sample touches the image.

#include <sys/mman.h>

#include "deform_conv_cpu.h"
#include "fuzz.h"

namespace {

float pick_offset(int64_t size) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float odd[] = {NAN, infinity, -infinity, 1e30f, -1e30f, -1.0f, 0.0f, float(size), 3e9f};
  if (pick(0, 2) == 0) return odd[pick(0, 8)];
  return std::normal_distribution<float>(0, 3)(random_bits);
}

template <typename T, typename A>
bool run() {
  effjax::Geometry g{};
  g.N = pick(0, 3), g.H = pick(1, 7), g.W = pick(1, 7), g.G = pick(1, 3), g.C = g.G * pick(0, 70);
  g.R = pick(0, 3), g.Ho = g.R + pick(0, 2), g.Wo = pick(1, 5), g.kernel_w = pick(1, 3), g.K = g.kernel_w * pick(1, 3);
  g.stride_h = pick(1, 3), g.stride_w = pick(1, 3), g.padding_top = pick(0, 3);
  g.padding_left = pick(0, 3), g.dilation_h = pick(1, 3), g.dilation_w = pick(1, 3);
  g.has_mask = pick(0, 1);
  const int64_t points = g.N * g.Ho * g.Wo, taps = g.G * g.K;
  Array<T> x(g.N * g.H * g.W * g.C);
  Array<A> offset(points * taps * 2), mask(g.has_mask ? points * taps : 0);
  Array<A> dcolumns(g.N * g.R * g.Wo * g.K * g.C);
  fill(x), fill(dcolumns), fill(mask);
  for (int64_t i = 0; i < offset.count; ++i) offset.data[i] = pick_offset(g.H);
  const effjax::Operands<T, A> in{g, pick(0, g.Ho - g.R), x.data.get(), offset.data.get(), mask.data.get()};

  struct Results {
    Array<T> columns;
    Array<A> dx, doffset, dmask;
  };
  const auto compute = [&](const auto& parallel, const effjax::Loops<T, A>& loops) {
    Results r{Array<T>(dcolumns.count), Array<A>(x.count), Array<A>(offset.count),
              Array<A>(mask.count)};
    effjax::deform_columns<T, A>(in, r.columns.data.get(), parallel, loops);
    effjax::deform_columns_backward<T, A>(in, dcolumns.data.get(), r.dx.data.get(),
                                          r.doffset.data.get(), r.dmask.data.get(), parallel,
                                          loops);
    return r;
  };
  const auto here = effjax::loops_for_this_cpu<T, A>(), anywhere = effjax::loops_for_any_cpu<T, A>();
  const Results one = compute(Serial{}, here), many = compute(Threads{}, here);
  int64_t tasks = 1000;
  const Results more = compute(Tasks{&tasks}, here);
  const Results old = compute(Serial{}, anywhere);  // rounds differently without FMA
  const double accurate = sizeof(A) == 8 ? 1e-13 : 1e-5, stored = sizeof(T) == 2 ? 1e-2 : accurate;
  bool finite = true;
  for (int64_t i = 0; i < one.doffset.count; ++i) finite &= std::isfinite(one.doffset.data[i]);
  for (int64_t i = 0; i < one.dx.count; ++i) finite &= std::isfinite(one.dx.data[i]);
  return finite && equal(one.columns, many.columns) && equal(one.dx, many.dx) &&
         equal(one.doffset, many.doffset) && equal(one.dmask, many.dmask) &&
         equal(one.dx, more.dx) && equal(one.doffset, more.doffset) && equal(one.dmask, more.dmask) &&
         near(one.columns, old.columns, stored) && near(one.dx, old.dx, accurate) &&
         near(one.doffset, old.doffset, accurate) && near(one.dmask, old.dmask, accurate);
}

// All samples lie outside, and masks and image are NaN or infinite.
template <typename T, typename A>
bool run_outside() {
  effjax::Geometry g{};
  g.N = 1, g.H = g.W = 2, g.G = 1, g.C = 37, g.R = g.Ho = g.Wo = 1, g.K = g.kernel_w = 3;
  g.stride_h = g.stride_w = g.dilation_h = g.dilation_w = 1, g.has_mask = true;
  Array<T> x(4 * 37), columns(3 * 37);
  Array<A> offset(6), mask(3), dcolumns(3 * 37), dx(4 * 37), doffset(6), dmask(3);
  for (int64_t i = 0; i < x.count; ++i) effjax::narrow(A(i % 2 ? NAN : INFINITY), x.data[i]);
  for (int64_t i = 0; i < dcolumns.count; ++i) dcolumns.data[i] = i % 2 ? NAN : INFINITY;
  for (int k = 0; k < 3; ++k) mask.data[k] = k % 2 ? NAN : INFINITY;
  const A outside[6] = {-1, 0, 0, NAN, A(-INFINITY), A(1e30)};
  for (int i = 0; i < 6; ++i) offset.data[i] = outside[i];
  const effjax::Operands<T, A> in{g, 0, x.data.get(), offset.data.get(), mask.data.get()};
  bool right = true;
  for (const auto& loops : {effjax::loops_for_this_cpu<T, A>(), effjax::loops_for_any_cpu<T, A>()}) {
    effjax::deform_columns<T, A>(in, columns.data.get(), Serial{}, loops);
    effjax::deform_columns_backward<T, A>(in, dcolumns.data.get(), dx.data.get(),
                                          doffset.data.get(), dmask.data.get(), Serial{}, loops);
    right &= is_zero(columns) && is_zero(dx) && is_zero(doffset) && is_zero(dmask);
  }
  return right;
}

// An image with few channels is divided by rows, so that no thread is idle.
bool run_tasks() {
  effjax::Geometry g{};
  g.N = g.G = g.K = g.kernel_w = g.stride_h = g.stride_w = g.dilation_h = g.dilation_w = 1;
  g.H = g.W = g.R = g.Ho = g.Wo = 40, g.C = 64;
  const Array<float> x(g.H * g.W * g.C), offset(2 * g.R * g.Wo);
  Array<float> dx(x.count), doffset(offset.count), parts(x.count);
  const effjax::Operands<float, float> in{g, 0, x.data.get(), offset.data.get(), nullptr};
  effjax::Loops<float, float> loops = effjax::loops_for_any_cpu<float, float>();
  int64_t least = 1000;
  effjax::deform_columns_backward<float, float>(in, parts.data.get(), dx.data.get(),
                                                doffset.data.get(), nullptr, Tasks{&least}, loops);
  return least >= 37;
}

// The last pixel of an image with more than 2^31 elements. Most of its memory is never touched.
bool run_large() {
  effjax::Geometry g{};
  g.N = g.G = g.R = g.Ho = g.K = g.kernel_w = g.stride_h = g.dilation_h = g.dilation_w = 1;
  g.H = g.W = 32768, g.C = 3, g.Wo = 2, g.stride_w = g.W - 1;
  const int64_t count = g.H * g.W * g.C;
  const auto image = [&] {
    void* memory = mmap(nullptr, count * sizeof(float), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<float*>(memory);
  };
  float *x = image(), *dx = image();
  if (!x || !dx) return false;
  for (int c = 0; c < 3; ++c) x[count - 3 + c] = 5.0f + c;
  const float offset[4] = {}, dcolumns[6] = {1, 2, 3, 4, 5, 6};
  float columns[6], doffset[4];
  const effjax::Operands<float, float> in{g, g.H - 1, x, offset, nullptr};
  effjax::deform_columns<float, float>(in, columns, Serial{});
  effjax::deform_columns_backward<float, float>(in, dcolumns, dx, doffset, nullptr, Serial{});
  bool right = true;
  for (int c = 0; c < 3; ++c) {
    right &= columns[c] == 0 && columns[3 + c] == 5.0f + c && dx[count - 3 + c] == 4.0f + c;
  }
  munmap(x, count * sizeof(float)), munmap(dx, count * sizeof(float));
  return right;
}

}  // namespace

int main() {
  if (!run_large()) {
    std::printf("wrong result at the last pixel of a large image\n");
    return 1;
  }
  if (!run_outside<float, float>() || !run_outside<double, double>() ||
      !run_outside<effjax::BFloat16, float>() || !run_outside<effjax::Float16, float>()) {
    std::printf("a sample outside is not zero\n");
    return 1;
  }
  if (!run_tasks()) {
    std::printf("threads are idle\n");
    return 1;
  }
  for (int i = 0; i < 60; ++i) {
    if (!run<float, float>() || !run<double, double>() || !run<effjax::BFloat16, float>() ||
        !run<effjax::Float16, float>()) {
      std::printf("case %d differs between numbers of threads or instructions, or is not finite\n", i);
      return 1;
    }
  }
  // Converting every float16 and bfloat16 to float and back returns the same bits.
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const effjax::Float16 half{static_cast<uint16_t>(bits)};
    const effjax::BFloat16 brain{static_cast<uint16_t>(bits)};
    effjax::Float16 half_again;
    effjax::BFloat16 brain_again;
    const float wide_half = effjax::widen(half), wide_brain = effjax::widen(brain);
    effjax::narrow(wide_half, half_again);
    effjax::narrow(wide_brain, brain_again);
    if ((wide_half == wide_half && half_again.bits != half.bits) ||
        (wide_brain == wide_brain && brain_again.bits != brain.bits)) {
      std::printf("bits %x change in a round trip\n", bits);
      return 1;
    }
  }
  std::printf("all equal\n");
  return 0;
}
