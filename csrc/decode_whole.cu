// A whole step of decoding in one kernel: all layers and the head, one block on each multiprocessor, up to 8 rows in bfloat16, on Hopper.
// One warp does nothing but fetch: it walks through the block's share of all weights in the order of their use, 16 KiB at a time, into a ring in
// shared memory (bulk copies that report to a barrier), and runs ahead as far as the ring allows, most of a layer. It never waits for an activation.
// Eight warps compute: they take their first weights into registers, wait for the activations, norm them in shared memory, multiply, and add up what the
// warps have.
// There is no barrier between blocks, no fence and no counter: an activation says itself that it is there. Two neighbours are one word; before a step
// every word is EMPTY, two NaNs that no conversion to bfloat16 yields, and a reader reads until it finds something else. Each layer has its own
// activations, in two sets: a step works in one and empties the other for the next. What a cut of attention found goes the same way, with a number beside
// each value that is new in every layer of every step.
// It rounds where the ordinary path does, after a norm's 1/rms too, which decode.cu takes into the sums; probabilities are float32.
#include "decode.cuh"
#include <algorithm>

constexpr int PART = 1024, ROW = 2 * PART + 64, SLOT = 8 * ROW; // columns of a unit; bytes of its row (64 more, so that 8 rows lie in different banks); of a unit
// How a block's shared memory is dealt: the ring's slots, what lies behind them, activations of a row, the table of layers. Less than 3 slots: it does not fit
constexpr int LAYER = 16 * 8, LEAST = 3, MOST = 16;
struct Deal { int64_t columns, work, table, slots, bytes; };
inline Deal deal(int64_t B, int64_t H, int64_t Hkv, int64_t D, int64_t E, int64_t F, int64_t layers, int64_t limit) {
    Deal d{};
    d.columns = ceil_div(std::max(E, std::min(std::max(F, H * D), (int64_t)4096)), PART) * PART;
    d.work = 2 * 4 * WARPS * B * (6 * 8 + 8) + query_bytes(H / Hkv <= 2 ? 2 : 4, D, 2) + 2 * B * (d.columns + 32);
    d.table = layers * LAYER;
    d.slots = std::clamp((limit - OWN_MOST - d.work - d.table) / SLOT, (int64_t)0, (int64_t)MOST);
    d.bytes = d.slots * SLOT + d.work + d.table;
    return d;
}

#ifdef __CUDACC__
[[maybe_unused]] constexpr unsigned EMPTY = ~0u;

struct Layer { const bf16 *attn_norm, *wq, *wk, *wv, *bq, *bk, *bv, *q_norm, *k_norm, *wo, *ffn_norm, *w_gate, *w_up, *w_down; bf16 *k, *v; };
struct Whole {
    const Layer* layers;
    int n_layers, E, F, V, slots, work, columns;                 // of the ring; bytes behind it; activations of a row that shared memory holds
    const bf16 *final_norm, *head, *x;
    bf16 *flow, *logits;                                         // flow: [2][layers] of [B, (H + 2 Hkv) D], [B, H D], [B, E], [B, F], [B, E]
    float2* best;
    int* bad;
    unsigned long long* count;                                   // blocks that have begun, ever
    Attend a;
};

static_assert(sizeof(Layer) == LAYER);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ unsigned shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_wait(unsigned bar, unsigned parity) {
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void compute_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); } // the eight computing warps

// Words that other blocks write while this one looks
__device__ __forceinline__ uint4 look16(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ unsigned look4(const void* p) {
    unsigned v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint2 look8(const void* p) {
    unsigned long long v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return {(unsigned)v, (unsigned)(v >> 32)};
}
__device__ __forceinline__ void show4(void* p, unsigned v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
__device__ __forceinline__ void show8(void* p, unsigned v, unsigned tag) { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"((unsigned long long)tag << 32 | v) : "memory"); }
__device__ __forceinline__ bool empty(const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)) == EMPTY; } // one word of it
// What a lane with an even channel and the next lane have, as one word, by all lanes of a warp
__device__ __forceinline__ void show_pair(bool in, int channel, bf16* y, float v) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(v, __shfl_down_sync(~0u, v, 1));
    if (in && channel % 2 == 0) show4(y, *reinterpret_cast<const unsigned*>(&pair));
}
// Where a ring stands: its next slot, and how often it has gone round
struct Ring {
    unsigned full, empty;                                        // barriers, one of each for a slot
    unsigned char* data;
    int slots, slot = 0;
    unsigned turn = 0;
    unsigned long long policy = 0;                               // of the second-level cache for what is fetched
    __device__ __forceinline__ void next() { if (++slot == slots) slot = 0, turn ^= 1; }
    // Producer: one unit of `rows` rows of `bytes` bytes that lie `stride` bytes apart; `to` is their distance in the slot
    __device__ __forceinline__ void fetch(const void* from, int rows, int bytes, int64_t stride, int to, int lane) {
        if (lane == 0) {
            barrier_wait(empty + 8 * slot, turn ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + 8 * slot), "r"(rows * bytes) : "memory");
        }
        __syncwarp();
        if (lane < rows)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared(data + slot * SLOT + lane * to)), "l"(static_cast<const char*>(from) + lane * stride), "r"(bytes), "r"(full + 8 * slot), "l"(policy) : "memory");
        next();
    }
    // Consumer
    __device__ __forceinline__ const unsigned char* take() { barrier_wait(full + 8 * slot, turn); return data + slot * SLOT; }
    // Every lane releases what it has read (racecheck follows threads, not warps); then acquire by one of the fetching warp, __syncwarp, copies by its lanes
    __device__ __forceinline__ void give() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * slot) : "memory");
        next();
    }
};
struct Product {
    const bf16 *gain, *w[3], *bias[3];
    int end[2], K, N;
    const bf16 *x, *old;
    bf16* y;
    bool x_there, old_there;                                     // written before this kernel began
};
template <int NT, int MODE> struct Tiles {
    static constexpr bool NORM = MODE != ADD;
    static constexpr int OUT = MODE == SWIGLU ? NT / 2 : NT, LINE = NT * 8 + 8;
    // The producer's half of a product
    static __device__ __forceinline__ void fetch(Ring& ring, const Product& p, int lane) {
        const int groups = (p.N + 8 * OUT - 1) / (8 * OUT), parts = (p.K + PART - 1) / PART;
#pragma unroll 1
        for (int group = blockIdx.x; group < groups; group += gridDim.x)
#pragma unroll 1
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
    // The computing half. Each thread fetches some of the activations into `xb`, normed if there is a norm
    static __device__ __forceinline__ void compute(Ring& ring, const Product& p, const Whole& s, float*& red, float*& other, float (*squared)[8], bf16* xb) {
        const int thread = threadIdx.x, K = p.K;
        const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4, B = s.a.B, line = s.columns + 32; // 64 bytes more than a row, so that 2 rows lie in different banks
        const int groups = (p.N + 8 * OUT - 1) / (8 * OUT), parts = (K + PART - 1) / PART, held = s.columns / PART;
        const auto look_again = [&](uint4 (&v)[4], auto in, auto at) {         // at all that are missing, at once
            for (bool missing = !p.x_there; missing;) {
                missing = false;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (in(i) && empty(v[i])) missing = true, v[i] = look16(at(i));
                }
            }
        };
        const auto fill = [&](int k0) {                                        // as they are
            const int pieces = (min(s.columns, K - k0) + 7) / 8, n = B * pieces;
#pragma unroll 1
            for (int i0 = thread; i0 < n; i0 += 4 * THREADS) {
                uint4 v[4];
                int b[4], c[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int k = i0 + i * THREADS;
                    if (k >= n) continue;
                    b[i] = B == 1 ? 0 : k / pieces, c[i] = (k - b[i] * pieces) * 8;
                    v[i] = look16(p.x + (int64_t)b[i] * K + k0 + c[i]);
                }
                look_again(v, [&](int i) { return i0 + i * THREADS < n; }, [&](int i) { return p.x + (int64_t)b[i] * K + k0 + c[i]; });
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (i0 + i * THREADS < n) *reinterpret_cast<uint4*>(xb + b[i] * line + c[i]) = v[i];
                }
            }
        };
        const auto gain = [&](int c) { return __ldg(reinterpret_cast<const uint4*>(p.gain + c)); };
        const auto fill_normed = [&] {
            float ss[8] = {};
            uint4 first{};
            if (thread * 8 < K) first = gain(thread * 8);
#pragma unroll 1
            for (int c = thread * 8; c < K; c += THREADS * 8) {
#pragma unroll
                for (int h = 0; h < 8; h += 4) {
                    if (h >= B) break;
                    uint4 v[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (h + i < B) v[i] = look16(p.x + (int64_t)(h + i) * K + c);
                    }
                    look_again(v, [&](int i) { return h + i < B; }, [&](int i) { return p.x + (int64_t)(h + i) * K + c; });
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (h + i >= B) continue;
                        ss[h + i] += squares<bf16>(v[i]);
                        *reinterpret_cast<uint4*>(xb + (h + i) * line + c) = v[i];
                    }
                }
            }
#pragma unroll
            for (int b = 0; b < 8; b++) {
                if (b >= B) break;
                ss[b] = lane_sum(ss[b], 32);
                if (lane == 0) squared[warp][b] = ss[b];
            }
            compute_sync();
#pragma unroll 1
            for (int b = 0; b < B; b++) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) sum += squared[w][b];
                const float r = __frsqrt_rn(sum / K + s.a.eps);
#pragma unroll 1
                for (int c = thread * 8; c < K; c += THREADS * 8) {
                    uint4* at = reinterpret_cast<uint4*>(xb + b * line + c);
                    *at = normed<bf16>(*at, r, c == thread * 8 ? first : gain(c));
                }
            }
        };
        bool finite = true;
        float best = -INFINITY;
        int best_id = 0x7fffffff;
#pragma unroll 1
        for (int group = blockIdx.x; group < groups; group += gridDim.x) {
            const int e = thread, b = e / (8 * OUT), tile = e % (8 * OUT) / 8, n = group * 8 * OUT + e % (8 * OUT); // the output of this thread
            const bool mine = b < B && n < p.N;
            const bf16* old_at = MODE == ADD ? p.old + (int64_t)b * p.N + n - n % 2 : nullptr;
            unsigned old = 0;
            if (MODE == ADD && mine) old = look4(old_at);
            float bias = 0;
            if (MODE == STORE && mine) {
                const bf16* from = n < p.end[0] ? p.bias[0] : n < p.end[1] ? p.bias[1] : p.bias[2];
                if (from) bias = to_float(from[n < p.end[0] ? n : n < p.end[1] ? n - p.end[0] : n - p.end[1]]);
            }
            float acc[NT][2] = {};
#pragma unroll 1
            for (int part = 0; part < parts; part++) {
                constexpr int TWO = NT > 1 ? 2 : 1;
                uint4 w[TWO][4];
                const auto load_tile = [&](uint4 (&to)[4]) {                   // out of the ring, whose place is free again at once
                    const unsigned char* from = ring.take() + g * ROW;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int k = (j * WARPS + warp) * 32 + t * 8;
                        to[j] = part * PART + k < K ? *reinterpret_cast<const uint4*>(from + k * 2) : uint4{};
                    }
                    ring.give();
                };
#pragma unroll
                for (int i = 0; i < TWO; i++) load_tile(w[i]);                 // while the activations are under way
                if (part % held == 0 && (group == (int)blockIdx.x || parts > held)) {
                    if (part || group != (int)blockIdx.x) compute_sync();
                    if (NORM) fill_normed();
                    else fill(part * PART);
                    compute_sync();
                }
                uint4 x[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int k = (j * WARPS + warp) * 32 + t * 8;
                    x[j] = g < B && part * PART + k < K ? *reinterpret_cast<const uint4*>(xb + g * line + part % held * PART + k) : uint4{};
                }
#pragma unroll
                for (int i = 0; i < NT; i += 2) {                              // 16 rows of weights, two tiles, against 8 rows of the batch; four short chains
                    float sum[4][4] = {};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const uint4 lo = w[0][j], hi = TWO == 2 ? w[TWO - 1][j] : uint4{};
                        mma(sum[j % 2 * 2], lo.x, hi.x, lo.y, hi.y, x[j].x, x[j].y);
                        mma(sum[j % 2 * 2 + 1], lo.z, hi.z, lo.w, hi.w, x[j].z, x[j].w);
                    }
                    if (i + 2 < NT) {
#pragma unroll
                        for (int k = 0; k < TWO; k++) load_tile(w[k]);
                    }
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        acc[i][c] += (sum[0][c] + sum[1][c]) + (sum[2][c] + sum[3][c]);
                        if (TWO == 2) acc[i + TWO - 1][c] += (sum[0][2 + c] + sum[1][2 + c]) + (sum[2][2 + c] + sum[3][2 + c]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < NT; i++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    if (2 * t + c < B) red[((2 * t + c) * WARPS + warp) * LINE + i * 8 + g] = acc[i][c];
                }
            }
            compute_sync();
            if (warp * 32 < 8 * OUT * B) {
                const auto total = [&](int tile) {
                    float sum = 0;
#pragma unroll
                    for (int w = 0; w < WARPS; w++) sum += red[(b * WARPS + w) * LINE + tile * 8 + e % 8];
                    return sum;
                };
                float v = 0;
                if (mine) {
                    v = round_to<bf16>(total(tile) + (MODE == STORE ? bias : 0.f));
                    if (MODE == ADD) {
                        while (!p.old_there && old == EMPTY) old = look4(old_at);
                        v += __bfloat162float(__ushort_as_bfloat16((unsigned short)(n % 2 ? old >> 16 : old)));
                    }
                    if (MODE == SWIGLU) v = v / (1.f + expf(-v)) * round_to<bf16>(total(tile + OUT));
                    if (MODE == LOGITS) {
                        p.y[(int64_t)b * p.N + n] = from_float<bf16>(v);
                        finite = finite && fabsf(v) < INFINITY;
                        if (v > best) best = v, best_id = n;
                    }
                }
                if (MODE != LOGITS) show_pair(mine, n, p.y + (int64_t)b * p.N + n, v);
            }
            float* const swap = red;                                           // who comes here again has passed a `compute_sync` after this
            red = other, other = swap;
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
        }
    }
};
#endif

// 12 warps: eight compute; of the four others one fetches, and their registers go to the eight
constexpr int ALL = THREADS + 128;
template <int G> __global__ void __launch_bounds__(ALL, 1) whole_kernel(const __grid_constant__ Whole s) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using A = Attention<bf16, G, 16, 1>;
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ __align__(8) unsigned long long bars[2][16];
    __shared__ float squared[WARPS][8];
    __shared__ unsigned long long ticket;
    __shared__ typename A::Shared at_shared;
    const int lane = threadIdx.x % 32, E = s.E, F = s.F, B = s.a.B, QD = s.a.H * s.a.D, KD = s.a.Hkv * s.a.D;
    if (threadIdx.x < 2 * s.slots) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&bars[threadIdx.x % 2][threadIdx.x / 2])), "r"(threadIdx.x % 2 ? THREADS : 1) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    uint4* table = reinterpret_cast<uint4*>(smem + s.slots * SLOT + s.work);    // `layers`, where reading it takes no time
    for (int i = threadIdx.x; i < s.n_layers * (int)(sizeof(Layer) / 16); i += ALL) table[i] = __ldg(reinterpret_cast<const uint4*>(s.layers) + i);
    const Layer* layers = reinterpret_cast<const Layer*>(table);
    __syncthreads();
    Ring ring{shared(bars[0]), shared(bars[1]), smem, s.slots, 0, 0};
    int used = 0;
#pragma unroll 1
    for (int b = 0; b < B; b++) used = max(used, s.a.at[b] / CUT + 1);
    const int group = s.a.H / s.a.Hkv, heads = s.a.Hkv * ((group + G - 1) / G), items = B * heads * used;
    const auto item = [&](A& a, int i) { return a.begin(i / (heads * used), i / used % heads, i % used); };
    const int64_t of_layer = (int64_t)B * (2 * QD + 2 * KD + 2 * E + F);
    bf16* flow = s.flow;
    const auto layer = [&](int i, int which) {
        const Layer& l = layers[i];
        bf16 *qkv = flow + i * of_layer, *mixed = qkv + B * (QD + 2 * KD), *between = mixed + B * QD, *inner = between + B * E, *out = inner + B * F;
        const bf16* in = i ? out - of_layer : s.x;
        Product p{};
        if (which == 0) p = {l.attn_norm, {l.wq, l.wk, l.wv}, {l.bq, l.bk, l.bv}, {QD, QD + KD}, E, QD + 2 * KD, in, nullptr, qkv, i == 0, true};
        if (which == 1) p = {nullptr, {l.wo}, {}, {}, QD, E, mixed, in, between, false, i == 0};
        if (which == 2) p = {l.ffn_norm, {l.w_gate, l.w_up}, {}, {}, E, F, between, nullptr, inner, false, true};
        if (which == 3) p = {nullptr, {l.w_down}, {}, {}, F, E, inner, between, out, false, false};
        return p;
    };
    const auto last = [&] { return Product{s.final_norm, {s.head}, {}, {}, E, s.V, flow + s.n_layers * of_layer - B * E, nullptr, s.logits, false, true}; };
    if (threadIdx.x >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x >= THREADS + 32) return;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(ring.policy)); // all of it is read once a step: it shall not drive out what is written and read at once
#pragma unroll 1
        for (int i = 0; i < s.n_layers; i++) {
            const Layer& l = layers[i];
            const int lines = (2 * E + 63) / 64, of = blockIdx.x + lane * gridDim.x; // the next layer's norms, on their way to where they are near
            if (of < lines) {
                const bool more = i + 1 < s.n_layers;
                const int64_t c = of * 64;
                const bf16* gain = c < E ? (more ? layers[i + 1].attn_norm : s.final_norm) + c : more ? layers[i + 1].ffn_norm + (c - E) : nullptr;
                if (gain) asm volatile("prefetch.global.L2 [%0];" ::"l"(gain));
            }
            Tiles<4, STORE>::fetch(ring, layer(i, 0), lane);
            for (int n = blockIdx.x; n < items; n += gridDim.x) {
                A a(s.a);
                if (item(a, n)) {
                    const int rows = min(CUT, s.a.S - a.cut * CUT);
                    const int64_t o = a.base + (int64_t)a.cut * CUT * s.a.D;
                    ring.fetch(l.k + o, 1, rows * s.a.D * 2, 0, 0, lane);
                    ring.fetch(l.v + o, 1, rows * s.a.D * 2, 0, 0, lane);
                }
            }
            Tiles<1, ADD>::fetch(ring, layer(i, 1), lane);
            Tiles<6, SWIGLU>::fetch(ring, layer(i, 2), lane);
            Tiles<1, ADD>::fetch(ring, layer(i, 3), lane);
        }
        Tiles<4, LOGITS>::fetch(ring, last(), lane);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (threadIdx.x == 0) ticket = atomicAdd(s.count, 1ull) / gridDim.x;       // how many steps there were before
    compute_sync();
    const unsigned step = (unsigned)ticket;
    {
        const int64_t n = s.n_layers * of_layer;
        uint4* const next = reinterpret_cast<uint4*>(flow + (step % 2 ? 0 : n));
        for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < n / 8; i += gridDim.x * THREADS) next[i] = {EMPTY, EMPTY, EMPTY, EMPTY};
        if (step % 2) flow += n;
    }
    unsigned char* const work = smem + s.slots * SLOT;                         // what attention needs, then twice the sums of the warps
    float *red = reinterpret_cast<float*>(work + A::bytes(s.a.D)), *other = red + WARPS * B * Tiles<6, SWIGLU>::LINE;
    bf16* const xb = reinterpret_cast<bf16*>(other + WARPS * B * Tiles<6, SWIGLU>::LINE);
#pragma unroll 1
    for (int i = 0; i < s.n_layers; i++) {
        const Layer& l = layers[i];
        Tiles<4, STORE>::compute(ring, layer(i, 0), s, red, other, squared, xb);
#pragma unroll 1
        for (int n = blockIdx.x; n < items; n += gridDim.x) {
            A a(s.a);
            a.p.k = l.k, a.p.v = l.v, a.p.q_gain = l.q_norm, a.p.k_gain = l.k_norm, a.p.qkv = flow + i * of_layer;
            if (!item(a, n)) continue;
            const int D = s.a.D;
            bf16* const y = flow + i * of_layer + B * (QD + 2 * KD);
            const bool owner = a.cut == a.used - 1;                            // has the new key, and joins what the others found
            const unsigned tag = step * s.n_layers + i + 1;
            char *const values = reinterpret_cast<char*>(s.a.part), *const weights = values + 8ll * B * s.a.H * s.a.cuts * D;
            const unsigned char* tile[2];
            const auto sync = [] { compute_sync(); };
            a.tables();
            a.prepare(work, owner, sync, [](const bf16* from) {
                uint4 v;
                do v = look16(from); while (empty(v));
                return v;
            });
            a.add(work, [&](int kv) {
                if (kv) ring.give();                                       // every lane has read its keys
                tile[kv] = ring.take();
            }, [&](int n, int kv) { return *reinterpret_cast<const uint4*>(tile[kv] + ((n * A::SUBS + a.sub) * D + a.c * 8) * 2); });
            ring.give();
            a.leave(work, at_shared, sync, [&](bool in, int64_t row, int d, float x, float weight) {
                const int64_t cut0 = row * s.a.cuts;
                if (!owner) {
                    const auto bits = [](float f) { return __float_as_uint(f); };
                    if (in) {
                        show8(values + 8 * ((cut0 + a.cut) * D + d), bits(x), tag);
                        if (d == 0) show8(weights + 8 * (cut0 + a.cut), bits(weight), tag);
                    }
                    return;
                }
                if (a.used > 1 && in) {
                    Joined all;
#pragma unroll 1
                    for (int i0 = 0; i0 < a.used; i0 += 8) {
                        uint2 ws[8], ys[8];
                        float w[8], y[8];
#pragma unroll
                        for (int i = 0; i < 8; i++) {
                            if (i0 + i >= a.cut) continue;
                            ws[i] = look8(weights + 8 * (cut0 + i0 + i)), ys[i] = look8(values + 8 * ((cut0 + i0 + i) * D + d));
                        }
#pragma unroll
                        for (int i = 0; i < 8; i++) {
                            w[i] = i0 + i == a.cut ? weight : -INFINITY, y[i] = i0 + i == a.cut ? x : 0.f;
                            if (i0 + i >= a.cut) continue;
                            while (ws[i].y != tag) ws[i] = look8(weights + 8 * (cut0 + i0 + i));
                            while (ys[i].y != tag) ys[i] = look8(values + 8 * ((cut0 + i0 + i) * D + d));
                            w[i] = __uint_as_float(ws[i].x), y[i] = __uint_as_float(ys[i].x);
                        }
                        all.take(w, y);
                    }
                    x = all.x / all.l;
                }
                show_pair(in, d, y + row * D + d, x);
            });
        }
        Tiles<1, ADD>::compute(ring, layer(i, 1), s, red, other, squared, xb);
        Tiles<6, SWIGLU>::compute(ring, layer(i, 2), s, red, other, squared, xb);
        Tiles<1, ADD>::compute(ring, layer(i, 3), s, red, other, squared, xb);
    }
    Tiles<4, LOGITS>::compute(ring, last(), s, red, other, squared, xb);
#else
    __trap();                                                    // not code for this card: better to stop than to leave memory as it was
#endif
}

// All layers and the head: `layers` holds 16 addresses for each (see `Layer`), `flow` [2, layers, ...] (see `Whole`) full of ones before the first step, `part` twice as
// large as the chain's, `best` [B, blocks, 2]; one block for each of `blocks`, at most one on a multiprocessor
void whole(const Tensor& layers, const Tensor& final_norm, const Tensor& head, const Tensor& x, Tensor& flow, Tensor& logits, Tensor& best, Tensor& bad, Tensor& count,
           const Tensor& cos, const Tensor& sin, const Tensor& k, const Tensor& v, const Tensor& at, const Tensor& pad, Tensor& part, int64_t heads, int64_t ffn, double eps) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Whole s{};
    s.layers = (const Layer*)layers.const_data_ptr(); s.n_layers = (int)layers.size(0); s.E = (int)x.size(1); s.F = (int)ffn; s.V = (int)logits.size(1);
    s.final_norm = (const bf16*)final_norm.const_data_ptr(); s.head = (const bf16*)head.const_data_ptr();
    s.x = (const bf16*)x.const_data_ptr(); s.flow = (bf16*)flow.mutable_data_ptr(); s.logits = (bf16*)logits.mutable_data_ptr();
    s.best = (float2*)best.mutable_data_ptr(); s.bad = (int*)bad.mutable_data_ptr(); s.count = (unsigned long long*)count.mutable_data_ptr();
    s.a = attend_of(x, x, x, cos, sin, k, v, at, pad, part, part, flow, eps);
    s.a.H = (int)heads;
    const int group = s.a.H / s.a.Hkv, blocks = (int)best.size(1), sms = sm_count();
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16 && s.a.B <= 8 && s.a.D <= 128 && blocks <= sms, "decode: a whole step takes up to 8 rows in bfloat16, head_dim up to 128, a block for each multiprocessor");
    STD_TORCH_CHECK(flow.numel() == 2ll * s.n_layers * s.a.B * (2 * (s.a.H + s.a.Hkv) * s.a.D + 2 * s.E + s.F), "decode: `flow` has another size");
    STD_TORCH_CHECK(part.numel() >= 2ll * s.a.B * s.a.H * s.a.cuts * (s.a.D + 1), "decode: `part` is too small");
    const auto go = [&](auto g) {
        constexpr int G = decltype(g)::value;
        const Deal d = deal(s.a.B, s.a.H, s.a.Hkv, s.a.D, s.E, s.F, s.n_layers, smem_limit());
        STD_TORCH_CHECK(d.slots >= LEAST, "decode: not enough shared memory for a whole step");
        s.columns = (int)d.columns, s.work = (int)d.work, s.slots = (int)d.slots;
        const int bytes = (int)d.bytes;
        allow_smem((const void*)whole_kernel<G>, bytes);
        cudaLaunchAttribute together{};
        together.id = cudaLaunchAttributeCooperative;                          // all blocks at once, or some would wait for ever for what the others write
        together.val.cooperative = 1;
        cudaLaunchConfig_t c{};
        c.gridDim = dim3(blocks); c.blockDim = dim3(ALL); c.dynamicSmemBytes = bytes; c.stream = stream_of(x); c.attrs = &together; c.numAttrs = 1;
        cudaLaunchKernelEx(&c, whole_kernel<G>, s);
    };
    STD_TORCH_CHECK(is_hopper((const void*)whole_kernel<2>), "decode: no code for this card in a library of a whole step");
    if (group <= 2) go(std::integral_constant<int, 2>{});
    else go(std::integral_constant<int, 4>{});
    check_launch("decode, a whole step");
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) { m.impl("whole", TORCH_BOX(&whole)); }
#endif

// Bytes of shared memory that a whole step asks for on a card that gives a block `limit` (0: on the current one, and -1 if that has no code of ours); -1: it does not fit, the chain does it
int64_t whole_shared(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t dim, int64_t ffn, int64_t layers, int64_t limit) {
#ifdef __CUDACC__
    if (!limit) {
        if (!is_hopper((const void*)whole_kernel<2>)) return -1;
        limit = smem_limit();
    }
#endif
    const Deal d = deal(rows, heads, kv_heads, head_dim, dim, ffn, layers, limit);
    return d.slots >= LEAST ? d.bytes : -1;
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CompositeExplicitAutograd, m) { m.impl("whole_shared", TORCH_BOX(&whole_shared)); }

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("whole_shared(int rows, int heads, int kv_heads, int head_dim, int dim, int ffn, int layers, int limit) -> int");
    m.def("whole(Tensor layers, Tensor final_norm, Tensor head, Tensor x, Tensor(a!) flow, Tensor(b!) logits, Tensor(c!) best, Tensor(d!) bad, Tensor(e!) count, "
          "Tensor cos, Tensor sin, Tensor k, Tensor v, Tensor at, Tensor pad, Tensor(f!) part, int heads, int ffn, float eps) -> ()");
}
