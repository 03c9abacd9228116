// Tests of the handlers' argument checks, for UBSan: shapes and attributes that are zero, huge or
// negative cause no overflow. Also tests that exceptions on any thread become XLA errors.

#include <stdexcept>

#include "deform_attention_ffi.h"
#include "deform_conv_ffi.h"
#include "fuzz.h"
#include "roi_ffi.h"
#include "threads.h"

namespace {

int64_t pick_size() {
  constexpr int64_t kOne = 1, kMost = std::numeric_limits<int64_t>::max();
  const int64_t sizes[] = {0,         1,         2,         3,         4,        9,
                           kOne << 20, kOne << 30, kOne << 31, kOne << 40, kOne << 62, kMost};
  return sizes[pick(0, pick(0, 2) ? 5 : 11)];
}
int64_t pick_attribute() {
  const int64_t size = pick_size();
  return pick(0, 5) ? size : pick(0, 1) ? -size : std::numeric_limits<int64_t>::min();
}

// A buffer with a shape and a dtype, but no data.
struct Shape {
  explicit Shape(int rank) : sizes(rank) {
    for (int64_t& size : sizes) size = pick_size();
    buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer.dtype = XLA_FFI_DataType_F32;
    buffer.rank = rank;
    buffer.dims = sizes.data();
  }
  effjax::AnyBuffer any() const { return effjax::AnyBuffer(&buffer); }
  std::vector<int64_t> sizes;
  XLA_FFI_Buffer buffer{};
};

bool check_deform_conv() {
  effjax::Window w{};
  for (int64_t* a : {&w.kernel_h, &w.kernel_w, &w.stride_h, &w.stride_w, &w.padding_top,
                     &w.padding_left, &w.dilation_h, &w.dilation_w, &w.offset_groups}) {
    *a = pick(0, 2) ? pick(1, 3) : pick_attribute();
  }
  Shape x(4), offset(4), mask(4), row(1), columns(4);
  row.sizes[0] = 1, row.buffer.dtype = XLA_FFI_DataType_S32;
  if (pick(0, 3)) {  // shapes that almost match
    const int64_t taps = effjax::product_of({w.kernel_h, w.kernel_w, w.offset_groups});
    offset.sizes[0] = mask.sizes[0] = columns.sizes[0] = x.sizes[0];
    for (int i : {1, 2}) mask.sizes[i] = columns.sizes[i] = offset.sizes[i];
    offset.sizes[3] = effjax::product_of({2, taps}), mask.sizes[3] = pick(0, 1) ? taps : 0;
    columns.sizes[3] = effjax::product_of({w.kernel_h, w.kernel_w, x.sizes[3]});
    for (Shape* shape : {&offset, &mask, &columns}) {
      shape->sizes[3] = std::max<int64_t>(shape->sizes[3], 0);
    }
  }
  effjax::Inputs in{x.any(), offset.any(), mask.any(), effjax::Integers(&row.buffer)};
  if (effjax::check(w, columns.any(), effjax::ffi::F32, in).failure()) return false;
  const effjax::Geometry& g = in.g;  // the largest indices must not overflow
  const int64_t last = std::numeric_limits<int32_t>::max() + std::max<int64_t>(g.R, 1) - 1;
  return std::isfinite(effjax::base_y<float>(g, last, g.K - 1)) &&
         g.N * g.R * g.Wo * g.K * g.G * 2 >= 0 && g.N * g.H * g.W * g.C >= 0;
}

bool check_roi() {
  effjax::PoolingAttributes a{};
  for (int64_t* of : {&a.rows, &a.columns, &a.parts}) *of = pick(0, 2) ? pick(1, 3) : pick_attribute();
  Shape x(4), first(5), step(3), count(3), y(4);
  if (pick(0, 3)) {
    first.sizes[0] = x.sizes[0], first.sizes[4] = 2;
    first.sizes[2] = std::max<int64_t>(effjax::product_of({a.rows, a.columns}), 0);
    for (Shape* shape : {&step, &count}) {
      shape->sizes = {x.sizes[0], first.sizes[1], 2}, shape->buffer.dims = shape->sizes.data();
    }
    const int64_t blocks = effjax::product_of({a.parts, a.parts});
    y.sizes[0] = x.sizes[0], y.sizes[1] = first.sizes[1], y.sizes[2] = first.sizes[2];
    y.sizes[3] = blocks > 0 ? x.sizes[3] / blocks : 0;
  }
  effjax::PoolingInputs in{x.any(), first.any(), step.any(), count.any()};
  if (effjax::check(a, y.any(), in).failure()) return false;
  const effjax::Pooling& g = in.g;
  return g.N * g.R * g.P * g.C >= 0 && g.channel_of(std::max<int64_t>(g.P, 1) - 1) >= 0;
}

bool check_attention() {
  std::vector<int64_t> levels(pick(0, 5));
  for (int64_t& size : levels) size = pick(0, 2) ? pick(1, 3) : pick_attribute();
  Shape value(4), locations(6), weights(5), y(4);
  if (pick(0, 3)) {
    value.sizes[1] = 0;
    for (size_t l = 0; l + 1 < levels.size(); l += 2) {
      const int64_t pixels = effjax::product_of({levels[l], levels[l + 1]});
      value.sizes[1] += pixels < (int64_t{1} << 40) ? std::max<int64_t>(pixels, 0) : 0;
    }
    const std::vector<int64_t>& v = value.sizes;
    const int64_t queries = locations.sizes[1], points = locations.sizes[4];
    locations.sizes = {v[0], queries, v[2], int64_t(levels.size() / 2), points, 2};
    weights.sizes.assign(locations.sizes.begin(), locations.sizes.end() - 1);
    y.sizes = {v[0], queries, v[2], v[3]};
    for (Shape* shape : {&locations, &weights, &y}) shape->buffer.dims = shape->sizes.data();
  }
  effjax::Attention g;
  const effjax::AttentionInputs in{value.any(), locations.any(), weights.any()};
  const effjax::ffi::Span<const int64_t> sizes(levels.data(), levels.size());
  if (effjax::check_attention(in, y.any(), sizes, false, g).failure()) return false;
  return g.N * g.S * g.M * g.D >= 0 && g.N * g.Q * g.M * g.points() * 2 >= 0;
}

// The last error reported to XLA.
XLA_FFI_Error_Code said;

XLA_FFI_Error* remember(XLA_FFI_Error_Create_Args* args) {
  said = args->errc;
  return nullptr;
}

// A pool that starts two threads and then runs out of memory.
struct Pool {
  int64_t num_threads() const { return 4; }
  template <typename Task>
  void Schedule(Task task) {
    if (threads.size() == 2) throw std::bad_alloc();
    threads.emplace_back(std::move(task));
  }
  std::vector<std::thread> threads;
};

bool run_exceptions() {
  XLA_FFI_Api api{};
  api.XLA_FFI_Error_Create = remember;
  Pool pool;
  std::atomic<int> done{0};
  effjax::without_exceptions(&api, [&]() -> XLA_FFI_Error* {
    effjax::Parallel{pool}(100, [&](int64_t i) {
      if (i == 50) throw std::bad_alloc();
      ++done;
    });
    return nullptr;
  });
  for (auto& thread : pool.threads) thread.join();
  const bool memory = said == XLA_FFI_Error_Code_RESOURCE_EXHAUSTED && done == 99;
  effjax::without_exceptions(&api, []() -> XLA_FFI_Error* { throw std::runtime_error("other"); });
  const bool other = said == XLA_FFI_Error_Code_INTERNAL;
  effjax::without_exceptions(&api, []() -> XLA_FFI_Error* { throw 1; });
  return memory && other && said == XLA_FFI_Error_Code_INTERNAL;
}

}  // namespace

int main() {
  int64_t accepted[3] = {};
  for (int i = 0; i < 60000; ++i) {
    accepted[0] += check_deform_conv(), accepted[1] += check_roi(), accepted[2] += check_attention();
  }
  if (std::min({accepted[0], accepted[1], accepted[2]}) < 100) {
    std::printf("too few shapes fit: %d %d %d\n", int(accepted[0]), int(accepted[1]), int(accepted[2]));
    return 1;
  }
  if (!run_exceptions()) {
    std::printf("an exception does not become an error\n");
    return 1;
  }
  std::printf("all equal\n");
  return 0;
}
