// Of float32 factors in two and in three pieces of bfloat16.
#include "pieces/pieces_sm90.cuh"

namespace jaxext {

std::vector<PiecesKernel> PiecesOfBF16() { return {sm90::Pieces<2>::Entry(), sm90::Pieces<3>::Entry()}; }

}  // namespace jaxext
