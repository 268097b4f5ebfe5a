// Tensor cores, head_dim up to 256
#define HEAD_DIM 256
#include "flash_mma.cuh"
