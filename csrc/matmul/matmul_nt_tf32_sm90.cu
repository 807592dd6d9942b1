// NT of float32 as TF32, the only role in which wgmma takes it, plain and with an epilogue.  TMA rounds on the way to shared memory.
#include "matmul/matmul_sm90.cuh"

namespace jaxext {
namespace {

template <int kTileM, int kTileN, int kClusterM, sm90::Schedule kSchedule, bool kFused>
MatmulKernel Tile() {
  return sm90::Matmul<MatmulRole::kNT, Dtype::kF32, Dtype::kF32, kTileM, kTileN, 32, kClusterM, kSchedule, kFused>::Entry();
}

}  // namespace

std::vector<MatmulKernel> MatmulNTTF32() {
  return {
      Tile<128, 256, 2, sm90::Schedule::kCooperative, false>(),
      Tile<128, 192, 2, sm90::Schedule::kPingpong, false>(),
      Tile<64, 64, 1, sm90::Schedule::kPingpong, false>(),
      // The epilogue's float32 leaves shared memory for three stages; of 128x256 it would be two, and ping-pong needs more registers.
      Tile<128, 192, 2, sm90::Schedule::kCooperative, true>(),
      Tile<64, 128, 1, sm90::Schedule::kPingpong, true>(),
  };
}

}  // namespace jaxext
