// A point between four pixels, and its gradients: shared by all operators that sample images,
// compiled into the CPU and the CUDA handlers.
#ifndef EFFJAX_SAMPLING_H_
#define EFFJAX_SAMPLING_H_

#include <cstdint>

#ifdef __CUDACC__
#define EFFJAX_INLINE __host__ __device__ __forceinline__
#else
#include <cmath>
#if defined(__GNUC__)
#define EFFJAX_INLINE inline __attribute__((always_inline))
#else
#define EFFJAX_INLINE inline
#endif
#endif

namespace effjax {

// A point of the image between four pixels. weight[q] is zero where pixel q is outside; pixel[q]
// is then 0, so that it can be read. q = 2 * (lower) + (right). Pixels are counted in I.
template <typename A, typename I = int64_t>
struct Sample {
  using Index = I;
  Index pixel[4];  // row * W + column
  A weight[4];
  A down, right;     // how far the point is below and right of pixel 0, in [0, 1)
  bool inside[4];
};

// False where the sample is zero, all its pixels outside: not within -1 < y < H, -1 < x < W. The
// comparison is written so that NaN is outside too, and nothing infinite is turned into an integer.
// There are no branches: points at random are inside or outside, which no CPU can predict.
template <typename A, typename I = int64_t>
EFFJAX_INLINE bool make_sample(A y, A x, typename Sample<A, I>::Index height,
                               typename Sample<A, I>::Index width, Sample<A, I>& s) {
  const bool touches = (y > A(-1)) & (x > A(-1)) & (y < A(height)) & (x < A(width));
  y = touches ? y : A(0);
  x = touches ? x : A(0);
#ifdef __CUDACC__
  const A top = floor(y), left = floor(x);
#else
  const A top = std::floor(y), left = std::floor(x);
#endif
  const I row = static_cast<I>(top), column = static_cast<I>(left);
  s.down = y - top;
  s.right = x - left;
  const bool upper = touches & (row >= 0), lower = touches & (row + 1 < height);
  const bool before = column >= 0, after = column + 1 < width;
  for (int q = 0; q < 4; ++q) {
    s.inside[q] = ((q >> 1) ? lower : upper) & ((q & 1) ? after : before);
    s.pixel[q] = s.inside[q] ? (row + (q >> 1)) * width + column + (q & 1) : 0;
    const A vertical = (q >> 1) ? s.down : A(1) - s.down;
    const A horizontal = (q & 1) ? s.right : A(1) - s.right;
    s.weight[q] = s.inside[q] ? vertical * horizontal : A(0);
  }
  return touches;
}

// Gradients of a sample with respect to y, x and the mask, from the products of the incoming
// gradient with the four pixels (zero for those outside).
template <typename A, typename I>
EFFJAX_INLINE void sample_gradients(const Sample<A, I>& s, const A product[4], A mask, A& dy,
                                    A& dx, A& dmask) {
  dy = mask * ((A(1) - s.right) * (product[2] - product[0]) + s.right * (product[3] - product[1]));
  dx = mask * ((A(1) - s.down) * (product[1] - product[0]) + s.down * (product[3] - product[2]));
  dmask = s.weight[0] * product[0] + s.weight[1] * product[1] + s.weight[2] * product[2] +
          s.weight[3] * product[3];
}

}  // namespace effjax

#endif  // EFFJAX_SAMPLING_H_
