// The kernels of ragged products of scaled 8-bit floats on Hopper, and how to launch them.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "ragged/visits.h"
#include "scaled/scaled.h"

namespace jaxext {

// a[B,P,R,M,K], b[B,G,N,K], d[B,P,R,M,N]: rows in G groups, and a matrix for each, of which d[m,n] = Σ_k a[m,k] b[group of m,n,k].  A scale
// has an element for each row of a, or for each block of N in J, and for each block of K in S.
struct RaggedScaledProblem {
  JAXEXT_INTEGERS(B, P, R, M, N, K, G, S, J)
};

// The config of a kernel.  Exported programs hold it, so a released tile may be removed only with a new version of the target.
struct RaggedScaledConfig {
  JAXEXT_INTEGERS(tile_m, tile_n, tile_k,
                  cluster_n)  // neighbouring blocks that share their loads of the left operand
};

// Every kernel that was compiled, in no particular order.
const std::vector<ScaledKernel>& RaggedScaledKernels();

// The reason why no kernel takes a problem with these dtypes of a, b and d.
Reason RaggedScaledRefuses(const RaggedScaledProblem& problem, const Dtypes& dtypes, std::optional<int> arch = {});

// Computes d.  A scale of columns that have one each has them beside each other.
Status LaunchRaggedScaled(const RaggedScaledProblem& problem, const RaggedScaledConfig& config, Dtype first, Dtype second, Dtype result,
                          const void* a, const void* b, const Scale& left, const Scale& right, const int32_t* visits, void* d,
                          LaunchStream stream);

// The compile unit's table.
std::vector<ScaledKernel> RaggedScaledE4M3();

}  // namespace jaxext
