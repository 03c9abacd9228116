// A custom call that copies an array, and breaks the rules on request.
#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

enum Fault : int64_t { kNone, kWriteAfter, kWriteBefore, kAddAfter, kChangeOperand, kReadAfter, kSkip };

static ffi::Error copy(ffi::Buffer<ffi::F32> x, ffi::Result<ffi::Buffer<ffi::F32>> y, int64_t fault) {
  const int64_t n = x.element_count();
  float* from = x.typed_data();
  float* to = y->typed_data();
  // As a kernel whose loop ends too late, starts too early, or ends too early.
  std::memcpy(to, from, (fault == kSkip ? n - 1 : n) * sizeof(float));
  if (fault == kWriteAfter) to[n] = 1;
  if (fault == kWriteBefore) to[-1] = 1;
  if (fault == kAddAfter) to[n] += 1;
  if (fault == kChangeOperand) from[0] += 1;
  if (fault == kReadAfter) to[n - 1] += 0 * from[n];
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(BrokenCopy, copy,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("fault"));
