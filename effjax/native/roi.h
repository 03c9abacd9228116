// The mathematics of pooling boxes, compiled into the CPU and the CUDA handlers.
//
// A bin is a grid of samples. Its weights are products of one number for the row of a pixel and one
// for its column, so that along each axis the samples are first added up by pixel.
#ifndef EFFJAX_ROI_H_
#define EFFJAX_ROI_H_

#include "sampling.h"

namespace effjax {

// x is [N, H, W, parts * parts * C], y [N, R, P, C] for R boxes of P = rows * columns bins; positions
// are [N, R, P, G, 2] for G groups of C / G channels.
struct Pooling {
  int64_t N, H, W, C, R, P, G, rows, columns, parts;
  double margin;   // samples up to this distance outside of the outermost pixels count
  bool of_inside;  // the mean is of the samples that count, not of all

  EFFJAX_INLINE int64_t pixel_size() const { return parts * parts * C; }
  // The channel of x at which those of a bin begin.
  EFFJAX_INLINE int64_t channel_of(int64_t bin) const {
    return (bin / columns * parts / rows * parts + bin % columns * parts / columns) * C;
  }
};

// The samples of a bin along one axis: sample i is at first + i * step.
template <typename A>
struct Axis {
  A first, step;
  int64_t size;        // of the image
  int64_t begin, end;  // the samples that count

  EFFJAX_INLINE A at(int64_t i) const { return first + A(i) * step; }
};

// Those that count are at -margin <= at <= size - 1 + margin. There are none where first or step is
// no number, and nothing infinite is turned into an integer.
template <typename A>
EFFJAX_INLINE Axis<A> make_axis(A first, A step, A count, int64_t size, A margin) {
  Axis<A> axis{first, step, size, 0, 0};
  const A most = A(size - 1) + margin;
  if (!(first - first == A(0)) || !(step - step == A(0)) || !(count >= A(1))) return axis;
  axis.end = static_cast<int64_t>(count < A(1 << 20) ? count : A(1 << 20));
  const auto counts = [&](int64_t i) { return axis.at(i) >= -margin && axis.at(i) <= most; };
  if (step > A(0)) {  // one more on either side, since sums are rounded
    const A from = (-margin - first) / step - A(1), to = (most - first) / step + A(2);
    if (!(from < A(axis.end)) || !(to > A(0))) {
      axis.end = 0;
      return axis;
    }
    if (from > A(0)) axis.begin = static_cast<int64_t>(from);
    if (to < A(axis.end)) axis.end = static_cast<int64_t>(to);
  }
  while (axis.begin < axis.end && !counts(axis.begin)) ++axis.begin;
  while (axis.begin < axis.end && !counts(axis.end - 1)) --axis.end;
  return axis;
}

// The two pixels of a sample along one axis, with weights 1 - fraction and fraction. Beyond the
// outermost pixels it is moved there, and then its position has no gradient: it is not `within`.
template <typename A>
struct Tap {
  int64_t low, high;
  A fraction;
  bool within;
};

template <typename A>
EFFJAX_INLINE Tap<A> make_tap(A at, int64_t size) {
  const bool within = at >= A(0) && at < A(size - 1);
  const int64_t low = within ? static_cast<int64_t>(at) : at > A(0) ? size - 1 : 0;
  return {low, low + 1 < size ? low + 1 : low, within ? at - A(low) : A(0), within};
}

}  // namespace effjax

#endif  // EFFJAX_ROI_H_
