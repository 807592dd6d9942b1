// TMA descriptors of matrices, made without CuTe.
#pragma once

#include "common/sm90.cuh"  // first

namespace jaxext::sm90 {

// `batch` matrices with rows of `inner` elements, `leading` elements apart.  A box is 128 bytes of `rows` rows, swizzled as wgmma wants it.
inline CUtensorMap TmaDescriptor(CUtensorMapDataType type, int bytes, const void* array, int64_t inner, int64_t outer, int64_t batch,
                                 int64_t leading, int64_t batch_stride, int rows) {
  CUtensorMap map = {};
  const cuuint64_t sizes[] = {cuuint64_t(inner), cuuint64_t(outer), cuuint64_t(batch)};
  const cuuint64_t strides[] = {cuuint64_t(leading * bytes), cuuint64_t(batch_stride * bytes)};
  const cuuint32_t box[] = {cuuint32_t(128 / bytes), cuuint32_t(rows), 1}, every[] = {1, 1, 1};
  CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)
  (&map, type, 3, const_cast<void*>(array), sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

}  // namespace jaxext::sm90
