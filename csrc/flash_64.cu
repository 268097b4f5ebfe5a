// Tensor cores, head_dim up to 64
#define HEAD_DIM 64
#include "flash_mma.cuh"
