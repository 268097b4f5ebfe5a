// Tensor cores, head_dim up to 128
#define HEAD_DIM 128
#include "flash_mma.cuh"
