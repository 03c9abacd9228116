// Sample positions of RoI pooling, shared by the CPU and the CUDA implementation.
//
// The result for a bin is the mean over a grid of bilinear samples. The weight of a pixel is the
// product of a weight along y and a weight along x, so the two axes are handled separately.
#ifndef EFFJAX_ROI_H_
#define EFFJAX_ROI_H_

#include "sampling.h"

namespace effjax {

// Sizes of one call. x is [N, H, W, parts * parts * C] and y [N, R, P, C], for R boxes of
// P = rows * columns bins. `first`, the position of each bin's first sample, is [N, R, P, G, 2],
// for G groups of C / G channels.
struct Pooling {
  int64_t N, H, W, C, R, P, G, rows, columns, parts;
  double margin;   // samples up to this distance outside of the outermost pixels count
  bool of_inside;  // take the mean of the samples that count, instead of all

  EFFJAX_INLINE int64_t pixel_size() const { return parts * parts * C; }
  // Returns the first channel of x for a bin (position-sensitive if parts > 1).
  EFFJAX_INLINE int64_t channel_of(int64_t bin) const {
    return (bin / columns * parts / rows * parts + bin % columns * parts / columns) * C;
  }
};

// The samples of a bin along one axis. Sample i is at first + i * step. I is the integer type of
// pixel indices.
template <typename A, typename I = int64_t>
struct Axis {
  using Index = I;
  A first, step;
  I size;        // number of pixels of the image along this axis
  I begin, end;  // range of the samples that count

  EFFJAX_INLINE A at(I i) const { return first + A(i) * step; }
};

// Finds the samples with -margin <= position <= size - 1 + margin. The range is empty if first or
// step is NaN or infinite, and no out-of-range number is converted to an integer, which would be
// undefined.
template <typename A, typename I = int64_t>
EFFJAX_INLINE Axis<A, I> make_axis(A first, A step, A count, typename Axis<A, I>::Index size,
                                   A margin) {
  Axis<A, I> axis{first, step, size, 0, 0};
  const A most = A(size - 1) + margin;
  if (!(first - first == A(0)) || !(step - step == A(0)) || !(count >= A(1))) return axis;
  axis.end = static_cast<I>(count < A(1 << 20) ? count : A(1 << 20));
  const auto counts = [&](I i) { return axis.at(i) >= -margin && axis.at(i) <= most; };
  if (step > A(0)) {  // skip most of the others; one more on either side allows for rounding
    const A from = (-margin - first) / step - A(1), to = (most - first) / step + A(2);
    if (!(from < A(axis.end)) || !(to > A(0))) {
      axis.end = 0;
      return axis;
    }
    if (from > A(0)) axis.begin = static_cast<I>(from);
    if (to < A(axis.end)) axis.end = static_cast<I>(to);
  }
  while (axis.begin < axis.end && !counts(axis.begin)) ++axis.begin;
  while (axis.begin < axis.end && !counts(axis.end - 1)) --axis.end;
  return axis;
}

// The two pixels of a sample along one axis, with weights 1 - fraction and fraction. A position
// beyond the outermost pixels is clamped to them; `within` is then false and the position has no
// gradient.
template <typename A, typename I = int64_t>
struct Tap {
  using Index = I;
  I low, high;
  A fraction;
  bool within;
};

template <typename A, typename I = int64_t>
EFFJAX_INLINE Tap<A, I> make_tap(A at, typename Tap<A, I>::Index size) {
  const bool within = at >= A(0) && at < A(size - 1);
  const I low = within ? static_cast<I>(at) : at > A(0) ? size - 1 : 0;
  return {low, low + 1 < size ? low + 1 : low, within ? at - A(low) : A(0), within};
}

}  // namespace effjax

#endif  // EFFJAX_ROI_H_
