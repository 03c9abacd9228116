// Bilinear sampling of a point and its gradients, for all operators that sample images. Compiled
// for CPUs and for CUDA.
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

// A point between four pixels. Pixel q is 0: upper left, 1: upper right, 2: lower left, 3: lower
// right, so q = 2 * lower + right. For pixels outside of the image, weight[q] is 0 and pixel[q] is
// 0, a valid index. I is the integer type of pixel indices.
template <typename A, typename I = int64_t>
struct Sample {
  using Index = I;
  Index pixel[4];  // row * W + column
  A weight[4];
  A down, right;     // distance from pixel 0, in [0, 1)
  bool inside[4];
};

// Computes the sample at (y, x). Returns false if all four pixels lie outside of the image, that is
// unless -1 < y < height and -1 < x < width; the sample is then zero.
//
// `touches` is false for NaN, and out-of-range coordinates are replaced by 0 before the conversion
// to integers, which would be undefined for them. There are no branches, because CPUs cannot
// predict whether random points lie inside.
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

// Gradients with respect to y, x and the mask. product[q] is the sum over channels of the incoming
// gradient times pixel q, and 0 for pixels outside.
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
