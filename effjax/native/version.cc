// The version of XLA's FFI that a library speaks, for the loader to compare.

#include <cstdint>

#include "xla/ffi/api/c_api.h"

extern "C" void effjax_ffi_api_version(int32_t* major, int32_t* minor) {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}
