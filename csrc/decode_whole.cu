// A whole step of decoding in one kernel: all layers and the head, one block on each multiprocessor, up to 8 rows in bfloat16, on Hopper.
// One warp does nothing but fetch: it walks through the block's share of all weights in the order of their use, 16 KiB at a time, into a ring in
// shared memory (bulk copies that report to a barrier), and runs ahead as far as the ring allows, most of a layer. It never waits for an activation.
// Eight warps compute: they wait at a barrier of the whole grid where a layer needs what other blocks computed, five times a layer, and find their
// weights there already. The tiles and the rounding are those of decode.cu.
#include "decode.cuh"

#ifdef __CUDACC__
constexpr int PART = 1024, ROW = 2 * PART + 64, SLOT = 8 * ROW; // columns of a unit; bytes of its row (64 more, so that 8 rows lie in different banks); of a unit
constexpr int PACE = 1600;                                       // see `Ring::pace`

struct Layer { const bf16 *attn_norm, *wq, *wk, *wv, *bq, *bk, *bv, *q_norm, *k_norm, *wo, *ffn_norm, *w_gate, *w_up, *w_down; bf16 *k, *v; };
struct Whole {
    const Layer* layers;
    int n_layers, E, F, V, slots, work, pace;
    const bf16 *final_norm, *head;
    bf16 *x, *qkv, *mixed, *inner, *logits;
    float2* best;
    int* bad;
    unsigned long long* arrived;                                 // blocks that have come to a barrier, ever
    Attend a;
};

#if __CUDA_ARCH__ / 100 == 9
constexpr int KEEP = 2; // units of x that registers hold
__device__ __forceinline__ unsigned shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_wait(unsigned bar, unsigned parity) {
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void compute_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); } // the eight computing warps
// Where a ring stands: its next slot, and how often it has gone round
struct Ring {
    unsigned full, empty;                                        // barriers, one of each for a slot
    unsigned char* data;
    int slots, slot = 0;
    unsigned turn = 0;
    int pace = 0;                                                // clock cycles between two units at least
    long long last = 0;
    __device__ __forceinline__ void next() { if (++slot == slots) slot = 0, turn ^= 1; }
    // Producer: one unit of `rows` rows of `bytes` bytes that lie `stride` bytes apart; `to` is their distance in the slot
    __device__ __forceinline__ void fetch(const void* from, int rows, int bytes, int64_t stride, int to, int lane) {
        if (lane == 0) {
            barrier_wait(empty + 8 * slot, turn ^ 1);
            while (clock64() - last < pace);
            last = clock64();
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + 8 * slot), "r"(rows * bytes) : "memory");
        }
        __syncwarp();
        if (lane < rows)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared(data + slot * SLOT + lane * to)), "l"(static_cast<const char*>(from) + lane * stride), "r"(bytes), "r"(full + 8 * slot) : "memory");
        next();
    }
    // Consumer
    __device__ __forceinline__ const unsigned char* take() { barrier_wait(full + 8 * slot, turn); return data + slot * SLOT; }
    __device__ __forceinline__ void give(int lane) {
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * slot) : "memory");
        next();
    }
};
// The barrier of the grid, in two halves
struct Grid {
    unsigned long long *count, target;
    __device__ __forceinline__ void arrive() { asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(count) : "memory"); } // by one thread, for what its block has written
    __device__ __forceinline__ void wait() {                                                                                                      // by all eight warps
        if (threadIdx.x == 0) {
            unsigned long long n;
            do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(n) : "l"(count) : "memory"); while (n < target);
        }
        target += gridDim.x;
        compute_sync();
    }
};
struct Product {
    const bf16 *gain, *w[3], *bias[3];
    int end[2], K, N;
    const bf16* x;
    bf16* y;
};
template <int NT, int MODE> struct Tiles {
    static constexpr int OUT = MODE == SWIGLU ? NT / 2 : NT, LINE = NT * 8 + 8;
    // The producer's half of a product
    static __device__ __forceinline__ void fetch(Ring& ring, const Product& p, int lane) {
        const int groups = (p.N + 8 * OUT - 1) / (8 * OUT), parts = (p.K + PART - 1) / PART;
        for (int group = blockIdx.x; group < groups; group += gridDim.x)
            for (int part = 0; part < parts; part++)
#pragma unroll 1
                for (int i = 0; i < NT; i++) {
                    const int n = (group * OUT + i % OUT) * 8;
                    const bf16* w = MODE == SWIGLU && i >= OUT ? p.w[1] : p.w[0];
                    int r = n;
                    if (MODE == STORE && n >= p.end[1]) w = p.w[2], r -= p.end[1];
                    else if (MODE == STORE && n >= p.end[0]) w = p.w[1], r -= p.end[0];
                    ring.fetch(w + (int64_t)r * p.K + part * PART, max(0, min(8, p.N - n)), 2 * min(PART, p.K - part * PART), 2ll * p.K, ROW, lane);
                }
    }
    // The computing half; waits for the grid first, and arrives there in the end
    static __device__ __forceinline__ void compute(Ring& ring, Grid& grid, const Product& p, const Whole& s, float* red, float (*squared)[8], bool wait) {
        constexpr bool NORM = MODE != ADD;
        constexpr int KS = NORM ? 1 : KEEP;                                    // of these products K is the width of the stream
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, K = p.K, B = s.a.B;
        const int groups = (p.N + 8 * OUT - 1) / (8 * OUT), parts = (K + PART - 1) / PART;
        const auto column = [&](int part, int step) { return part * PART + (step * WARPS + warp) * 32 + t * 8; };
        uint4 xs[KS][4], gains[KS][4];
        const auto load_gains = [&](int p0) {
#pragma unroll
            for (int u = 0; u < KS; u++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int k = column(p0 + u, i);
                    gains[u][i] = k < K ? __ldg(reinterpret_cast<const uint4*>(p.gain + k)) : uint4{};
                }
        };
        const auto load_x = [&](int p0) {
#pragma unroll
            for (int u = 0; u < KS; u++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int k = column(p0 + u, i);
                    xs[u][i] = g < B && k < K ? load_fresh(p.x + (int64_t)g * K + k) : uint4{};
                }
        };
        float r = 0;
        const auto apply_norm = [&] {
            if constexpr (NORM) {
#pragma unroll
                for (int u = 0; u < KS; u++)
#pragma unroll
                    for (int i = 0; i < 4; i++) xs[u][i] = normed<bf16>(xs[u][i], r, gains[u][i]);
            }
        };
        if constexpr (NORM) load_gains(0);
        if (wait) grid.wait();
        if ((int)blockIdx.x < groups) {
            load_x(0);
            if constexpr (NORM) {
                float ss = 0;
                for (int p0 = 0; p0 < parts; p0 += KS) {
                    if (p0) load_x(p0);
#pragma unroll
                    for (int u = 0; u < KS; u++)
#pragma unroll
                        for (int i = 0; i < 4; i++) ss += squares<bf16>(xs[u][i]);
                }
                ss = lane_sum(ss, 4);
                if (t == 0) squared[warp][g] = ss;
                compute_sync();
                ss = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) ss += squared[w][g];
                r = __frsqrt_rn(ss / K + s.a.eps);
                if (parts > KS) load_x(0);
                apply_norm();
            }
        }
        bool have = true, finite = true;
        float best = -INFINITY;
        int best_id = 0x7fffffff;
        for (int group = blockIdx.x; group < groups; group += gridDim.x) {
            const int e = threadIdx.x, b = e / (8 * OUT), tile = e % (8 * OUT) / 8, n = group * 8 * OUT + e % (8 * OUT); // the output of this thread
            const bool mine = b < B && n < p.N;
            float old = 0;
            if (MODE == ADD && mine) old = one_fresh(p.y + (int64_t)b * p.N + n);
            float acc[NT][2] = {};
            for (int p0 = 0; p0 < parts; p0 += KS) {
                if (!have) {
                    if constexpr (NORM) load_gains(p0);
                    load_x(p0);
                    apply_norm();
                }
                have = parts <= KS;
#pragma unroll
                for (int u = 0; u < KS; u++) {
                    if (p0 + u >= parts) break;
#pragma unroll
                    for (int i = 0; i < NT; i++) {
                        const unsigned char* from = ring.take() + g * ROW;
                        uint4 w[4];
#pragma unroll
                        for (int j = 0; j < 4; j++) w[j] = column(p0 + u, j) < K ? *reinterpret_cast<const uint4*>(from + ((j * WARPS + warp) * 32 + t * 8) * 2) : uint4{};
                        ring.give(lane);
                        float sum[4][4] = {};                                  // four short chains instead of a long one
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            mma(sum[j % 2 * 2], xs[u][j].x, 0, xs[u][j].y, 0, w[j].x, w[j].y);
                            mma(sum[j % 2 * 2 + 1], xs[u][j].z, 0, xs[u][j].w, 0, w[j].z, w[j].w);
                        }
#pragma unroll
                        for (int c = 0; c < 2; c++) acc[i][c] += (sum[0][c] + sum[1][c]) + (sum[2][c] + sum[3][c]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < NT; i++)
                if (g < B) *reinterpret_cast<float2*>(red + (warp * 8 + g) * LINE + i * 8 + 2 * t) = {acc[i][0], acc[i][1]};
            compute_sync();
            const auto total = [&](int tile) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) sum += red[(w * 8 + b) * LINE + tile * 8 + e % 8];
                return sum;
            };
            if (mine) {
                float v = total(tile);
                if (MODE == STORE) {
                    const bf16* bias = n < p.end[0] ? p.bias[0] : n < p.end[1] ? p.bias[1] : p.bias[2];
                    if (bias) v += to_float(bias[n < p.end[0] ? n : n < p.end[1] ? n - p.end[0] : n - p.end[1]]);
                }
                v = round_to<bf16>(v);
                bf16* y = p.y + (int64_t)b * p.N + n;
                if (MODE == STORE) *y = from_float<bf16>(v);
                if (MODE == ADD) *y = from_float<bf16>(old + v);
                if (MODE == SWIGLU) *y = from_float<bf16>(v / (1.f + expf(-v)) * round_to<bf16>(total(tile + OUT)));
                if (MODE == LOGITS) {
                    *y = from_float<bf16>(v);
                    finite = finite && fabsf(v) < INFINITY;
                    if (v > best) best = v, best_id = n;
                }
            }
            if (MODE == LOGITS || group + (int)gridDim.x < groups) compute_sync();
        }
        if constexpr (MODE == LOGITS) {
            if (!finite) *s.bad = 1;
#pragma unroll
            for (int o = 16; o; o >>= 1) {
                const float v = __shfl_xor_sync(~0u, best, o);
                const int id = __shfl_xor_sync(~0u, best_id, o);
                if (v > best || (v == best && id < best_id)) best = v, best_id = id;
            }
            if (lane == 0 && warp < B) s.best[(int64_t)warp * gridDim.x + blockIdx.x] = {best, __int_as_float(best_id)};
        } else if (8 * OUT * B <= 32) {                                        // only the first warp has written
            if (warp == 0) {
                __syncwarp();
                if (lane == 0) grid.arrive();
            }
        } else {
            compute_sync();
            if (threadIdx.x == 0) grid.arrive();
        }
    }
};
#endif

// 9 warps: eight compute, one fetches
template <int G> __global__ void __launch_bounds__(THREADS + 32, 1) whole_kernel(const __grid_constant__ Whole s) {
#if __CUDA_ARCH__ / 100 == 9
    using A = Attention<bf16, G, 16, 1>;
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ __align__(8) unsigned long long bars[2][16];
    __shared__ float squared[WARPS][8];
    __shared__ typename A::Shared at_shared;
    const int lane = threadIdx.x % 32, E = s.E, QD = s.a.H * s.a.D, KD = s.a.Hkv * s.a.D;
    if (threadIdx.x < 2 * s.slots) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&bars[threadIdx.x % 2][threadIdx.x / 2])), "r"(threadIdx.x % 2 ? WARPS : 1) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    uint4* table = reinterpret_cast<uint4*>(smem + s.slots * SLOT + s.work);    // `layers`, where reading it takes no time
    for (int i = threadIdx.x; i < s.n_layers * (int)(sizeof(Layer) / 16); i += THREADS + 32) table[i] = __ldg(reinterpret_cast<const uint4*>(s.layers) + i);
    const Layer* layers = reinterpret_cast<const Layer*>(table);
    __syncthreads();
    Ring ring{shared(bars[0]), shared(bars[1]), smem, s.slots, 0, 0, s.pace};
    unsigned char* work = smem + s.slots * SLOT;                               // [8][6][8][8] sums, or what attention needs
    int used = 0;
    for (int b = 0; b < s.a.B; b++) used = max(used, s.a.at[b] / CUT + 1);
    const int group = s.a.H / s.a.Hkv, heads = s.a.Hkv * ((group + G - 1) / G), items = s.a.B * heads * used;
    const auto item = [&](A& a, int i) { return a.begin(i / (heads * used), i / used % heads, i % used); };
    const auto layer = [&](const Layer& l, int which) {
        Product p{};
        if (which == 0) p = {l.attn_norm, {l.wq, l.wk, l.wv}, {l.bq, l.bk, l.bv}, {QD, QD + KD}, E, QD + 2 * KD, s.x, s.qkv};
        if (which == 1) p = {nullptr, {l.wo}, {}, {}, QD, E, s.mixed, s.x};
        if (which == 2) p = {l.ffn_norm, {l.w_gate, l.w_up}, {}, {}, E, s.F, s.x, s.inner};
        if (which == 3) p = {nullptr, {l.w_down}, {}, {}, s.F, E, s.inner, s.x};
        return p;
    };
    const Product last{s.final_norm, {s.head}, {}, {}, E, s.V, s.x, s.logits};
    if (threadIdx.x >= THREADS) {
        for (int i = 0; i < s.n_layers; i++) {
            const Layer& l = layers[i];
            Tiles<4, STORE>::fetch(ring, layer(l, 0), lane);
            for (int n = blockIdx.x; n < items; n += gridDim.x) {
                A a(s.a);
                if (item(a, n)) {
                    const int rows = min(CUT, s.a.S - a.cut * CUT);
                    const int64_t o = a.base + (int64_t)a.cut * CUT * s.a.D;
                    ring.fetch(l.k + o, 1, rows * s.a.D * 2, 0, 0, lane);
                    ring.fetch(l.v + o, 1, rows * s.a.D * 2, 0, 0, lane);
                }
            }
            Tiles<1, ADD>::fetch(ring, layer(l, 1), lane);
            Tiles<6, SWIGLU>::fetch(ring, layer(l, 2), lane);
            Tiles<1, ADD>::fetch(ring, layer(l, 3), lane);
        }
        ring.pace = 0;                                                         // no barrier in the head: as fast as memory can
        Tiles<4, LOGITS>::fetch(ring, last, lane);
        return;
    }
    Grid grid{s.arrived, 0};
    if (threadIdx.x == 0) {                                                    // nobody is past the first barrier before all have come to it
        unsigned long long n;
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(n) : "l"(s.arrived) : "memory");
        grid.target = n - n % gridDim.x + gridDim.x;
    }
    float* red = reinterpret_cast<float*>(work);
    for (int i = 0; i < s.n_layers; i++) {
        const Layer& l = layers[i];
        Tiles<4, STORE>::compute(ring, grid, layer(l, 0), s, red, squared, i > 0);
        bool waited = false;
        for (int n = blockIdx.x; n < items; n += gridDim.x) {
            A a(s.a);
            a.p.k = l.k, a.p.v = l.v, a.p.q_gain = l.q_norm, a.p.k_gain = l.k_norm;
            if (item(a, n)) {
                a.tables();
                if (!waited) grid.wait(), waited = true;
                const unsigned char* tile[2];
                const auto sync = [] { compute_sync(); };
                a.prepare(work, a.cut == a.used - 1, sync);
                a.add(work, [&](int kv) {
                    if (kv) ring.give(lane);                                   // every lane has read its keys
                    tile[kv] = ring.take();
                }, [&](int n, int kv) { return *reinterpret_cast<const uint4*>(tile[kv] + ((n * A::SUBS + a.sub) * s.a.D + a.c * 8) * 2); });
                ring.give(lane);
                a.leave(work, at_shared, sync);
                a.finish(at_shared, sync);
                compute_sync();                                                // `work` is free again
            }
        }
        if (!waited) grid.wait();
        compute_sync();
        if (threadIdx.x == 0) grid.arrive();
        Tiles<1, ADD>::compute(ring, grid, layer(l, 1), s, red, squared, true);
        Tiles<6, SWIGLU>::compute(ring, grid, layer(l, 2), s, red, squared, true);
        Tiles<1, ADD>::compute(ring, grid, layer(l, 3), s, red, squared, true);
    }
    Tiles<4, LOGITS>::compute(ring, grid, last, s, red, squared, true);
#endif
}

// All layers and the head: `layers` holds 16 addresses for each (see `Layer`), `best` [B, blocks, 2]; one block for each of `blocks`, at most one on a multiprocessor
void whole(const Tensor& layers, const Tensor& final_norm, const Tensor& head, Tensor& x, Tensor& qkv, Tensor& mixed, Tensor& inner, Tensor& logits, Tensor& best, Tensor& bad, Tensor& count,
           const Tensor& cos, const Tensor& sin, const Tensor& k, const Tensor& v, const Tensor& at, const Tensor& pad, Tensor& part, Tensor& arrived, double eps) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Whole s{};
    s.layers = (const Layer*)layers.const_data_ptr(); s.n_layers = (int)layers.size(0); s.E = (int)x.size(1); s.F = (int)inner.size(1); s.V = (int)logits.size(1);
    s.final_norm = (const bf16*)final_norm.const_data_ptr(); s.head = (const bf16*)head.const_data_ptr();
    s.x = (bf16*)x.mutable_data_ptr(); s.qkv = (bf16*)qkv.mutable_data_ptr(); s.mixed = (bf16*)mixed.mutable_data_ptr(); s.inner = (bf16*)inner.mutable_data_ptr(); s.logits = (bf16*)logits.mutable_data_ptr();
    s.best = (float2*)best.mutable_data_ptr(); s.bad = (int*)bad.mutable_data_ptr(); s.arrived = (unsigned long long*)count.mutable_data_ptr();
    s.a = attend_of(qkv, qkv, qkv, cos, sin, k, v, at, pad, part, arrived, mixed, eps);
    const int group = s.a.H / s.a.Hkv, blocks = (int)best.size(1), sms = sm_count();
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16 && s.a.B <= 8 && s.a.D <= 128 && blocks <= sms, "decode: a whole step takes up to 8 rows in bfloat16, head_dim up to 128, a block for each multiprocessor");
    const auto go = [&](auto g) {
        constexpr int G = decltype(g)::value;
        const size_t sums = 4 * WARPS * 8 * (6 * 8 + 8), attention = Attention<bf16, G, 16, 1>::bytes(s.a.D);
        s.work = (int)(sums > attention ? sums : attention);
        const int table = s.n_layers * (int)sizeof(Layer);
        s.slots = (smem_limit() - 2048 - s.work - table) / SLOT;
        if (s.slots > 12) s.slots = 12;
        s.pace = PACE;
        STD_TORCH_CHECK(s.slots >= 3, "decode: not enough shared memory for a whole step");
        const int bytes = s.slots * SLOT + s.work + table;
        cudaFuncSetAttribute(whole_kernel<G>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        cudaLaunchAttribute together{};
        together.id = cudaLaunchAttributeCooperative;                          // all blocks at once, or the barriers would wait for ever
        together.val.cooperative = 1;
        cudaLaunchConfig_t c{};
        c.gridDim = dim3(blocks); c.blockDim = dim3(THREADS + 32); c.dynamicSmemBytes = bytes; c.stream = stream_of(x); c.attrs = &together; c.numAttrs = 1;
        cudaLaunchKernelEx(&c, whole_kernel<G>, s);
    };
    if (group <= 2) go(std::integral_constant<int, 2>{});
    else go(std::integral_constant<int, 4>{});
    check_launch("decode, a whole step");
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) { m.impl("whole", TORCH_BOX(&whole)); }
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("whole(Tensor layers, Tensor final_norm, Tensor head, Tensor(a!) x, Tensor(b!) qkv, Tensor(c!) mixed, Tensor(d!) inner, Tensor(e!) logits, Tensor(f!) best, Tensor(g!) bad, Tensor(h!) count, "
          "Tensor cos, Tensor sin, Tensor(i!) k, Tensor(j!) v, Tensor at, Tensor pad, Tensor(k!) part, Tensor(l!) arrived, float eps) -> ()");
}
