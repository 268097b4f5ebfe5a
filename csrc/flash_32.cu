// Tensor cores, head_dim up to 32
#define HEAD_DIM 32
#include "flash_mma.cuh"
