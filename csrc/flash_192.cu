// Tensor cores, head_dim up to 192
#define HEAD_DIM 192
#include "flash_mma.cuh"
