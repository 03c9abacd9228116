// Reports the version of XLA's FFI this library was built for. The Python loader checks it.

#include <cstdint>

#include "xla/ffi/api/c_api.h"

extern "C" void effjax_ffi_api_version(int32_t* major, int32_t* minor) {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}
