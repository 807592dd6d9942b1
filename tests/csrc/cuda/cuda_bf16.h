// In place of CUDA's: simt.h has the type.
#pragma once
#include "../simt.h"
