// Flash attention as the formulas say it: ordinary float32 arithmetic on tiles in shared memory. Any head_dim up to 256, any element type.
// This is the float32 path, right to rounding, and what the tensor-core kernels are read beside.
#include "flash.cuh"

// 16 x 16 threads; thread (ty, tx) has rows ty + 16 r and, of a product, columns tx + 16 c or 4 tx + 64 c. DB is head_dim rounded up; what is beyond it is 0.
template <int DB> constexpr int PITCH = DB + 4; // 4 more, so that neighbours of a column lie in different banks
template <int DB> struct Tile { static constexpr int F = DB <= 128 ? 4 : 2, B = DB <= 128 ? 2 : 1; }; // rows of 16 in a tile of the forward, and of the backward
template <int DB> constexpr int bytes_of(int tiles, int r) { // float32 tiles of 16 r rows, and the square of weights
    return (tiles * 16 * r * PITCH<DB> + 16 * r * (16 * r + 1)) * 4;
}
template <int DB> constexpr int bytes_of(Launch l) { return l == FORWARD ? bytes_of<DB>(2, Tile<DB>::F) : bytes_of<DB>(4, Tile<DB>::B); }
int64_t shared_bytes(int64_t launch, int64_t D) {
    const Launch l = (Launch)launch;
    if (l > BACKWARD_QUERIES) return -1;
    return D <= 64 ? bytes_of<64>(l) : D <= 128 ? bytes_of<128>(l) : bytes_of<256>(l);
}

#ifdef __CUDACC__
template <class T, int DB, int N> __device__ void load(float* tile, const T* x, int64_t stride, int row0, int rows, int D) {
    for (int e = threadIdx.x; e < N * DB; e += 256) {
        const int r = e / DB, d = e % DB;
        tile[r * PITCH<DB> + d] = row0 + r < rows && d < D ? to_float(x[(row0 + r) * stride + d]) : 0.f;
    }
}
// acc[r][c] = sum over d of a[row r][d] * b[row c][d]
template <int DB, int R> __device__ void dots(float (&acc)[R][R], const float* a, const float* b, int ty, int tx) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < R; c++) acc[r][c] = 0;
#pragma unroll 4
    for (int d = 0; d < DB; d += 4) {
        float4 x[R], y[R];
#pragma unroll
        for (int r = 0; r < R; r++) x[r] = *(const float4*)(a + (ty + 16 * r) * PITCH<DB> + d), y[r] = *(const float4*)(b + (tx + 16 * r) * PITCH<DB> + d);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < R; c++) acc[r][c] = fmaf(x[r].x, y[c].x, fmaf(x[r].y, y[c].y, fmaf(x[r].z, y[c].z, fmaf(x[r].w, y[c].w, acc[r][c]))));
    }
}
// acc[r][4 c + e] += sum over n of p[row r][n] * x[n][4 tx + 64 c + e]
template <int DB, int R> __device__ void add_rows(float (&acc)[R][DB / 16], const float* p, const float* x, int ty, int tx) {
#pragma unroll 4
    for (int n = 0; n < 16 * R; n++) {
        float w[R];
#pragma unroll
        for (int r = 0; r < R; r++) w[r] = p[(ty + 16 * r) * (16 * R + 1) + n];
#pragma unroll
        for (int c = 0; c < DB / 64; c++) {
            const float4 y = *(const float4*)(x + n * PITCH<DB> + 4 * tx + 64 * c);
#pragma unroll
            for (int r = 0; r < R; r++) {
                acc[r][4 * c] = fmaf(w[r], y.x, acc[r][4 * c]), acc[r][4 * c + 1] = fmaf(w[r], y.y, acc[r][4 * c + 1]);
                acc[r][4 * c + 2] = fmaf(w[r], y.z, acc[r][4 * c + 2]), acc[r][4 * c + 3] = fmaf(w[r], y.w, acc[r][4 * c + 3]);
            }
        }
    }
}
template <int R> __device__ void put(float* p, const float (&x)[R][R], int ty, int tx) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < R; c++) p[(ty + 16 * r) * (16 * R + 1) + tx + 16 * c] = x[r][c];
}
template <class T, int DB, int R> __device__ void store(const Rows& to, int b, int h, int row0, int rows, int D, const float (&acc)[R][DB / 16], const float (&by)[R], int ty, int tx) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int e = 0; e < DB / 16; e++) {
            const int row = row0 + ty + 16 * r, d = 4 * tx + 64 * (e / 4) + e % 4;
            if (row < rows && d < D) to.at<T>(b, h)[row * to.n + d] = from_float<T>(acc[r][e] * by[r]);
        }
}

template <class T, int DB, int R> __global__ void __launch_bounds__(256, 1) forward_kernel(const Flash f) {
    constexpr int N = 16 * R;
    extern __shared__ float smem[];
    float *q = smem, *kv = q + N * PITCH<DB>, *p = kv + N * PITCH<DB>;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, tiles = tiles_of(f.T, N), tile = tiles - 1 - blockIdx.x % tiles, i0 = tile * N;
    const int bh = blockIdx.x / tiles, b = bh / f.H, h = bh % f.H, hk = h / f.group;
    load<T, DB, N>(q, f.q.at<const T>(b, h), f.q.n, i0, f.T, f.D);
    Run seen[R];
    float m[R], l[R], o[R][DB / 16] = {};
#pragma unroll
    for (int r = 0; r < R; r++) seen[r] = i0 + ty + 16 * r < f.T ? keys_of(f, b, i0 + ty + 16 * r) : Run{0, 0}, m[r] = -INFINITY, l[r] = 0;
    const Span t = span_of([&](int i) { return keys_of(f, b, i); }, i0, N, f.T, N);
    for (int jt = t.begin; jt < t.end; jt++) {
        const int j0 = jt * N;
        __syncthreads();
        load<T, DB, N>(kv, f.k.at<const T>(b, hk), f.k.n, j0, f.S, f.D);
        __syncthreads();
        float s[R][R];
        dots<DB, R>(s, q, kv, ty, tx);
#pragma unroll
        for (int r = 0; r < R; r++) {
            float top = m[r];
#pragma unroll
            for (int c = 0; c < R; c++) {
                const int j = j0 + tx + 16 * c;
                s[r][c] = j >= seen[r].lo && j < seen[r].hi ? s[r][c] * f.scale : -INFINITY;
                top = fmaxf(top, s[r][c]);
            }
            for (int w = 8; w; w >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
            const float base = top == -INFINITY ? 0.f : top, shrink = expf(m[r] - base);
            float sum = 0;
#pragma unroll
            for (int c = 0; c < R; c++) s[r][c] = expf(s[r][c] - base), sum += s[r][c];
            m[r] = top, l[r] = l[r] * shrink + lane_sum(sum, 16);
#pragma unroll
            for (int e = 0; e < DB / 16; e++) o[r][e] *= shrink;
        }
        put<R>(p, s, ty, tx);
        __syncthreads();
        load<T, DB, N>(kv, f.v.at<const T>(b, hk), f.v.n, j0, f.S, f.D);
        __syncthreads();
        add_rows<DB, R>(o, p, kv, ty, tx);
    }
    float by[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        by[r] = l[r] > 0 ? 1 / l[r] : 0;
        const int i = i0 + ty + 16 * r;
        if (tx == 0 && i < f.T) f.lse[(int64_t)bh * f.T + i] = l[r] > 0 ? m[r] + logf(l[r]) : -INFINITY;
    }
    store<T, DB, R>(f.o, b, h, i0, f.T, f.D, o, by, ty, tx);
}

// KEYS: the block owns keys, rows are keys and columns queries, and it adds up dk and dv over the group. Else it owns queries, and adds up dq.
template <class T, int DB, int R, bool KEYS> __global__ void __launch_bounds__(256, 1) backward_kernel(const Flash f) {
    constexpr int N = 16 * R;
    extern __shared__ float smem[];
    float *own1 = smem, *own2 = own1 + N * PITCH<DB>, *x1 = own2 + N * PITCH<DB>, *x2 = x1 + N * PITCH<DB>, *p = x2 + N * PITCH<DB>; // k, v and q, g; or the other way round
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, n_own = KEYS ? f.S : f.T, n_other = KEYS ? f.T : f.S, heads = KEYS ? f.Hkv : f.H;
    const int tiles = tiles_of(n_own, N), tile = KEYS ? blockIdx.x % tiles : tiles - 1 - blockIdx.x % tiles, r0 = tile * N;
    const int bh = blockIdx.x / tiles, b = bh / heads, h = bh % heads;
    load<T, DB, N>(own1, (KEYS ? f.k : f.q).template at<const T>(b, h), (KEYS ? f.k : f.q).n, r0, n_own, f.D);
    load<T, DB, N>(own2, (KEYS ? f.v : f.g).template at<const T>(b, h), (KEYS ? f.v : f.g).n, r0, n_own, f.D);
    auto run = [&](int r) { return KEYS ? queries_of(f, b, r) : keys_of(f, b, r); };
    Run seen[R];
    float d1[R][DB / 16] = {}, d2[R][DB / 16] = {}; // dk and dv, or dq
#pragma unroll
    for (int r = 0; r < R; r++) seen[r] = r0 + ty + 16 * r < n_own ? run(r0 + ty + 16 * r) : Run{0, 0};
    const Span t = span_of(run, r0, N, n_own, N);
    for (int g = 0; g < (KEYS ? f.group : 1); g++) {
        const int hx = KEYS ? h * f.group + g : h / f.group, hq = KEYS ? hx : h;
        const float *lse = f.lse + ((int64_t)b * f.H + hq) * f.T, *delta = f.delta + ((int64_t)b * f.H + hq) * f.T;
        for (int ct = t.begin; ct < t.end; ct++) {
            const int c0 = ct * N;
            __syncthreads();
            load<T, DB, N>(x1, (KEYS ? f.q : f.k).template at<const T>(b, hx), (KEYS ? f.q : f.k).n, c0, n_other, f.D);
            load<T, DB, N>(x2, (KEYS ? f.g : f.v).template at<const T>(b, hx), (KEYS ? f.g : f.v).n, c0, n_other, f.D);
            __syncthreads();
            float s[R][R], dp[R][R];
            dots<DB, R>(s, own1, x1, ty, tx);
            dots<DB, R>(dp, own2, x2, ty, tx);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < R; c++) {
                    const int row = r0 + ty + 16 * r, col = c0 + tx + 16 * c, i = KEYS ? col : row;
                    const bool in = col >= seen[r].lo && col < seen[r].hi;
                    s[r][c] = in ? expf(__fmul_rn(s[r][c], f.scale) - lse[i]) : 0.f;
                    dp[r][c] = in ? s[r][c] * (dp[r][c] - delta[i]) : 0.f;
                }
            if (KEYS) {
                put<R>(p, s, ty, tx);
                __syncthreads();
                add_rows<DB, R>(d2, p, x2, ty, tx);
                __syncthreads();
            }
            put<R>(p, dp, ty, tx);
            __syncthreads();
            add_rows<DB, R>(d1, p, x1, ty, tx);
        }
    }
    float by[R], one[R];
#pragma unroll
    for (int r = 0; r < R; r++) by[r] = f.scale, one[r] = 1;
    store<T, DB, R>(KEYS ? f.dk : f.dq, b, h, r0, n_own, f.D, d1, by, ty, tx);
    if (KEYS) store<T, DB, R>(f.dv, b, h, r0, n_own, f.D, d2, one, ty, tx);
}

struct Plain {
    static constexpr bool VEC = false;
    static int64_t scratch(const Flash&) { return 0; }
    static int64_t backward_scratch(const Flash& f) { return (int64_t)f.B * f.H * f.T; }
    template <class T, int DB> static void run(const Flash& f, bool back, cudaStream_t s) {
        constexpr int RF = Tile<DB>::F, RB = Tile<DB>::B;
        if (!back) {
            constexpr int N = 16 * RF, bytes = bytes_of<DB>(FORWARD);
            static_assert(bytes + OWN_MOST <= SMALL);
            allow_smem((const void*)forward_kernel<T, DB, RF>, bytes);
            forward_kernel<T, DB, RF><<<f.B * f.H * tiles_of(f.T, N), 256, bytes, s>>>(f);
        } else {
            constexpr int N = 16 * RB, bytes = bytes_of<DB>(BACKWARD_KEYS);
            static_assert(bytes + OWN_MOST <= SMALL);
            run_delta<T>(f, false, s);
            allow_smem((const void*)backward_kernel<T, DB, RB, true>, bytes);
            allow_smem((const void*)backward_kernel<T, DB, RB, false>, bytes);
            if (f.S) backward_kernel<T, DB, RB, true><<<f.B * f.Hkv * tiles_of(f.S, N), 256, bytes, s>>>(f);
            if (f.T) backward_kernel<T, DB, RB, false><<<f.B * f.H * tiles_of(f.T, N), 256, bytes, s>>>(f);
        }
    }
    static void dispatch(ScalarType type, const Flash& f, bool back, cudaStream_t s) {
        STD_TORCH_CHECK(f.D <= 256, "flash: head_dim must be at most 256");
        DISPATCH(type, "flash", {
            if (f.D <= 64) run<T, 64>(f, back, s);
            else if (f.D <= 128) run<T, 128>(f, back, s);
            else run<T, 256>(f, back, s);
        });
    }
};
#endif
FLASH_OPS(Plain)
