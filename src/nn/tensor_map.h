// Tensor maps: how the copy engine sees a matrix. Encoded by the driver, which is looked up at run time.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace plumb::kernel {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      return Encode(nullptr);
    }
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

// Boxes of 64 columns and `box_rows` rows; what lies outside the matrix arrives as zeros.
inline bool encode(CUtensorMap& map, const void* data, int64_t rows, int64_t columns, int box_rows) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// `groups` matrices of sums, `spacing` bytes apart.
inline bool encode_sums(CUtensorMap& map, float* data, int64_t out, int64_t in, int64_t groups, int64_t spacing) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(in), static_cast<cuuint64_t>(out),
                              static_cast<cuuint64_t>(groups)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(in) * 4, static_cast<cuuint64_t>(spacing)};
  const cuuint32_t box[] = {32, 16, 1}, steps[] = {1, 1, 1};
  return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, data, sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace plumb::kernel
