// Dispatch of the emulated kernels by dtype.
#pragma once

#include <cstring>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

// Calls `run` with a value of the type of images, and one of the type of their gradients.
template <typename Run>
void with_types(const char* dtype, const Run& run) {
  if (!std::strcmp(dtype, "float32")) run(float(), float());
  if (!std::strcmp(dtype, "float64")) run(double(), double());
  if (!std::strcmp(dtype, "bfloat16")) run(__nv_bfloat16(), float());
  if (!std::strcmp(dtype, "float16")) run(__half(), float());
}
