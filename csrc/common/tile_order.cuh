// The order in which the blocks of a kernel for Hopper compute the tiles of its results.
#pragma once

#include <algorithm>

#include "common/sm90.cuh"  // first

namespace jaxext::sm90 {

// The row and column of a tile, counted in tiles.
struct TileIndex {
  int matrix, row, column;
};

// The first row and column of a tile, in a batch and in a part of a split sum.
struct TileOrigin {
  int batch, split, row, column;
};

// Matrices follow each other, and in a matrix bands of columns.  The tiles of a band share their rows in the L2 cache.
struct TileOrder {
  int rows, columns, band;  // of a matrix, in tiles or in clusters of them, and the columns of a band
  int tiles;                // of all matrices

  struct Index {
    int matrix, inside, first, width;  // a tile's number in its band, and the band's first column and width

    CUTLASS_DEVICE int row() const { return inside / width; }
    CUTLASS_DEVICE int column() const { return first + inside % width; }
  };

  CUTLASS_DEVICE Index operator[](int index) const {
    const int of_matrix = rows * columns;
    const int matrix = index / of_matrix, rest = index % of_matrix;
    const int first = rest / (rows * band) * band;
    return {matrix, rest - first * rows, first, cute::min(band, columns - first)};
  }
};

inline TileOrder OrderTiles(int64_t matrices, int64_t rows, int64_t columns, int64_t band = 8) {
  return {int(rows), int(columns), int(std::min(columns, band)), int(matrices * rows * columns)};
}

}  // namespace jaxext::sm90
