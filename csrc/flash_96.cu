// Tensor cores, head_dim up to 96
#define HEAD_DIM 96
#include "flash_mma.cuh"
