// In place of CUDA's, which is the C functions and what C++ adds to them.
#pragma once
#include "cuda_runtime_api.h"
