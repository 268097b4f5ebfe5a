// Flash attention on tensor cores by mma.sync, sm_80 and newer: bfloat16 and float16, float32 accumulation, head_dim a multiple of 8 up to HEAD_DIM.
// A warp owns 16 (or 2 x 16) rows of a product; scores stay in its registers, where a product's result has the layout of the next product's left factor.
#include "flash.cuh"
#if HEAD_DIM <= 128 && !defined(MMA_ONLY)
#define HOPPER (HEAD_DIM <= 64 ? 64 : 128) // columns of a tile in shared memory
#endif

// Tiles for each head_dim: rows and columns, and warps. Shared memory stays under 99 KiB, which every card since sm_86 has.
template <int D> struct Sizes;
template <> struct Sizes<32> { static constexpr int FM = 128, FN = 64, FW = 4, KM = 128, KN = 64, KW = 8, QM = 128, QN = 64, QW = 4; };
template <> struct Sizes<64> { static constexpr int FM = 128, FN = 64, FW = 4, KM = 128, KN = 64, KW = 8, QM = 128, QN = 32, QW = 4; };
template <> struct Sizes<96> { static constexpr int FM = 128, FN = 32, FW = 4, KM = 64, KN = 64, KW = 4, QM = 128, QN = 32, QW = 4; };
template <> struct Sizes<128> { static constexpr int FM = 128, FN = 32, FW = 4, KM = 64, KN = 32, KW = 4, QM = 128, QN = 16, QW = 4; };
template <> struct Sizes<192> { static constexpr int FM = 64, FN = 64, FW = 4, KM = 64, KN = 32, KW = 4, QM = 64, QN = 32, QW = 4; };
template <> struct Sizes<256> { static constexpr int FM = 64, FN = 32, FW = 4, KM = 64, KN = 16, KW = 4, QM = 64, QN = 16, QW = 4; };

#ifdef __CUDACC__
template <class T> __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> __device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma<half_t>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <class T> __device__ __forceinline__ uint32_t pack(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack<bf16>(float lo, float hi) { const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi); return *(const uint32_t*)&v; }
template <> __device__ __forceinline__ uint32_t pack<half_t>(float lo, float hi) { const __half2 v = __floats2half2_rn(lo, hi); return *(const uint32_t*)&v; }
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void ldmatrix_t(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// 16 (4) bytes from global to shared memory, zeros if not `in`
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool in) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(in ? 16 : 0) : "memory"); }
__device__ __forceinline__ void copy4(uint32_t to, const void* from, bool in) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(in ? 4 : 0) : "memory"); }

__device__ __forceinline__ float2 shared2(uint32_t at) { // volatile: read where it stands, not early into registers that are dear
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

// A tile in shared memory: rows of D elements in chunks of 16 bytes, which are permuted so that 8 rows' chunk c lie in different banks.
template <int D> __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, int row, int chunk) { return tile + row * D * 2 + ((chunk ^ (D % 64 == 0 ? row & 7 : (row >> 1) & 3)) << 4); }
// The same from the address of chunk 0 or 1 of a lane's row: `chunk` (even) on, `rows` (a multiple of 8) down. One instruction, no register for each chunk.
template <int D> __device__ __forceinline__ uint32_t beyond(uint32_t at, int rows, int chunk) {
    constexpr int low = D % 64 == 0 ? 7 : 3;
    return (at ^ ((chunk & low) << 4)) + ((chunk & ~low) << 4) + rows * D * 2;
}
template <class T, int D, int ROWS, int THREADS> __device__ __forceinline__ void load(uint32_t tile, const T* x, int64_t stride, int row0, int rows, int dim) {
    static_assert(ROWS * D / 8 % THREADS == 0);
    if constexpr (THREADS % D == 0) { // a thread keeps its column: one address, moved down
        constexpr int step = THREADS / (D / 8);
        int r = threadIdx.x / (D / 8);
        const int c = threadIdx.x % (D / 8);
        uint32_t to = chunk_at<D>(tile, r, c);
        const T* from = x + (row0 + r) * stride + c * 8;
        if (c * 8 >= dim) rows = 0;
#pragma unroll 4
        for (int n = 0; n < ROWS / step; n++, r += step, to += step * D * 2, from += step * stride) copy16(to, row0 + r < rows ? from : x, row0 + r < rows);
    } else {
#pragma unroll 4
        for (int n = 0; n < ROWS * D / 8 / THREADS; n++) {
            const int e = n * THREADS + threadIdx.x, r = e / (D / 8), c = e % (D / 8);
            const bool in = row0 + r < rows && c * 8 < dim;
            copy16(chunk_at<D>(tile, r, c), x + (in ? (row0 + r) * stride + c * 8 : 0), in);
        }
    }
}
// acc[m] (16 rows by 8 NT columns) = a (rows a_row + 16 m of a tile) times b^T (8 NT rows of a tile)
template <class T, int D, int NT, int MT> __device__ __forceinline__ void product_nt(float (&acc)[MT][NT][4], uint32_t a, int a_row, uint32_t b, int lane) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0;
    const uint32_t at_a = chunk_at<D>(a, a_row + (lane & 15), lane >> 4), at_b = chunk_at<D>(b, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t x[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) ldmatrix(x[m], beyond<D>(at_a, 16 * m, 2 * k));
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t y[4];
            ldmatrix(y, beyond<D>(at_b, 8 * n, 2 * k));
#pragma unroll
            for (int m = 0; m < MT; m++) mma<T>(acc[m][n], x[m], y[0], y[1]), mma<T>(acc[m][n + 1], x[m], y[2], y[3]);
        }
    }
}
// acc[m] (16 rows by D columns) += p[m] (a result of the above, rounded to T) times b (8 NT rows of a tile)
template <class T, int D, int NT, int MT> __device__ __forceinline__ void product_nn(float (&acc)[MT][D / 8][4], const float (&p)[MT][NT][4], uint32_t b, int lane) {
    const uint32_t at_b = chunk_at<D>(b, lane & 15, lane >> 4);
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        uint32_t x[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][i] = pack<T>(p[m][2 * k + i / 2][i % 2 * 2], p[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t y[4];
            ldmatrix_t(y, beyond<D>(at_b, 16 * k, n));
#pragma unroll
            for (int m = 0; m < MT; m++) mma<T>(acc[m][n], x[m], y[0], y[1]), mma<T>(acc[m][n + 1], x[m], y[2], y[3]);
        }
    }
}
// Four lanes have two elements each of four pieces of eight; after it, lane i has the eight of piece i
__device__ __forceinline__ void gather4(uint32_t (&u)[4], int i) {
    const uint32_t a = __shfl_xor_sync(~0u, i & 1 ? u[0] : u[1], 1), b = __shfl_xor_sync(~0u, i & 1 ? u[2] : u[3], 1);
    if (i & 1) u[0] = a, u[2] = b; else u[1] = a, u[3] = b;
    const uint32_t c = __shfl_xor_sync(~0u, i & 2 ? u[0] : u[2], 2), d = __shfl_xor_sync(~0u, i & 2 ? u[1] : u[3], 2);
    if (i & 2) u[0] = c, u[1] = d; else u[2] = c, u[3] = d;
}
// Rows of a warp's result to memory, 16 bytes a lane; `by` is a factor for each row
template <class T, int D, int MT> __device__ __forceinline__ void store(T* to, int64_t stride, int row0, int rows, int dim, const float (&acc)[MT][D / 8][4], const float (&by)[MT][2], int lane) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = row0 + 16 * m + 8 * h + lane / 4;
#pragma unroll
            for (int n = 0; n < D / 8; n += 4) {
                uint32_t u[4];
#pragma unroll
                for (int i = 0; i < 4; i++) u[i] = pack<T>(acc[m][n + i][2 * h] * by[m][h], acc[m][n + i][2 * h + 1] * by[m][h]);
                gather4(u, lane % 4);
                const int col = (n + lane % 4) * 8;
                if (row < rows && col < dim) *(uint4*)(to + row * stride + col) = make_uint4(u[0], u[1], u[2], u[3]);
            }
        }
}

#endif
#include "flash_decode.cuh"
#ifdef HOPPER
#include "flash_sm90.cuh"
#endif

constexpr int bytes_of(Launch l) { // what a launch asks for
    using Z = Sizes<HEAD_DIM>;
    switch (l) {
        case FORWARD: return (Z::FM + 2 * Z::FN) * HEAD_DIM * 2;
        case BACKWARD_KEYS: return (2 * Z::KM + 4 * Z::KN) * HEAD_DIM * 2 + 4 * Z::KN * 4;
        case BACKWARD_QUERIES: return (2 * Z::QM + 4 * Z::QN) * HEAD_DIM * 2;
        case FEW: return few_bytes<HEAD_DIM>;
#ifdef HOPPER
        case HOPPER_FORWARD: return forward_sm90_bytes<HOPPER>(HEAD_DIM == 64 ? 3 : 2);
        case HOPPER_SHORT_FORWARD: return forward_sm90_bytes<HOPPER>(2);
        case HOPPER_BACKWARD: return One<HOPPER, HEAD_DIM>::BYTES;
#endif
        default: return -1;
    }
}
int64_t shared_bytes(int64_t launch, int64_t D) { return bytes_of((Launch)launch); }
// FEW, where a block may take all cuts of a cache: what it then asks for; `room` and `sms` are the card's
int64_t few_shared(int64_t heads, int64_t cuts, int64_t rows, int64_t room, int64_t sms) {
    return few_run<HEAD_DIM>(heads, cuts, rows, room, sms) > 1 ? few_all_bytes<HEAD_DIM>(rows) : few_bytes<HEAD_DIM>;
}
STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) { m.def("few_shared(int heads, int cuts, int rows, int room, int sms) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CompositeExplicitAutograd, m) { m.impl("few_shared", TORCH_BOX(&few_shared)); }
static_assert(std::max({bytes_of(FORWARD), bytes_of(BACKWARD_KEYS), bytes_of(BACKWARD_QUERIES), bytes_of(FEW)}) + OWN_MOST <= SMALL);
static_assert(bytes_of(HOPPER_FORWARD) + OWN_MOST <= HOPPER_MOST && bytes_of(HOPPER_SHORT_FORWARD) + OWN_MOST <= HOPPER_MOST && bytes_of(HOPPER_BACKWARD) + 256 <= HOPPER_MOST);

#ifdef __CUDACC__

template <class T, int D, int BM, int BN, int WARPS> __global__ void __launch_bounds__(WARPS * 32) forward_kernel(const Flash f) {
    constexpr int THREADS = WARPS * 32, MT = BM / WARPS / 16, NT = BN / 8;
    extern __shared__ __align__(128) char smem[];
    const uint32_t q = __cvta_generic_to_shared(smem), k = q + BM * D * 2, v = k + BN * D * 2;
    const int lane = threadIdx.x % 32, tiles = tiles_of(f.T, BM), i0 = (tiles - 1 - (int)(blockIdx.x % tiles)) * BM; // heavy tiles first
    const int bh = blockIdx.x / tiles, b = bh / f.H, h = bh % f.H, hk = h / f.group, row0 = threadIdx.x / 32 * 16 * MT;
    const T *pk = f.k.at<const T>(b, hk), *pv = f.v.at<const T>(b, hk);
    const Span t = span_of([&](int i) { return keys_of(f, b, i); }, i0, BM, f.T, BN);
    float m[MT][2], l[MT][2], o[MT][D / 8][4] = {};
#pragma unroll
    for (int x = 0; x < MT; x++) m[x][0] = m[x][1] = -INFINITY, l[x][0] = l[x][1] = 0;
    load<T, D, BM, THREADS>(q, f.q.at<const T>(b, h), f.q.n, i0, f.T, f.D);
    if (t.begin < t.end) load<T, D, BN, THREADS>(k, pk, f.k.n, t.begin * BN, f.S, f.D);
    copy_commit();
    for (int jt = t.begin; jt < t.end; jt++) {
        const int j0 = jt * BN;
        copy_wait<0>();
        __syncthreads(); // keys are here, and everybody is done with the last values
        load<T, D, BN, THREADS>(v, pv, f.v.n, j0, f.S, f.D);
        copy_commit();
        float s[MT][NT][4];
        product_nt<T, D, NT, MT>(s, q, row0, k, lane);
        copy_wait<0>();
        __syncthreads(); // values are here, and everybody is done with the keys
        if (jt + 1 < t.end) load<T, D, BN, THREADS>(k, pk, f.k.n, j0 + BN, f.S, f.D);
        copy_commit();
        const bool mask = t.all_lo > j0 || t.all_hi < j0 + BN;
#pragma unroll
        for (int x = 0; x < MT; x++)
#pragma unroll
            for (int y = 0; y < 2; y++) {
                if (mask) {
                    const int i = i0 + row0 + 16 * x + 8 * y + lane / 4, j = j0 + lane % 4 * 2;
                    const Run seen = i < f.T ? keys_of(f, b, i) : Run{0, 0};
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (n * 8 + e < seen.lo - j || n * 8 + e >= seen.hi - j) s[x][n][2 * y + e] = -INFINITY;
                }
                float top = m[x][y];
#pragma unroll
                for (int n = 0; n < NT; n++) top = fmaxf(top, fmaxf(s[x][n][2 * y], s[x][n][2 * y + 1]));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                const float base = top == -INFINITY ? 0.f : top * f.scale_log2, shrink = exp2_fast(m[x][y] * f.scale_log2 - base);
                float sum = 0;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) sum += s[x][n][2 * y + e] = exp2_fast(fmaf(s[x][n][2 * y + e], f.scale_log2, -base));
                m[x][y] = top, l[x][y] = l[x][y] * shrink + sum;
#pragma unroll
                for (int n = 0; n < D / 8; n++) o[x][n][2 * y] *= shrink, o[x][n][2 * y + 1] *= shrink;
            }
        product_nn<T, D, NT, MT>(o, s, v, lane);
    }
    float by[MT][2];
#pragma unroll
    for (int x = 0; x < MT; x++)
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const float sum = lane_sum(l[x][y], 4);
            const int i = i0 + row0 + 16 * x + 8 * y + lane / 4;
            by[x][y] = sum > 0 ? 1 / sum : 0;
            if (lane % 4 == 0 && i < f.T) f.lse[(int64_t)bh * f.T + i] = sum > 0 ? m[x][y] * f.scale + __logf(sum) : -INFINITY;
        }
    store<T, D, MT>(f.o.at<T>(b, h), f.o.n, i0 + row0, f.T, f.D, o, by, lane);
}

// The block owns BM rows (keys, if KEYS; else queries) and walks over tiles of BN columns, for keys over all heads of the group.
// A: add up dk (dq); B: add up dv. Both at once where registers allow.
template <class T, int D, int BM, int BN, int WARPS, bool KEYS, bool A, bool B> __global__ void __launch_bounds__(WARPS * 32) backward_kernel(const Flash f) {
    constexpr int THREADS = WARPS * 32, MT = BM / WARPS / 16, NT = BN / 8, STAGE = 2 * BN * D * 2 + (KEYS ? 2 * BN * 4 : 0);
    extern __shared__ __align__(128) char smem[];
    const uint32_t own1 = __cvta_generic_to_shared(smem), own2 = own1 + BM * D * 2, stages = own2 + BM * D * 2; // k, v and q, g; or the other way round
    const int n_own = KEYS ? f.S : f.T, n_other = KEYS ? f.T : f.S, heads = KEYS ? f.Hkv : f.H;
    const int lane = threadIdx.x % 32, tiles = tiles_of(n_own, BM), tile = KEYS ? blockIdx.x % tiles : tiles - 1 - (int)(blockIdx.x % tiles), r0 = tile * BM;
    const int bh = blockIdx.x / tiles, b = bh / heads, h = bh % heads, row0 = threadIdx.x / 32 * 16 * MT;
    auto run = [&](int r) { return KEYS ? queries_of(f, b, r) : keys_of(f, b, r); };
    const Span t = span_of(run, r0, BM, n_own, BN);
    const int steps = max(t.end - t.begin, 0) * (KEYS ? f.group : 1);
    __shared__ float2 stats[KEYS ? 1 : BM]; // lse and delta of the block's queries
    if (!KEYS)
        for (int r = threadIdx.x; r < BM; r += THREADS) stats[r] = r0 + r < n_own ? float2{f.lse[(int64_t)bh * f.T + r0 + r], f.delta[(int64_t)bh * f.T + r0 + r]} : float2{};
    const uint32_t row_stats = __cvta_generic_to_shared(stats + (KEYS ? 0 : row0 + lane / 4));
    const Rows &R1 = KEYS ? f.k : f.q, &R2 = KEYS ? f.v : f.g, &X1 = KEYS ? f.q : f.k, &X2 = KEYS ? f.g : f.v;
    load<T, D, BM, THREADS>(own1, R1.at<const T>(b, h), R1.n, r0, n_own, f.D);
    load<T, D, BM, THREADS>(own2, R2.at<const T>(b, h), R2.n, r0, n_own, f.D);
    int hx = KEYS ? h * f.group : h / f.group, next = t.begin, side = 0; // what is fetched next, and where to
    auto fetch = [&] {
        const uint32_t x = stages + side * STAGE;
        load<T, D, BN, THREADS>(x, X1.at<const T>(b, hx), X1.n, next * BN, n_other, f.D);
        load<T, D, BN, THREADS>(x + BN * D * 2, X2.at<const T>(b, hx), X2.n, next * BN, n_other, f.D);
        if (KEYS && threadIdx.x < BN) {
            const int i = next * BN + threadIdx.x;
            const int64_t row = i < f.T ? ((int64_t)b * f.H + hx) * f.T + i : 0;
            copy4(x + 2 * BN * D * 2 + threadIdx.x * 4, f.lse + row, i < f.T);
            copy4(x + 2 * BN * D * 2 + (BN + threadIdx.x) * 4, f.delta + row, i < f.T);
        }
        side ^= 1;
        if (++next == t.end) next = t.begin, hx++;
    };
    if (steps) fetch();
    copy_commit();
    float d1[MT][D / 8][4] = {}, d2[MT][B ? D / 8 : 1][4] = {};
    for (int step = 0; step < steps; step++) {
        const uint32_t x1 = stages + (side ^ 1) * STAGE, x2 = x1 + BN * D * 2;
        const int c0 = ((next == t.begin ? t.end : next) - 1) * BN;
        copy_wait<0>();
        __syncthreads(); // this tile is here, and everybody is done with the last one
        if (step + 1 < steps) fetch();
        copy_commit();
        const uint32_t row_lse = x2 + BN * D * 2 + lane % 4 * 8; // of this lane's columns, two at a time
        const bool mask = t.all_lo > c0 || t.all_hi < c0 + BN;
        float s[MT][NT][4];
        product_nt<T, D, NT, MT>(s, own1, row0, x1, lane);
#pragma unroll
        for (int x = 0; x < MT; x++)
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const float row = KEYS ? 0.f : -LOG2E * shared2(row_stats + (16 * x + 8 * y) * 8).x;
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const float2 cols = KEYS ? shared2(row_lse + n * 32) : float2{};
                    s[x][n][2 * y] = exp2_fast(fmaf(s[x][n][2 * y], f.scale_log2, KEYS ? -LOG2E * cols.x : row));
                    s[x][n][2 * y + 1] = exp2_fast(fmaf(s[x][n][2 * y + 1], f.scale_log2, KEYS ? -LOG2E * cols.y : row));
                }
            }
        if (mask)
#pragma unroll
            for (int x = 0; x < MT; x++)
#pragma unroll
                for (int y = 0; y < 2; y++) {
                    const int r = r0 + row0 + 16 * x + 8 * y + lane / 4, c = c0 + lane % 4 * 2;
                    const Run seen = r < n_own ? run(r) : Run{0, 0};
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (n * 8 + e < seen.lo - c || n * 8 + e >= seen.hi - c) s[x][n][2 * y + e] = 0;
                }
        if constexpr (B) product_nn<T, D, NT, MT>(d2, s, x2, lane);
        if constexpr (A) {
            float dp[MT][NT][4];
            product_nt<T, D, NT, MT>(dp, own2, row0, x2, lane);
#pragma unroll
            for (int x = 0; x < MT; x++)
#pragma unroll
                for (int y = 0; y < 2; y++) {
                    const float row = KEYS ? 0.f : shared2(row_stats + (16 * x + 8 * y) * 8).y;
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        const float2 cols = KEYS ? shared2(row_lse + BN * 4 + n * 32) : float2{};
                        s[x][n][2 * y] *= dp[x][n][2 * y] - (KEYS ? cols.x : row);
                        s[x][n][2 * y + 1] *= dp[x][n][2 * y + 1] - (KEYS ? cols.y : row);
                    }
                }
            product_nn<T, D, NT, MT>(d1, s, x1, lane);
        }
    }
    copy_wait<0>();
    float by[MT][2], one[MT][2];
#pragma unroll
    for (int x = 0; x < MT; x++) by[x][0] = by[x][1] = f.scale, one[x][0] = one[x][1] = 1;
    const Rows& O1 = KEYS ? f.dk : f.dq;
    if constexpr (A) store<T, D, MT>(O1.at<T>(b, h), O1.n, r0 + row0, n_own, f.D, d1, by, lane);
    if constexpr (B) store<T, D, MT>(f.dv.at<T>(b, h), f.dv.n, r0 + row0, n_own, f.D, d2, one, lane);
}

struct Mma {
    static constexpr bool VEC = true;
    using Z = Sizes<HEAD_DIM>;
    static bool few(const Flash& f) { return (int64_t)f.T * f.group <= MAX_ROWS; }
    static int64_t scratch(const Flash& f) { // floats that the forward needs
        const int cuts = cuts_of(f, Cut<HEAD_DIM>::KEYS, tiles_in_cut(f, Cut<HEAD_DIM>::KEYS));
        if (few(f)) return cuts > 1 ? (int64_t)f.B * f.H * f.T * cuts * (HEAD_DIM + 1) : 0;
#ifdef HOPPER
        if (is_sm90()) return 1; // a counter
#endif
        return 0;
    }
    static int64_t backward_scratch(const Flash& f) {
#ifdef HOPPER
        if (is_sm90()) return backward_sm90_scratch<HOPPER, HEAD_DIM>(f);
#endif
        return (int64_t)f.B * f.H * f.T;
    }
    template <class T> static void forward(const Flash& f, cudaStream_t s) {
        if (few(f)) return decode<T, HEAD_DIM>(f, s);
#ifdef HOPPER
        // Three warpgroups fit at 64; two waste less of short rows, and those of smaller heads mostly are.
        if (HEAD_DIM == 64 && f.T > 1024 ? forward_sm90_run<T, HOPPER, HEAD_DIM, 128, HEAD_DIM == 64 ? 3 : 2>(f, (int*)f.delta, s) : forward_sm90_run<T, HOPPER, HEAD_DIM, 128, 2>(f, (int*)f.delta, s)) return;
#endif
        auto* k = forward_kernel<T, HEAD_DIM, Z::FM, Z::FN, Z::FW>;
        constexpr int bytes = bytes_of(FORWARD);
        allow_smem((const void*)k, bytes);
        k<<<f.B * f.H * tiles_of(f.T, Z::FM), Z::FW * 32, bytes, s>>>(f);
    }
    template <class T, int BM, int BN, int WARPS, bool KEYS, bool A, bool B> static void backward(const Flash& f, cudaStream_t s) {
        auto* k = backward_kernel<T, HEAD_DIM, BM, BN, WARPS, KEYS, A, B>;
        constexpr int bytes = bytes_of(KEYS ? BACKWARD_KEYS : BACKWARD_QUERIES);
        static_assert(BM == (KEYS ? Z::KM : Z::QM) && BN == (KEYS ? Z::KN : Z::QN));
        allow_smem((const void*)k, bytes);
        const int blocks = f.B * (KEYS ? f.Hkv : f.H) * tiles_of(KEYS ? f.S : f.T, BM);
        if (blocks) k<<<blocks, WARPS * 32, bytes, s>>>(f);
    }
    template <class T> static void run(const Flash& f, bool back, cudaStream_t s) {
        if (!back) return forward<T>(f, s);
#ifdef HOPPER
        if (backward_sm90_run<T, HOPPER, HEAD_DIM>(f, f.delta, s)) return;
#endif
        run_delta<T>(f, true, s);
        if constexpr (HEAD_DIM <= 128) backward<T, Z::KM, Z::KN, Z::KW, true, true, true>(f, s);
        else backward<T, Z::KM, Z::KN, Z::KW, true, true, false>(f, s), backward<T, Z::KM, Z::KN, Z::KW, true, false, true>(f, s);
        backward<T, Z::QM, Z::QN, Z::QW, false, true, false>(f, s);
    }
    static void dispatch(ScalarType type, const Flash& f, bool back, cudaStream_t s) {
        STD_TORCH_CHECK(f.D % 8 == 0 && f.D <= HEAD_DIM, "flash: head_dim must be a multiple of 8 up to ", HEAD_DIM);
        if (type == ScalarType::BFloat16) run<bf16>(f, back, s);
        else if (type == ScalarType::Half) run<half_t>(f, back, s);
        else STD_TORCH_CHECK(false, "flash: dtype must be bfloat16 or float16");
    }
};
#endif
FLASH_OPS(Mma)
