// AdamW over any number of tensors: a master, its gradient and both moments are read once and written once, a copy in another
// dtype goes out in the same pass. Bytes per parameter in float32: 16 read, 12 written; 2 more for a bf16 copy.
// The norm of all gradients is summed in float64 in a fixed order; the clip factor, the step counts and everything that
// depends on them are computed on the device, so the host never waits and a CUDA graph may replay the step.
// Bits are those of torch's single-tensor AdamW on a GPU: `update` is its eight routines in a row, each rounded as there.
#include "common.cuh"
#include <algorithm>
#include <cmath>
#include <type_traits>

// One rounding per operation: a compiler may otherwise turn a * b + c into one fused operation, with other bits.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
#else
template <class T> inline T rounded(T x) { volatile T y = x; return y; }
template <class T> inline T mul(T a, T b) { return rounded(a * b); }
template <class T> inline T add(T a, T b) { return rounded(a + b); }
using std::fma; using std::sqrt;
#endif

// What a step multiplies by: the same for all elements of a tensor. `divides` says how torch divides a tensor by a number:
// 0 does, 1 multiplies by the float32 reciprocal, 2 by the reciprocal in float64 rounded once.
struct alignas(16) Factors { float decay, w1, b2, w2, eps, minus_step_size, root, clip; int divides, ok, pad[2]; };

HD void update(float& p, float& m, float& v, float g, const Factors& f) {
    g = mul(g, f.clip);
    p = mul(p, f.decay);
    const float d = add(g, -m);
    m = f.w1 < .5f ? fma(f.w1, d, m) : fma(-d, add(1.f, -f.w1), g);                 // lerp: from the nearer end
    v = fma(f.w2, mul(g, g), mul(v, f.b2));
    const float s = sqrt(v), u = add(f.divides ? mul(s, f.root) : s / f.root, f.eps);
    p = fma(f.minus_step_size, m / u, p);
}

// b^n with twice the digits of a double, then rounded: equal to the host's pow but for one case in billions
HD double power(double b, int64_t n) {
    double h = 1, l = 0, bh = b, bl = 0;
    for (; n; n >>= 1) {
        const double p = h * bh, e = fma(h, bh, -p) + (h * bl + l * bh), q = bh * bh, k = fma(bh, bh, -q) + 2 * bh * bl;
        if (n & 1) { h = p + e; l = e - (h - p); }
        bh = q + k; bl = k - (bh - q);
    }
    return h + l;
}

// lr, beta1, beta2, eps, weight decay of a group
struct Hyper { double lr, b1, b2, eps, decay; };

HD Factors factors(const Hyper& h, double step, double norm, double max_norm, int divides) {
    const double bc1 = 1 - power(h.b1, (int64_t)step), root = sqrt(1 - power(h.b2, (int64_t)step));
    Factors f;
    f.decay = (float)add(1., -mul(h.lr, h.decay));
    f.w1 = (float)add(1., -h.b1); f.b2 = (float)h.b2; f.w2 = (float)add(1., -h.b2); f.eps = (float)h.eps;
    f.minus_step_size = (float)-(h.lr / bc1);
    f.root = divides == 0 ? (float)root : divides == 1 ? 1.f / (float)root : (float)(1 / root);
    f.clip = norm > max_norm ? (float)(max_norm / norm) : 1.f;
    f.divides = divides;
    return f;
}

#ifdef __CUDACC__
constexpr int64_t STEP = 1 << 12, SUM = 1 << 13;                    // elements that a block takes care of
constexpr int FEW = 48, MANY = 480;                                 // tensors of one launch; the table travels as the kernel's argument, so a graph keeps it

template <int N> struct Table { int n, base; int first[N + 1]; int64_t size[N]; };   // first: block where a tensor begins
template <int N> struct Grads { Table<N> t; const void* g[N]; };
template <int N> struct Sets { Table<N> t; float *p[N], *m[N], *v[N]; const void* g[N]; void* c[N]; };
template <int N> struct Counts { int n, base; float* step[N]; Hyper h[N]; int group[N]; };

// the tensor of a block: the last one that begins at or before it
template <int N> __device__ __forceinline__ int tensor_of(const Table<N>& t, int block) {
    int lo = 0, hi = t.n;
    while (hi - lo > 1) { const int mid = (lo + hi) >> 1; if (t.first[mid] <= block) lo = mid; else hi = mid; }
    return lo;
}
template <class T> __device__ __forceinline__ bool aligned(const T* p, int n) { return !(reinterpret_cast<uintptr_t>(p) & (sizeof(T) * n - 1)); }

// Sum of the squares of each chunk. A thread takes the same elements whether the tensor is aligned or not, so the bits are the same.
template <class G, int N> __global__ void __launch_bounds__(512) square_sums(const __grid_constant__ Grads<N> a, double* __restrict__ part) {
    constexpr int VEC = 16 / sizeof(G);
    __shared__ double smem[16];
    const int t = tensor_of(a.t, blockIdx.x);
    const int64_t start = (blockIdx.x - a.t.first[t]) * SUM;
    const int n = (int)min(SUM, a.t.size[t] - start);
    const G* g = static_cast<const G*>(a.g[t]) + start;
    const bool fast = aligned(g, VEC);
    double s = 0;
#pragma unroll 4
    for (int i = threadIdx.x * VEC; i < n; i += 512 * VEC) {
        Vec<G, VEC> x;
        if (fast && i + VEC <= n) x = Vec<G, VEC>::load(g + i);
        else
#pragma unroll
            for (int k = 0; k < VEC; k++) x.v[k] = i + k < n ? g[i + k] : from_float<G>(0.f);
#pragma unroll
        for (int k = 0; k < VEC; k++) { const double y = x[k]; s = fma(y, y, s); }
    }
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if ((threadIdx.x & 31) == 0) smem[threadIdx.x >> 5] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 16; w++) s += smem[w];
        part[a.t.base + blockIdx.x] = s;
    }
}
__global__ void __launch_bounds__(1024) root_of_sum(const double* __restrict__ part, int64_t parts, double* __restrict__ norm) {
    __shared__ double smem[32];
    double s = 0;
    for (int64_t i = threadIdx.x; i < parts; i += 1024) s += part[i];
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if ((threadIdx.x & 31) == 0) smem[threadIdx.x >> 5] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 32; w++) s += smem[w];
        *norm = sqrt(s);
    }
}

// One thread for each tensor: counts the step and computes its factors. A norm that is not finite, or `stop` once set, leaves all as it is.
template <int N> __global__ void prepare(const __grid_constant__ Counts<N> a, const void* __restrict__ lr, int lr_kind, int64_t lr_stride,
                                         const double* __restrict__ norm, double max_norm, float* stop, int divides, Factors* __restrict__ out) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= a.n) return;
    const double length = norm ? *norm : 0.;
    const bool ok = isfinite(length) && !(stop && *stop != 0.f);
    if (stop && !isfinite(length)) *stop = 1.f;
    Hyper h = a.h[t];
    if (lr_kind) h.lr = lr_kind == 1 ? (double)static_cast<const float*>(lr)[a.group[t] * lr_stride] : static_cast<const double*>(lr)[a.group[t] * lr_stride];
    const float step = *a.step[t] + 1.f;
    if (ok) *a.step[t] = step;
    Factors f = factors(h, step, length, max_norm, divides);
    f.ok = ok;
    out[a.base + t] = f;
}

template <class G, class C, int N> __global__ void __launch_bounds__(512) step_kernel(const __grid_constant__ Sets<N> a, const Factors* __restrict__ all) {
    constexpr int VEC = 4;
    const int t = tensor_of(a.t, blockIdx.x);
    const Factors f = all[a.t.base + t];
    if (!f.ok) return;
    const int64_t start = (blockIdx.x - a.t.first[t]) * STEP;
    const int n = (int)min(STEP, a.t.size[t] - start);
    float *p = a.p[t] + start, *m = a.m[t] + start, *v = a.v[t] + start;
    const G* g = static_cast<const G*>(a.g[t]) + start;
    C* c = a.c[t] ? static_cast<C*>(a.c[t]) + start : nullptr;
    const int fast = aligned(p, VEC) && aligned(m, VEC) && aligned(v, VEC) && aligned(g, VEC) && aligned(c, VEC) ? n / VEC * VEC : 0;
#pragma unroll 2
    for (int i = threadIdx.x * VEC; i < fast; i += 512 * VEC) {
        Vec<float, VEC> vp = Vec<float, VEC>::load(p + i), vm = Vec<float, VEC>::load(m + i), vv = Vec<float, VEC>::load(v + i);
        const Vec<G, VEC> vg = Vec<G, VEC>::load(g + i);
        Vec<C, VEC> vc;
#pragma unroll
        for (int k = 0; k < VEC; k++) { update(vp.v[k], vm.v[k], vv.v[k], vg[k], f); vc.set(k, vp.v[k]); }
        vp.store(p + i); vm.store(m + i); vv.store(v + i);
        if (c) vc.store(c + i);
    }
    for (int i = fast + threadIdx.x; i < n; i += 512) {
        float pp = p[i], mm = m[i], vv = v[i];
        update(pp, mm, vv, to_float(g[i]), f);
        p[i] = pp; m[i] = mm; v[i] = vv;
        if (c) c[i] = from_float<C>(pp);
    }
}
#endif

using Tensors = std::vector<Tensor>;
namespace {

bool same_strides(const Tensor& a, const Tensor& b) {
    if (a.dim() != b.dim()) return false;
    for (int64_t d = 0; d < a.dim(); d++) if (a.sizes()[d] != b.sizes()[d] || (a.sizes()[d] > 1 && a.strides()[d] != b.strides()[d])) return false;
    return true;
}
Tensor dense_like(const Tensor& x, const Tensor& like) {                        // x, element for element in the memory order of `like`
    Tensor y = torch::stable::empty_like(like);
    torch::stable::copy_(y, x);
    return y;
}
bool is_dense(const Tensor& x) {                                                // no gaps and no overlaps, in any order of the axes
    std::vector<std::pair<int64_t, int64_t>> axes;
    for (int64_t d = 0; d < x.dim(); d++) if (x.sizes()[d] > 1) axes.emplace_back(x.strides()[d], x.sizes()[d]);
    std::sort(axes.begin(), axes.end());
    int64_t n = 1;
    for (auto [stride, size] : axes) { if (stride != n) return false; n *= size; }
    return true;
}

// One parameter of a step. Kinds of gradient and copy: 0 float32, 1 bfloat16, 2 float16.
struct Row { float *p, *m, *v, *step; const void* g; void* c; int64_t n; int gkind, ckind, group; };

int kind_of(const Tensor& x) {
    switch (x.scalar_type()) {
        case ScalarType::Float: return 0;
        case ScalarType::BFloat16: return 1;
        case ScalarType::Half: return 2;
        default: STD_TORCH_CHECK(false, "adamw: dtype must be float32, bfloat16 or float16"); return 0;
    }
}

// Tensors to rows, each set in one memory order; what had to be copied for that goes back at the end.
struct Work {
    std::vector<Row> rows;
    std::vector<std::pair<Tensor, Tensor>> back;
    Tensors held;
    Work(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs, const Tensors& copies, const Tensors& steps, const std::vector<int64_t>& ends) {
        const size_t N = params.size();
        STD_TORCH_CHECK(grads.size() == N && exp_avgs.size() == N && exp_avg_sqs.size() == N && steps.size() == N && (copies.empty() || copies.size() == N), "adamw: lists of different length");
        STD_TORCH_CHECK(!ends.empty() && ends.back() == (int64_t)N, "adamw: the groups do not cover the parameters");
        for (size_t i = 0, k = 0; i < N; i++) {
            while ((int64_t)i >= ends[k]) k++;
            const Tensor& p = params[i];
            STD_TORCH_CHECK(p.scalar_type() == ScalarType::Float && exp_avgs[i].scalar_type() == ScalarType::Float && exp_avg_sqs[i].scalar_type() == ScalarType::Float && steps[i].scalar_type() == ScalarType::Float,
                            "adamw: masters, moments and step counts must be float32");
            if (p.numel() == 0) continue;
            for (const Tensor* x : {&grads[i], &exp_avgs[i], &exp_avg_sqs[i]}) STD_TORCH_CHECK(x->numel() == p.numel() && x->get_device_index() == p.get_device_index(), "adamw: parameter ", i, " and its gradient or moments differ in size or device");
            STD_TORCH_CHECK(steps[i].get_device_index() == p.get_device_index() && (copies.empty() || copies[i].get_device_index() == p.get_device_index()), "adamw: the step count or the copy of parameter ", i, " is on another device");
            const Tensor q = is_dense(p) ? p : replace(p, p), m = same_strides(exp_avgs[i], q) ? exp_avgs[i] : replace(exp_avgs[i], q), v = same_strides(exp_avg_sqs[i], q) ? exp_avg_sqs[i] : replace(exp_avg_sqs[i], q);
            if (!same_strides(grads[i], q)) held.push_back(dense_like(grads[i], q));
            const Tensor& g = same_strides(grads[i], q) ? grads[i] : held.back();
            const bool copy = !copies.empty() && (copies[i].scalar_type() != ScalarType::Float || copies[i].const_data_ptr() != p.const_data_ptr());
            STD_TORCH_CHECK(!copy || same_strides(copies[i], q), "adamw: copy ", i, " differs from its master in shape or memory order");
            auto at = [](const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); };
            rows.push_back({at(q), at(m), at(v), at(steps[i]), g.const_data_ptr(), copy ? copies[i].mutable_data_ptr() : nullptr, p.numel(), kind_of(g), copy ? kind_of(copies[i]) : 0, (int)k});
        }
    }
    Tensor replace(const Tensor& x, const Tensor& like) { back.emplace_back(x, dense_like(x, like)); return back.back().second; }
    void finish() { for (auto& [x, y] : back) torch::stable::copy_(x, y); }
};

// Rows that have a gradient only; `held` keeps alive what had to be copied
std::vector<Row> rows_of(const Tensors& grads, Tensors& held) {
    std::vector<Row> rows;
    for (const Tensor& g : grads) {
        STD_TORCH_CHECK(g.get_device_index() == grads[0].get_device_index(), "grad_norm: gradients of several devices");
        if (g.numel() == 0) continue;
        held.push_back(is_dense(g) ? g : dense_like(g, g));
        Row r{};
        r.g = held.back().const_data_ptr(); r.n = g.numel(); r.gkind = kind_of(g);
        rows.push_back(r);
    }
    return rows;
}

// From addresses: int64 [9, n] on the CPU, lines p, g, m, v, copy (0: none), step, size, kind of gradient * 3 + kind of copy, group
std::vector<Row> rows_of(const Tensor& table) {
    STD_TORCH_CHECK(table.scalar_type() == ScalarType::Long && table.is_contiguous() && table.dim() == 2 && table.sizes()[0] == 9, "adamw: the table must be int64 [9, n] on the CPU");
    const int64_t n = table.sizes()[1], *t = static_cast<const int64_t*>(table.const_data_ptr());
    std::vector<Row> rows;
    rows.reserve(n);
    auto at = [&](int line, int64_t i) { return reinterpret_cast<void*>(t[line * n + i]); };
    auto f = [&](int line, int64_t i) { return static_cast<float*>(at(line, i)); };
    for (int64_t i = 0; i < n; i++)
        if (t[6 * n + i]) rows.push_back({f(0, i), f(2, i), f(3, i), f(5, i), at(1, i), at(4, i), t[6 * n + i], (int)t[7 * n + i] / 3, (int)t[7 * n + i] % 3, (int)t[8 * n + i]});
    return rows;
}

std::vector<Hyper> hypers(const Tensor& h, const std::vector<Row>& rows) {
    STD_TORCH_CHECK(h.scalar_type() == ScalarType::Double && h.is_contiguous() && h.dim() == 2 && h.sizes()[1] == 5, "adamw: hyper must be float64 on the CPU, 5 numbers for each group");
    const size_t groups = h.sizes()[0];
    for (const Row& r : rows) STD_TORCH_CHECK(r.group >= 0 && r.group < (int)groups, "adamw: more groups than hyper has");
    const double* d = static_cast<const double*>(h.const_data_ptr());
    std::vector<Hyper> r;
    for (size_t k = 0; k < groups; k++, d += 5) r.push_back({d[0], d[1], d[2], d[3], d[4]});
    return r;
}
} // namespace

#ifdef __CUDACC__
namespace {
// Call f(first, last, N) for stretches of at most MANY rows, FEW where they are enough
template <class F> void stretches(size_t n, F f) {
    if (n <= FEW) { if (n) f(size_t(0), n, std::integral_constant<int, FEW>()); return; }
    for (size_t i = 0; i < n; i += MANY) f(i, std::min(n, i + MANY), std::integral_constant<int, MANY>());
}
template <int N> int fill(Table<N>& t, const Row* rows, int n, int64_t base, int64_t chunk) {
    int64_t blocks = 0;
    t.n = n; t.base = (int)base;
    for (int i = 0; i < n; i++) { t.first[i] = (int)blocks; t.size[i] = rows[i].n; blocks += ceil_div(rows[i].n, chunk); }
    STD_TORCH_CHECK(base + blocks < (int64_t(1) << 31), "adamw: more than 2^31 blocks");
    t.first[n] = (int)blocks;
    return (int)blocks;
}
template <class G> void launch_norm(const std::vector<Row>& rows, double* part, int64_t& base, cudaStream_t s) {
    stretches(rows.size(), [&](size_t from, size_t to, auto N) {
        Grads<N()> a;
        const int blocks = fill(a.t, &rows[from], (int)(to - from), base, SUM);
        for (size_t i = from; i < to; i++) a.g[i - from] = rows[i].g;
        square_sums<G><<<blocks, 512, 0, s>>>(a, part);
        base += blocks;
    });
}
template <class G, class C> void launch_step(const std::vector<Row>& rows, const Factors* f, int64_t& base, cudaStream_t s) {
    stretches(rows.size(), [&](size_t from, size_t to, auto N) {
        Sets<N()> a;
        const int blocks = fill(a.t, &rows[from], (int)(to - from), base, STEP);
        for (size_t i = from; i < to; i++) { const int k = (int)(i - from); const Row& r = rows[i]; a.p[k] = r.p; a.m[k] = r.m; a.v[k] = r.v; a.g[k] = r.g; a.c[k] = r.c; }
        step_kernel<G, C><<<blocks, 512, 0, s>>>(a, f);
        base += (int64_t)(to - from);
    });
}

Tensor norm_of(const std::vector<Row>& rows, const Tensor& like) {
    std::vector<Row> sets[3];                                       // gradients of one dtype stand together
    int64_t parts = 0, base = 0;
    for (const Row& r : rows) { sets[r.gkind].push_back(r); parts += ceil_div(r.n, SUM); }
    torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
    const cudaStream_t s = stream_of(like);
    Tensor part = torch::stable::new_empty(like, {parts + 1}, ScalarType::Double), norm = torch::stable::new_empty(like, {}, ScalarType::Double);
    double* d = static_cast<double*>(part.mutable_data_ptr());
    launch_norm<float>(sets[0], d, base, s); launch_norm<bf16>(sets[1], d, base, s); launch_norm<half_t>(sets[2], d, base, s);
    root_of_sum<<<1, 1024, 0, s>>>(d, parts, static_cast<double*>(norm.mutable_data_ptr()));
    check_launch("grad_norm");
    return norm;
}

void step_of(const std::vector<Row>& rows, const Tensor& like, const Tensor& hyper, const std::optional<Tensor>& lr, const std::optional<Tensor>& norm, double max_norm, const std::optional<Tensor>& stop, int64_t divides) {
    if (rows.empty()) return;
    torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
    const cudaStream_t s = stream_of(like);
    const std::vector<Hyper> h = hypers(hyper, rows);
    int lr_kind = 0; int64_t lr_stride = 0;
    if (lr) {
        STD_TORCH_CHECK(lr->is_contiguous() && (lr->numel() == 1 || lr->numel() == (int64_t)h.size()) && lr->get_device_index() == like.get_device_index(), "adamw: lr must be one number, or one for each group, on the parameters' device");
        STD_TORCH_CHECK(lr->scalar_type() == ScalarType::Float || lr->scalar_type() == ScalarType::Double, "adamw: lr must be float32 or float64");
        lr_kind = lr->scalar_type() == ScalarType::Float ? 1 : 2; lr_stride = lr->numel() == 1 ? 0 : 1;
    }
    std::vector<Row> sets[3][3], all;                               // rows of one kind stand together
    for (const Row& r : rows) {
        STD_TORCH_CHECK(r.gkind == 0 || r.gkind == r.ckind, "adamw: a gradient must be float32 or of its copy's dtype");
        sets[r.gkind][r.ckind].push_back(r);
    }
    for (auto& line : sets) for (auto& set : line) all.insert(all.end(), set.begin(), set.end());
    Tensor buffer = torch::stable::new_empty(like, {(int64_t)(all.size() * sizeof(Factors))}, ScalarType::Byte);
    Factors* f = static_cast<Factors*>(buffer.mutable_data_ptr());
    stretches(all.size(), [&](size_t from, size_t to, auto N) {
        Counts<N()> a;
        a.n = (int)(to - from); a.base = (int)from;
        for (size_t i = from; i < to; i++) { const int k = (int)(i - from); a.step[k] = all[i].step; a.h[k] = h[all[i].group]; a.group[k] = all[i].group; }
        prepare<<<(int)ceil_div(a.n, 128), 128, 0, s>>>(a, lr ? lr->const_data_ptr() : nullptr, lr_kind, lr_stride, norm ? static_cast<const double*>(norm->const_data_ptr()) : nullptr, max_norm,
                                                        stop ? static_cast<float*>(stop->mutable_data_ptr()) : nullptr, (int)divides, f);
    });
    int64_t base = 0;
    launch_step<float, float>(sets[0][0], f, base, s); launch_step<float, bf16>(sets[0][1], f, base, s); launch_step<float, half_t>(sets[0][2], f, base, s);
    launch_step<bf16, bf16>(sets[1][1], f, base, s); launch_step<half_t, half_t>(sets[2][2], f, base, s);
    check_launch("adamw_");
}
} // namespace

// Length of all gradients together, float64
Tensor grad_norm_cuda(Tensors grads) {
    STD_TORCH_CHECK(!grads.empty(), "grad_norm: no gradients");
    Tensors held;
    return norm_of(rows_of(grads, held), grads[0]);
}
Tensor grad_norm_at_cuda(Tensor like, Tensor table) { return norm_of(rows_of(table), like); }

// copies: [] or one for each parameter (the parameter itself: none). ends: the parameters of group k end at ends[k].
// hyper [groups, 5] on the CPU; lr: on the device, one for all groups or one for each, instead of hyper's. norm: as `grad_norm` gave it.
void adamw_cuda(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensors steps, std::vector<int64_t> ends, Tensor hyper, std::optional<Tensor> lr,
                std::optional<Tensor> norm, double max_norm, std::optional<Tensor> stop, int64_t divides) {
    if (params.empty()) return;
    Work w(params, grads, exp_avgs, exp_avg_sqs, copies, steps, ends);
    step_of(w.rows, params[0], hyper, lr, norm, max_norm, stop, divides);
    w.finish();
}
// The same by address, which is what the optimizer calls: to hand over 1,500 tensors takes a millisecond, their addresses a tenth of it
void adamw_at_cuda(Tensor like, Tensor table, Tensor hyper, std::optional<Tensor> lr, std::optional<Tensor> norm, double max_norm, std::optional<Tensor> stop, int64_t divides) {
    step_of(rows_of(table), like, hyper, lr, norm, max_norm, stop, divides);
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("grad_norm", TORCH_BOX(&grad_norm_cuda));
    m.impl("grad_norm_at", TORCH_BOX(&grad_norm_at_cuda));
    m.impl("adamw_", TORCH_BOX(&adamw_cuda));
    m.impl("adamw_at_", TORCH_BOX(&adamw_at_cuda));
}
#endif

// The same arithmetic in a plain loop on a CPU: so that the kernel's own code is checked where there is no GPU.
namespace {
float number(const void* x, int kind, int64_t i) {
    return kind == 0 ? static_cast<const float*>(x)[i] : kind == 1 ? (float)static_cast<const torch::headeronly::BFloat16*>(x)[i] : (float)static_cast<const torch::headeronly::Half*>(x)[i];
}
Tensor norm_on_cpu(const std::vector<Row>& rows, const Tensor& like) {
    double s = 0;
    for (const Row& r : rows)
        for (int64_t i = 0; i < r.n; i++) { const double x = number(r.g, r.gkind, i); s = fma(x, x, s); }
    Tensor norm = torch::stable::new_empty(like, {}, ScalarType::Double);
    *static_cast<double*>(norm.mutable_data_ptr()) = sqrt(s);
    return norm;
}
void step_on_cpu(const std::vector<Row>& rows, const Tensor& hyper, const std::optional<Tensor>& lr, const std::optional<Tensor>& norm, double max_norm, const std::optional<Tensor>& stop, int64_t divides) {
    std::vector<Hyper> h = hypers(hyper, rows);
    for (size_t k = 0; lr && k < h.size(); k++) {
        const void* x = lr->const_data_ptr();
        const size_t at = lr->numel() == 1 ? 0 : k;
        h[k].lr = lr->scalar_type() == ScalarType::Float ? (double)static_cast<const float*>(x)[at] : static_cast<const double*>(x)[at];
    }
    const double length = norm ? *static_cast<const double*>(norm->const_data_ptr()) : 0.;
    float* flag = stop ? static_cast<float*>(stop->mutable_data_ptr()) : nullptr;
    const bool ok = std::isfinite(length) && !(flag && *flag != 0.f);
    if (flag && !std::isfinite(length)) *flag = 1.f;
    if (!ok) return;
    for (const Row& r : rows) {
        const Factors f = factors(h[r.group], *r.step += 1.f, length, max_norm, (int)divides);
        for (int64_t k = 0; k < r.n; k++) {
            update(r.p[k], r.m[k], r.v[k], number(r.g, r.gkind, k), f);
            if (!r.c) continue;
            if (r.ckind == 0) static_cast<float*>(r.c)[k] = r.p[k];
            else if (r.ckind == 1) static_cast<torch::headeronly::BFloat16*>(r.c)[k] = r.p[k];
            else static_cast<torch::headeronly::Half*>(r.c)[k] = r.p[k];
        }
    }
}
} // namespace

Tensor grad_norm_cpu(Tensors grads) {
    STD_TORCH_CHECK(!grads.empty(), "grad_norm: no gradients");
    Tensors held;
    return norm_on_cpu(rows_of(grads, held), grads[0]);
}
Tensor grad_norm_at_cpu(Tensor like, Tensor table) { return norm_on_cpu(rows_of(table), like); }
void adamw_cpu(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensors steps, std::vector<int64_t> ends, Tensor hyper, std::optional<Tensor> lr,
               std::optional<Tensor> norm, double max_norm, std::optional<Tensor> stop, int64_t divides) {
    if (params.empty()) return;
    Work w(params, grads, exp_avgs, exp_avg_sqs, copies, steps, ends);
    step_on_cpu(w.rows, hyper, lr, norm, max_norm, stop, divides);
    w.finish();
}
void adamw_at_cpu(Tensor, Tensor table, Tensor hyper, std::optional<Tensor> lr, std::optional<Tensor> norm, double max_norm, std::optional<Tensor> stop, int64_t divides) {
    step_on_cpu(rows_of(table), hyper, lr, norm, max_norm, stop, divides);
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CPU, m) {
    m.impl("grad_norm", TORCH_BOX(&grad_norm_cpu));
    m.impl("grad_norm_at", TORCH_BOX(&grad_norm_at_cpu));
    m.impl("adamw_", TORCH_BOX(&adamw_cpu));
    m.impl("adamw_at_", TORCH_BOX(&adamw_at_cpu));
}

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("grad_norm(Tensor[] grads) -> Tensor");
    m.def("adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] copies, Tensor(e!)[] steps, int[] ends, Tensor hyper, Tensor? lr, Tensor? norm, float max_norm, "
          "Tensor(f!)? stop, int divides) -> ()");
    m.def("grad_norm_at(Tensor like, Tensor table) -> Tensor");
    m.def("adamw_at_(Tensor like, Tensor table, Tensor hyper, Tensor? lr, Tensor? norm, float max_norm, Tensor(a!)? stop, int divides) -> ()");
}
